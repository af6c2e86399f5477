//! The kernel's hugetlb pools of a host: what stands behind `jumbo pool`.
//!
//! A change begins as a [`Wish`], which with the pool as it is makes a [`Plan`]: which knob gets which
//! value, and what the kernel will do for it. [`carry_out`] writes what the plan says, one write a knob
//! however many pages, and reads each back. Before the first write stands a [`Record`] in the
//! [`Journal`], so that whatever happens to this process the change can be undone.
//!
//! - [`change`]: knobs, wishes, plans; pure but for reading a knob.
//! - [`journal`]: what was before, kept until it is undone.
//! - [`mod@carry`]: writing, reading back, putting back.
//! - [`steering`]: many writes under one record.
//! - [`mod@doubts`]: what speaks against a growth before it is tried; [`shortage`]: why not all pages came.
//! - [`boot`]: the setting for the next boot.
//! - [`holders`]: who has the pages.
//! - [`governor`]: how large a pool should be now.
//!
//! A [`Hugetlb`](super::Hugetlb) pool of this process takes what the kernel's pool has. With the privilege that
//! one can be made larger for it:
//!
//! ```no_run
//! use jumbo::kernel::{Root, hugetlb};
//! use jumbo::pool::host::{Journal, Steering, What, doubts};
//! use jumbo::units::{PageSize, Pages};
//!
//! let (root, size, more) = (Root::host(), PageSize::SIZE_2M, Pages(512));
//! for doubt in doubts(&root, size, None, more) {
//!     eprintln!("{doubt}");
//! }
//! let journal = Journal::of_user(&root).ok_or("no folder for the record")?;
//! let locked = journal.lock(size, "my-program")?;
//! let pools = hugetlb::pools(&root)?.unwrap_or_default();
//! let pool = pools.into_iter().find(|pool| pool.size == size).ok_or("no such pool")?;
//! let mut steering = Steering::begin(&root, &locked, &pool, "my-program", true)?;
//! let written = steering.set(What::Persistent, Pages(pool.persistent().0 + more.0), &mut ())?;
//! println!("{} pages now", written.after);
//! // ... and when its own pool is dropped. After SIGKILL `jumbo pool --undo` does that.
//! steering.put_back(&mut ())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: no knob is written that no record in the journal names with its value before.

pub mod boot;
pub mod carry;
pub mod change;
pub mod doubts;
pub mod governor;
pub mod holders;
pub mod journal;
pub mod shortage;
pub mod steering;

pub use boot::Boot;
pub use carry::{Attendant, Carried, Undone, carry_out, undo};
pub use change::{Amount, Effect, Knob, Plan, PlanError, Step, What, Wish};
pub use doubts::doubts;
pub use governor::{Bounds, Decision, Governor, Seen};
pub use holders::{HeldFile, Holder, Holders};
pub use journal::{Journal, JournalError, Locked, Record};
pub use shortage::Shortage;
pub use steering::{Steering, Written};
