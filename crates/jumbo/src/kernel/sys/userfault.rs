//! Page faults handled in user space.

use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::mm::UserfaultfdFlags;

/// UFFD_USER_MODE_ONLY of <linux/userfaultfd.h>, which rustix does not name.
const USER_MODE_ONLY: u32 = 1;

/// `userfaultfd(O_CLOEXEC | UFFD_USER_MODE_ONLY)`: a descriptor that handles faults of user space
/// alone, which takes no privilege. System calls that fault there fail with EFAULT.
///
/// # References
/// userfaultfd(2); Linux 5.11.
///
/// # Errors
/// EINVAL: a kernel before 5.11; ENOSYS: one without userfaultfd; EPERM: seccomp.
#[expect(
    unsafe_code,
    reason = "rustix takes a userfaultfd for unsafe, as its later ioctls are"
)]
pub(crate) fn userfault_user_mode() -> Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
    // SAFETY: the descriptor watches no memory until it is told to.
    unsafe { rustix::mm::userfaultfd(flags) }
}
