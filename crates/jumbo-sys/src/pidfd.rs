//! Signals to the process of a descriptor, and the release of its memory while it is dying.

use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Result;

use crate::request;

/// `pidfd_send_signal(pidfd, signal, NULL, 0)`: as kill(2), but never to a later process of the
/// same ID. rustix has this call for named signals only.
///
/// # References
/// pidfd_send_signal(2); Linux 5.1.
///
/// # Errors
/// EPERM: not allowed; ESRCH: the process was waited for; EINVAL: no such signal.
#[expect(unsafe_code, reason = "rustix has no real-time signals here")]
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> Result<()> {
    let (pidfd, signal) = (number(&pidfd), signal.cast_unsigned() as usize);
    let arguments = [pidfd, signal, 0, 0, 0, 0];
    // SAFETY: a null pointer selects the values of kill(2); no other memory is passed.
    unsafe { request(libc::SYS_pidfd_send_signal, arguments).map(drop) }
}

/// `process_mrelease(pidfd, 0)`: frees the private memory of a dying process, on this thread.
///
/// # References
/// process_mrelease(2); Linux 5.15.
///
/// # Errors
/// EINVAL: the process is not dying; ESRCH: it is gone, or has no memory any more; EAGAIN: some
/// memory was not freed; ENOSYS: a kernel without it.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn release(pidfd: impl AsFd) -> Result<()> {
    let arguments = [number(&pidfd), 0, 0, 0, 0, 0];
    // SAFETY: no memory is passed, and the kernel refuses a process that can still use its memory.
    unsafe { request(libc::SYS_process_mrelease, arguments).map(drop) }
}

fn number(pidfd: &impl AsFd) -> usize {
    pidfd.as_fd().as_raw_fd().unsigned_abs() as usize
}
