//! Making THPs out of memory that is already there.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Result;

use super::result;

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
    // SAFETY: the kernel checks the range, and collapsing changes no byte that any thread can read.
    let returned = unsafe {
        libc::madvise(
            std::ptr::without_provenance_mut(address),
            length,
            libc::MADV_COLLAPSE,
        )
    };
    result(returned.into()).map(drop)
}

/// `process_madvise(pidfd, [address, length], MADV_COLLAPSE)`: the same in another process. Returns
/// how many bytes were advised.
///
/// # References
/// process_madvise(2); Linux 5.10, with MADV_COLLAPSE 6.1.
///
/// # Errors
/// As [`collapse`]; EPERM: it takes CAP_SYS_NICE and the right to trace the process; ESRCH: it is gone.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn collapse_in(pidfd: impl AsFd, address: usize, length: usize) -> Result<usize> {
    let range = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address),
        iov_len: length,
    };
    let fd = pidfd.as_fd().as_raw_fd();
    // SAFETY: the vector has one element and outlives the call; as for the advice, see `collapse`.
    result(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            fd,
            &raw const range,
            1usize,
            libc::MADV_COLLAPSE,
            0u32,
        )
    })
}
