//! The memory of this process: the part on huge pages, and the rest.
//!
//! - [`Usage`] and [`Kind`]: memory by kind and folio size.
//! - [`process`]: how they are read.
//!
//! The host and other processes are `jumbo-host`'s. Invariant: it changes nothing.

pub mod process;
mod usage;

#[doc(hidden)]
pub use usage::HUGE;
pub use usage::{Kind, KindUsage, Usage};
