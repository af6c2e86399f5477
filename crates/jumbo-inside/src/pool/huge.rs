//! Resident memory: [`populate`]; on THPs: [`make_huge`].

use rustix::io::{Errno, Result};

use jumbo_sys as sys;

/// Attempts of a collapse that returns EAGAIN.
const MAX_COLLAPSE_ATTEMPTS: usize = 8;

/// Makes memory resident; fails where a touch would kill the process. The content does not change.
///
/// A huge page, of `huge` bytes, is touched at its last base page, which the kernel zeroes last for
/// the caches. A touch of the first one makes it zero the page backwards, 1.5 to 2 times as slow
/// (`process_huge_page` in mm/memory.c, Linux 4.14 to 6.18).
///
/// `address` and `length` are multiples of a base page, and of `huge` in hugetlb memory.
///
/// # References
/// MADV_POPULATE_WRITE: madvise(2), Linux 5.14.
///
/// # Errors
/// `EFAULT`: no hugetlb page, or a cgroup limit; `ENOMEM`: no memory, or unmapped addresses;
/// `EINVAL`: a kernel before Linux 5.14; `EPERM`: a filter of the program. A part may be resident then.
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
    // SAFETY: populating changes no byte that any thread can read.
    unsafe { sys::advise(address, length, libc::MADV_POPULATE_WRITE) }
}

/// Puts fresh anonymous or shared memory on huge pages of `pmd` bytes, whatever the host's
/// `enabled`: touches one base page of each, as [`populate`] does, and calls `collapse`. The
/// content does not change. `address` and `length` are multiples of `pmd`.
///
/// # References
/// MADV_POPULATE_WRITE: madvise(2), Linux 5.14; MADV_COLLAPSE: Linux 6.1.
///
/// # Errors
/// Those of the touch and of the collapse. Base pages may be resident then.
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
