//! The kernel's hugetlb pools of a host: the backend of `jumbo pool`.
//!
//! A [`PoolChange`] of a pool becomes a [`PoolPlan`]: the new value of each knob, and its effect.
//! [`knobs`](crate::knobs) records, writes and restores the values.
//!
//! - [`plan`]: changes and plans, pure; [`steer`] for many writes.
//! - [`obstacles()`]: obstacles to growth; [`shortage`]: reasons for missing pages.
//! - [`boot`]: the values for the next boot.
//! - [`holders`]: processes and files that hold the pages.
//!
//! Invariant: only [`knobs`](crate::knobs) writes a knob, under a record.
//!
//! A [`Hugetlb`](jumbo::pool::Hugetlb) pool of this process takes pages from the kernel's pool,
//! which a privileged process can grow:
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
//! let written = steering.set(&Knob::persistent(size, None), to)?;
//! println!("{:?} pages now", written.after);
//! // ... and when its own pool is dropped. After SIGKILL `jumbo pool --undo` does that.
//! steering.put_back()?;
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
