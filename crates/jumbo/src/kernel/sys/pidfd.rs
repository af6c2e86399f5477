//! A signal for the process behind a descriptor.

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
