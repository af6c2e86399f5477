//! Freeing the memory of a process that is dying.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Result;

use super::result;

/// `process_mrelease(pidfd, 0)`: frees the private memory of a dying process, on this thread.
///
/// # References
/// process_mrelease(2); Linux 5.15.
///
/// # Errors
/// EINVAL: the process is not dying; ESRCH: it is gone, or has given up its memory; EAGAIN: not all
/// could be freed; ENOSYS: a kernel without it.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn release(pidfd: impl AsFd) -> Result<()> {
    // SAFETY: no memory is passed, and the kernel refuses a process that could still use its own.
    let returned =
        unsafe { libc::syscall(libc::SYS_process_mrelease, pidfd.as_fd().as_raw_fd(), 0u32) };
    result(returned).map(drop)
}
