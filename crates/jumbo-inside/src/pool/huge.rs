//! Memory that is resident at once: [`populate`], and on THPs: [`make_huge`].

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

/// How often a collapse that the kernel asks to try again is tried.
const MAX_COLLAPSE_ATTEMPTS: usize = 8;

/// Makes memory resident, and answers where a touch would kill. What it holds does not change.
///
/// A huge page, of `huge` bytes, is touched at its last base page. The kernel zeroes a huge page so that the base page that
/// was touched comes last, to have it in the caches: for a touch of the first that is all of it backwards, one base page
/// after the other, and takes 1.5 to 2 times as long as forwards (`process_huge_page` in mm/memory.c, Linux 4.14 to 6.18).
///
/// `address` and `length` are multiples of a base page, and of `huge` in hugetlb memory.
///
/// # References
/// MADV_POPULATE_WRITE: madvise(2), Linux 5.14.
///
/// # Errors
/// `EFAULT`: a page of the range cannot be had, or a limit of a control group; `ENOMEM`: no memory, or nothing is mapped in a
/// part of it; `EINVAL`: a kernel before Linux 5.14. A part of it may be resident then.
pub fn populate(address: usize, length: usize, huge: usize) -> Result<()> {
    let (end, base) = (address + length, rustix::param::page_size());
    if huge > base {
        let first = address.next_multiple_of(huge) + huge;
        (first..=end)
            .step_by(huge)
            .try_for_each(|end| touch(end - base, base))?;
    }
    touch(address, length)
}

#[expect(unsafe_code, reason = "takes an address")]
fn touch(address: usize, length: usize) -> Result<()> {
    let at = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: populating changes no byte that any thread can read.
    unsafe { mm::madvise(at, length, Advice::LinuxPopulateWrite) }
}

/// Puts fresh anonymous or shared memory on huge pages of `pmd` bytes: touches one base page of each, as [`populate`] does, and collapses all of
/// it by `collapse`, whatever the host's `enabled` says. What it holds does not change.
///
/// `length` is a multiple of `pmd`, and `address` too.
///
/// # References
/// MADV_POPULATE_WRITE: madvise(2), Linux 5.14; MADV_COLLAPSE: Linux 6.1.
///
/// # Errors
/// Those of the touch and of the collapse. Base pages may be there then.
pub fn make_huge(
    address: usize,
    length: usize,
    pmd: usize,
    collapse: impl Fn(usize, usize) -> Result<()>,
) -> Result<()> {
    let page = rustix::param::page_size();
    for chunk in (address..address + length).step_by(pmd) {
        touch(chunk + pmd - page, page)?;
    }
    let mut result = Err(Errno::AGAIN);
    for _ in 0..MAX_COLLAPSE_ATTEMPTS {
        result = collapse(address, length);
        if result != Err(Errno::AGAIN) {
            break;
        }
    }
    result
}
