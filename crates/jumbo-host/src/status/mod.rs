//! Snapshots of the host and of processes: huge memory, other memory, and the reasons.
//!
//! - [`Usage`] and [`Kind`]: memory of a process by kind and folio size. [`process`] reads them.
//! - [`Detail`]: all data of one process.
//! - [`Covered`]: counters of the preload library in a process.
//! - [`Census`]: all processes with the library, at low cost.
//! - [`Library`]: identity of the library's file.
//! - [`Sibling`]: a reaper, which shares a program's memory.
//! - [`Host`]: page sizes, pools, controls, free memory, counters.
//! - [`Glance`]: summary of a process, for a view that is refreshed.
//! - [`Tasks`]: the processes with the most memory that can be huge.
//! - [`doctor`]: findings that are worth a fix.
//!
//! It reads through [`kernel`](crate::kernel). `jumbo-inside` has the layout of the ledger's slots
//! and the states of a reaper. Invariant: it changes nothing, and reports what it could not read,
//! with the reason.

mod census;
mod covered;
mod detail;
pub mod doctor;
mod glance;
mod host;
mod library;
mod siblings;
mod tasks;

pub use census::{Census, Member};
pub use covered::{Covered, Freeing, Pooled, Reaping};
pub use detail::{Detail, Inspector, MappingDetail, find, observer};
pub use glance::{Glance, Glances};
pub use host::{Formable, Host, Missing, Sysctl};
pub use jumbo::status::{Kind, KindUsage, Usage, process};
pub use library::{LIBRARY, Library};
pub use siblings::{REAPER, Sibling, is_sibling, program_of, reapers_of_the_ended, siblings_of};
pub use tasks::{Huge, Task, Tasks};
