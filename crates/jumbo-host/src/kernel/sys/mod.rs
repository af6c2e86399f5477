//! System calls that rustix lacks, behind functions that are safe to call.

mod pidfd;
pub(crate) mod ptrace;
mod scratch;

pub(crate) use jumbo_sys::{Blocked, Pagemap, collapse, collapse_in, cool_in, prepare_huge_page};
pub use pidfd::release;
pub(crate) use pidfd::send_signal;
pub(crate) use scratch::Scratch;

use rustix::io::{Errno, Result};

/// Converts a return value of libc: -1, and the reason in errno.
fn result(returned: libc::c_long) -> Result<usize> {
    usize::try_from(returned).map_err(|_| {
        let code = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(code.unwrap_or(libc::EINVAL))
    })
}
