//! MADV_COLLAPSE, MADV_COLD in another process, and probes for advice of later kernels.

use rustix::fd::{AsFd, AsRawFd};

use rustix::io::Result;

use super::{advise, request};

const MADV_COLLAPSE: usize = libc::MADV_COLLAPSE.unsigned_abs() as usize;
const MADV_COLD: usize = libc::MADV_COLD.unsigned_abs() as usize;

/// `madvise(address, length, MADV_COLLAPSE)`: collapses the memory into THPs synchronously.
///
/// Safe for any range: the contents stay the same.
///
/// # References
/// madvise(2); Linux 6.1.
///
/// # Errors
/// EPERM: a filter of the program; EAGAIN: try again; EBUSY: the memory cgroup is at its limit; EINVAL: not allowed here, or an
/// older kernel; ENOMEM: unmapped, or no free huge page.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn collapse(address: usize, length: usize) -> Result<()> {
    // SAFETY: the kernel checks the range, and a collapse changes no contents.
    unsafe { advise(address, length, libc::MADV_COLLAPSE) }
}

/// `process_madvise(pidfd, [address, length], MADV_COLLAPSE)`: [`collapse`] in another process.
/// Returns the number of advised bytes.
///
/// # References
/// process_madvise(2); Linux 5.10, with MADV_COLLAPSE 6.1.
///
/// # Errors
/// As [`collapse`]; EPERM: no CAP_SYS_NICE, or no right to trace the process; ESRCH: it has ended.
pub fn collapse_in(pidfd: impl AsFd, address: usize, length: usize) -> Result<usize> {
    advise_in(pidfd, address, length, MADV_COLLAPSE)
}

/// `process_madvise(pidfd, [address, length], MADV_COLD)`: makes the memory the first to be
/// reclaimed. The kernel splits a THP that the range covers in part, unless another process maps
/// it.
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
    // SAFETY: the vector has one element and outlives the call; neither advice changes contents.
    unsafe { request(libc::SYS_process_madvise, arguments) }
}

/// Reports whether this kernel has MADV_COLLAPSE (Linux 6.1).
pub fn has_collapse() -> bool {
    knows(libc::MADV_COLLAPSE)
}

/// Reports whether this kernel has MADV_POPULATE_WRITE (Linux 5.14).
pub fn has_populate() -> bool {
    knows(libc::MADV_POPULATE_WRITE)
}

/// Reports whether madvise(2) knows an advice: it refuses an unknown one even for an empty range.
#[expect(unsafe_code, reason = "madvise(2)")]
fn knows(advice: i32) -> bool {
    // SAFETY: the range is empty.
    unsafe { advise(0, 0, advice) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "madvise(2)")]
    fn an_advice_is_known_if_the_kernel_takes_it() {
        let scratch = [0u8; 1 << 13];
        let page = rustix::param::page_size();
        let at = scratch.as_ptr().expose_provenance().next_multiple_of(page);
        // SAFETY: a page within `scratch`; populating changes no content.
        let answer = unsafe { advise(at, page, libc::MADV_POPULATE_WRITE) };
        assert_eq!(has_populate(), answer.is_ok());
        assert!(!knows(9999));
    }
}
