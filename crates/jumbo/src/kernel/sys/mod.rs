//! System calls that rustix lacks, behind functions that are safe to call.

mod collapse;
mod copy;
mod mapping;
mod numa;
mod pagemap;
mod pidfd;
pub mod ptrace;
mod release;
mod remap;
mod scratch;
mod signals;
mod userfault;

pub use collapse::{collapse, collapse_in};
pub use copy::copy_words;
pub use mapping::{Mapping, Maps};
pub use numa::{PolicyMode, allowed_nodes, bind, local_node, memory_policy};
pub use pagemap::Pagemap;
pub use pidfd::send_signal;
pub use release::release;
pub use remap::{move_back, move_mapping};
pub use scratch::{Scratch, Sharing};
pub use signals::Blocked;
pub use userfault::userfault_user_mode;

use rustix::io::{Errno, Result};

/// What libc's convention says: -1, and the reason in errno.
fn result(returned: libc::c_long) -> Result<usize> {
    usize::try_from(returned).map_err(|_| {
        let code = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(code.unwrap_or(libc::EINVAL))
    })
}

/// [`result`] of a call of libc's that leaves errno as it was.
#[expect(unsafe_code, reason = "errno")]
fn quietly(call: impl FnOnce() -> libc::c_long) -> Result<usize> {
    // SAFETY: errno is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let answer = result(call());
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    answer
}
