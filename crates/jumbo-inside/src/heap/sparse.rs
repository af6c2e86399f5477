//! Memory that may be sparse: [`commit`].
//!
//! A program that reserves addresses, and makes memory of parts of them later (MAP_FIXED over
//! PROT_NONE), often touches them here and there: a database lays out the headers of a buffer pool,
//! 2 MiB apart or more, long before it fills it. On huge pages each of these touches is 2 MiB. So
//! such memory begins on base pages, and [`crate::density`] scans it.

use core::sync::atomic::Ordering;

use super::LOCKED;
use crate::density::{Decision, Policy, decide};

pub use crate::density::forget;

/// The program has made memory of a part of what it had reserved. True where it is left on base
/// pages for now, and scanned; else it is to be advised as any other.
pub fn commit(address: usize, length: usize) -> bool {
    let range = address..address.saturating_add(length);
    !LOCKED.load(Ordering::Relaxed) && decide(&range, Policy::Committed) == Decision::BaseForNow
}
