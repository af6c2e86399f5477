//! A signal for the process behind a descriptor, and its memory when it is dying.

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Result;

use super::result;

/// `pidfd_send_signal(pidfd, signal, NULL, 0)`: as kill(2), but never to another process that got the
/// same ID. rustix has this call for named signals only.
///
/// # References
/// pidfd_send_signal(2); Linux 5.1.
///
/// # Errors
/// EPERM: not allowed; ESRCH: it has ended and been waited for; EINVAL: there is no such signal.
#[expect(unsafe_code, reason = "rustix has no real-time signals here")]
pub(crate) fn send_signal(pidfd: impl AsFd, signal: i32) -> Result<()> {
    let information = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a null pointer asks for what kill(2) fills in; no other memory is passed.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_fd().as_raw_fd(),
            signal,
            information,
            0u32,
        )
    };
    result(returned).map(drop)
}

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
