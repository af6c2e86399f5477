//! Memory on THPs now: [`make_huge`].

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

use crate::sys;

/// How often a collapse that the kernel asks to try again is tried.
const TRIES: usize = 8;

/// Puts fresh anonymous or shared memory on huge pages of `pmd` bytes: touches one base page of each, and collapses all of
/// it, whatever the host's `enabled` says. What it holds does not change.
///
/// `length` is a multiple of `pmd`, and `address` too.
///
/// # References
/// MADV_POPULATE_WRITE: madvise(2), Linux 5.14; MADV_COLLAPSE: Linux 6.1.
///
/// # Errors
/// Those of the touch and of [`sys::collapse`]. Base pages may be there then.
#[expect(unsafe_code, reason = "takes an address")]
pub fn make_huge(address: usize, length: usize, pmd: usize) -> Result<()> {
    let page = rustix::param::page_size();
    for chunk in (address..address + length).step_by(pmd) {
        let at = core::ptr::with_exposed_provenance_mut(chunk);
        // SAFETY: populating changes no byte that any thread can read.
        unsafe { mm::madvise(at, page, Advice::LinuxPopulateWrite)? };
    }
    let mut answer = Err(Errno::AGAIN);
    for _ in 0..TRIES {
        answer = sys::collapse(address, length);
        if answer != Err(Errno::AGAIN) {
            break;
        }
    }
    answer
}
