//! Files of /proc and /sys for the mechanisms, and system calls that rustix lacks.
//!
//! Every path starts at a [`Root`], which tests replace with a folder of their own. `jumbo-host`
//! has the rest of the kernel's files; these functions are not part of this crate's interface.
//!
//! - [`memory`], [`thp`]: the host. [`smaps`], [`folios`]: one process. `sys`: the system calls.
//!
//! Invariant: a missing file is no error if a kernel may lack it; an unreadable file is one, with
//! its path.

#[cfg(test)]
pub(crate) mod fake;
pub mod folios;
pub mod memory;
mod reserved;
mod root;
pub mod smaps;
pub(crate) mod sys;
pub mod thp;

pub use reserved::{Reserved, at};
pub use root::{FileError, Root};

use std::sync::{Mutex, MutexGuard, PoisonError};

use procfs_core::FromRead;

use crate::units::PageSize;

/// Parses a file with procfs-core.
///
/// # Errors
/// [`FileError`] if it cannot be read or parsed.
pub fn parse<T: FromRead>(root: &Root, relative: &str) -> Result<T, FileError> {
    let bytes = root.read_bytes(relative)?;
    T::from_read(&bytes[..]).map_err(|error| root.misread(relative, error.to_string()))
}

/// Returns the base page size of the kernel below `root`: `AT_PAGESZ` of the auxiliary vector
/// (getauxval(3)), else that of this process.
pub fn base_page(root: &Root) -> PageSize {
    const AT_PAGESZ: u64 = 6;
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
    let recorded = root.read_bytes("proc/self/auxv").ok().and_then(|auxv| {
        auxv.chunks_exact(16)
            .find(|pair| word(&pair[..8]) == Some(AT_PAGESZ))
            .and_then(|pair| word(&pair[8..]))
    });
    let own = || rustix::param::page_size() as u64;
    recorded
        .and_then(|bytes| PageSize::new(bytes).ok())
        .or_else(|| PageSize::new(own()).ok())
        .unwrap_or(PageSize::SIZE_4K)
}

/// Locks a mutex, poisoned or not: no code panics with a lock held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
