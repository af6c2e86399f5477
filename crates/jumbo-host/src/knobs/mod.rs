//! Journalled writes to kernel settings.
//!
//! A [`Knob`] has the file, format and values of a setting. A [`Plan`] has the new value of each
//! knob, and the values that restore the current state. [`apply()`] adds a [`Record`] to the
//! [`Journal`], writes each knob once, and reads it back; [`undo()`] restores the values of a
//! record.
//!
//! - [`knob`]: knobs and values. [`known`]: the existing knobs and their [`Group`]s.
//! - [`thp`]: the THP tables as a whole.
//! - [`plan`]: the writes. [`journal`]: the values before.
//! - [`mod@apply`]: writes, reads back, restores. [`steering`]: many writes under one record.
//! - [`boot`]: names of the knobs in files for the next boot.
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
//! Invariant: before a knob is written, a record in the journal has its previous value.

pub mod apply;
pub mod boot;
pub mod journal;
pub mod knob;
pub mod known;
pub mod plan;
pub mod steering;
pub mod thp;

pub use apply::{Activity, Applied, ApplyError, Undone, Watcher, apply, undo};
pub use journal::{Journal, JournalError, Locked, Record};
pub use knob::{Form, Knob, Value};
pub use known::Group;
pub use plan::{Plan, Saved, Step};
pub use steering::Steering;

#[cfg(test)]
pub(crate) mod fake;
