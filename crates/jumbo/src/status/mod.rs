//! Snapshots of the host and of processes: what is huge, what is not, and why not.
//!
//! - [`Usage`] and [`Kind`]: a process's memory by kind and folio size.
//! - [`process`]: how they are read.

pub mod process;
mod usage;

pub use usage::{Kind, KindUsage, Usage};
