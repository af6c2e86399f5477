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
//! - [`shortage`]: why not all pages came.
//! - [`boot`]: the setting for the next boot.
//! - [`holders`]: who has the pages.
//! - [`governor`]: how large a pool should be now.
//!
//! Invariant: no knob is written that no record in the journal names with its value before.

pub mod boot;
pub mod carry;
pub mod change;
pub mod governor;
pub mod holders;
pub mod journal;
pub mod shortage;
pub mod steering;

pub use boot::Boot;
pub use carry::{Attendant, Carried, Undone, carry_out, undo};
pub use change::{Amount, Effect, Knob, Plan, PlanError, Step, What, Wish};
pub use governor::{Bounds, Decision, Governor, Seen};
pub use holders::{HeldFile, Holder, Holders};
pub use journal::{Journal, JournalError, Locked, Record};
pub use shortage::Shortage;
pub use steering::{Steering, Written};
