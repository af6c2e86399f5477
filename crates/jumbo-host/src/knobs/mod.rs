//! What is written on a host, and put back: one journal for every knob of the kernel.
//!
//! A [`Knob`] says where a setting is, how it is read and which values it takes. A [`Plan`] says which knob gets which
//! value, and what has to be written to have everything back. [`apply()`] makes a [`Record`] of that in the [`Journal`],
//! writes each knob once, and reads it back; [`undo()`] puts back what a record says. [`boot`] has the same set at the
//! next boot, by files whose change is part of the plan, and of what is undone.
//!
//! - [`knob`]: knobs and values. [`known`]: the knobs that there are, and their [`Group`]s.
//! - [`thp`]: the THP tables as one, to keep and to put back.
//! - [`plan`]: what is to be written. [`journal`]: what was before.
//! - [`mod@apply`]: writing, reading back, putting back. [`steering`]: many writes under one record.
//! - [`boot`]: the setting for the next boot.
//!
//! ```no_run
//! use jumbo_host::kernel::Root;
//! use jumbo_host::knobs::{Group, Journal, Knob, Plan, apply, undo};
//! use jumbo::units::PageSize;
//!
//! let (root, group) = (Root::host(), Group::thp());
//! let size = PageSize::new(64 << 10)?;
//! let journal = Journal::of_user(&root).ok_or("no folder for the record")?;
//! let locked = journal.lock(&group, "my-program")?;
//! let knob = Knob::thp(Some(size), "enabled");
//! let plan = Plan::of(&root, group, [(knob, "madvise".into())])?;
//! apply(&root, &locked, &plan, "my-program", false, &mut ())?;
//! // ... and back. After SIGKILL `jumbo thp --undo` does that.
//! if let Some(record) = locked.last()? {
//!     undo(&root, &locked, &record, false, false, &mut ())?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: no knob is written that no record in the journal names with its value before.

pub mod apply;
pub mod boot;
pub mod journal;
pub mod knob;
pub mod known;
pub mod plan;
pub mod steering;
pub mod thp;

pub use apply::{Activity, Applied, ApplyError, Undone, Watcher, apply, undo};
pub use boot::{Boot, FileChange};
pub use journal::{Journal, JournalError, Locked, Record};
pub use knob::{Form, Knob, Value};
pub use known::Group;
pub use plan::{Plan, Saved, Step};
pub use steering::{Steering, Written};

#[cfg(test)]
pub(crate) mod fake;
