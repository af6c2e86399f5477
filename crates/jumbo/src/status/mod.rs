//! The memory of this process: the part on huge pages, and the rest.
//!
//! - [`Usage`] and [`Kind`]: memory by kind and folio size.
//! - [`process`]: the functions that read them.
//! - [`Mapped`]: a range of addresses.
//!
//! `jumbo-host` reads the host and other processes. Invariant: the module changes nothing.

pub mod process;
mod range;
mod usage;

pub use range::Mapped;
#[doc(hidden)]
pub use usage::HUGE;
pub use usage::{Kind, KindUsage, Usage};
