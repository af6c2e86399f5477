//! The kernel's hugetlb pools of a host: what stands behind `jumbo pool`.
//!
//! A change begins as a [`PoolChange`], which with the pool as it is makes a [`PoolPlan`]: which knob gets which value, and what
//! the kernel will do for it. [`knobs`](crate::knobs) writes it, records what was before, and puts that back.
//!
//! - [`plan`]: wishes and plans, and [`steer`] for many writes; pure but for that.
//! - [`obstacles()`]: what speaks against a growth before it is tried; [`shortage`]: why not all pages came.
//! - [`boot`]: the setting for the next boot.
//! - [`holders`]: which processes and files have the pages.
//!
//! Processes are named by [`status`](crate::status). Invariant: no knob is written but by [`knobs`](crate::knobs), under a record.
//!
//! A [`Hugetlb`](jumbo::pool::Hugetlb) pool of this process takes what the kernel's pool has. With the privilege that
//! one can be made larger for it:
//!
//! ```no_run
//! use jumbo_host::host_pools::{obstacles, steer};
//! use jumbo_host::kernel::{Root, hugetlb};
//! use jumbo_host::knobs::{Group, Journal, Knob};
//! use jumbo::units::{PageSize, Pages};
//!
//! let (root, size, more) = (Root::host(), PageSize::SIZE_2M, Pages(512));
//! for obstacle in obstacles(&root, size, None, more) {
//!     eprintln!("{obstacle}");
//! }
//! let journal = Journal::of_user(&root).ok_or("no folder for the record")?;
//! let locked = journal.lock(&Group::pool(size), "my-program")?;
//! let pools = hugetlb::pools(&root)?.unwrap_or_default();
//! let pool = pools.into_iter().find(|pool| pool.size == size).ok_or("no such pool")?;
//! let mut steering = steer(&root, &locked, &pool, "my-program")?;
//! let to = Pages(pool.persistent().0 + more.0);
//! let written = steering.set(&Knob::persistent(size, None), to, &mut ())?;
//! println!("{:?} pages now", written.step.after);
//! // ... and when its own pool is dropped. After SIGKILL `jumbo pool --undo` does that.
//! steering.put_back(&mut ())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod boot;
pub mod holders;
pub mod obstacles;
pub mod plan;
pub mod shortage;

pub use holders::{HeldFile, Holder, Holders};
pub use obstacles::obstacles;
pub use plan::{Amount, Effect, PlanError, PoolChange, PoolPlan, demote, steer};
pub use shortage::{Shortage, is_gigantic};
