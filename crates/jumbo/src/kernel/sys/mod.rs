//! System calls that rustix lacks, behind functions that are safe to call.

mod anonymous;
mod numa;

pub(crate) use anonymous::{discard, name};
use jumbo_inside::sys::request;
pub(crate) use numa::{PolicyMode, allowed_nodes, bind, local_node, memory_policy};

use rustix::io::{Errno, Result};

/// The convention of libc: -1, and the reason in errno.
fn result(returned: libc::c_long) -> Result<usize> {
    usize::try_from(returned).map_err(|_| {
        let code = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(code.unwrap_or(libc::EINVAL))
    })
}
