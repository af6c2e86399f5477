//! Making THPs out of memory that is already there, and which advice of later kernels this one knows.

use rustix::fd::{AsFd, AsRawFd};

use rustix::io::Result;

use super::request;

const MADV_COLLAPSE: usize = libc::MADV_COLLAPSE.unsigned_abs() as usize;
const MADV_COLD: usize = libc::MADV_COLD.unsigned_abs() as usize;

/// `madvise(address, length, MADV_COLLAPSE)`: puts the memory on THPs now, on this thread.
///
/// Safe for any range, the caller's or not: what the memory holds is the same before and after.
///
/// # References
/// madvise(2); Linux 6.1.
///
/// # Errors
/// EAGAIN: try again; EBUSY: the memory cgroup is at its limit; EINVAL: not allowed here, or a kernel
/// without it; ENOMEM: unmapped, or no huge page to be had.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn collapse(address: usize, length: usize) -> Result<()> {
    let arguments = [address, length, MADV_COLLAPSE, 0, 0, 0];
    // SAFETY: the kernel checks the range, and collapsing changes no byte that any thread can read.
    unsafe { request(libc::SYS_madvise, arguments).map(drop) }
}

/// `process_madvise(pidfd, [address, length], MADV_COLLAPSE)`: the same in another process. Returns
/// how many bytes were advised.
///
/// # References
/// process_madvise(2); Linux 5.10, with MADV_COLLAPSE 6.1.
///
/// # Errors
/// As [`collapse`]; EPERM: it takes CAP_SYS_NICE and the right to trace the process; ESRCH: it is gone.
pub fn collapse_in(pidfd: impl AsFd, address: usize, length: usize) -> Result<usize> {
    advise_in(pidfd, address, length, MADV_COLLAPSE)
}

/// `process_madvise(pidfd, [address, length], MADV_COLD)`: the memory is the first to be reclaimed. Of a
/// THP that the range covers in part, and that no other process maps, the kernel splits all.
///
/// # References
/// process_madvise(2); Linux 5.10.
///
/// # Errors
/// As [`collapse_in`]; EINVAL: locked memory, or hugetlb.
pub fn cool_in(pidfd: impl AsFd, address: usize, length: usize) -> Result<usize> {
    advise_in(pidfd, address, length, MADV_COLD)
}

#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn advise_in(pidfd: impl AsFd, address: usize, length: usize, advice: usize) -> Result<usize> {
    let range = libc::iovec {
        iov_base: core::ptr::without_provenance_mut(address),
        iov_len: length,
    };
    let fd = pidfd.as_fd().as_raw_fd().unsigned_abs() as usize;
    let range = (&raw const range).expose_provenance();
    let arguments = [fd, range, 1, advice, 0, 0];
    // SAFETY: the vector has one element and outlives the call; neither advice changes a byte that any
    // thread can read.
    unsafe { request(libc::SYS_process_madvise, arguments) }
}

/// Whether this kernel has MADV_COLLAPSE: Linux 6.1.
pub fn has_collapse() -> bool {
    knows(MADV_COLLAPSE)
}

/// Whether this kernel has MADV_POPULATE_WRITE: Linux 5.14.
pub fn has_populate() -> bool {
    knows(libc::MADV_POPULATE_WRITE.unsigned_abs() as usize)
}

/// madvise(2) refuses an advice that it does not know also for a range without a page.
#[expect(unsafe_code, reason = "a system call")]
fn knows(advice: usize) -> bool {
    // SAFETY: the range has no page.
    unsafe { request(libc::SYS_madvise, [0, 0, advice, 0, 0, 0]) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The advice of no page is refused exactly where the advice of a page is.
    #[test]
    fn an_advice_is_known_if_the_kernel_takes_it() {
        let scratch = [0u8; 1 << 13];
        let page = rustix::param::page_size();
        let at = scratch.as_ptr().expose_provenance().next_multiple_of(page);
        let answer = crate::pool::populate(at, page, page);
        assert_eq!(has_populate(), answer.is_ok());
        assert!(!knows(9999));
    }
}
