//! Snapshots of the host and of processes: what is huge, what is not, and why not.
//!
//! - [`Usage`] and [`Kind`]: a process's memory by kind and folio size.
//! - [`process`]: how they are read.
//! - [`Detail`]: one process with everything there is to say.
//! - [`Covered`]: what the preload library does in a process.
//! - [`Census`]: all processes that it is in, cheaply.
//! - [`Library`]: which file that library is.
//! - [`Sibling`]: a reaper, whose memory is a program's.
//! - [`Host`]: page sizes, pools, controls, free memory, counters.
//! - [`Glance`]: many processes in few words, for a view that is refreshed.
//! - [`Tasks`]: the processes with the most memory that could be huge.
//! - [`doctor`]: what of all that is worth mending.
//!
//! It reads through [`kernel`](crate::kernel), and of `jumbo-inside` the layout of the ledger's slots and the states of a
//! reaper. Invariant: it changes nothing, and what it could not read it says, with the reason.

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
pub use detail::{Detail, Lens, MappingDetail, find, observer};
pub use glance::{Glance, Glances};
pub use host::{Formable, Host, Missing, Sysctl};
pub use jumbo::status::{Kind, KindUsage, Usage, process};
pub use library::{LIBRARY, Library};
pub use siblings::{Sibling, is_reaper, program_of, reaper_of, reapers_of_the_ended};
pub use tasks::{Huge, Task, Tasks};
