//! The only door to the kernel: files under /proc and /sys, and the system calls that rustix lacks.
//!
//! Every path starts at a [`Root`], which tests replace with a folder of their own. This module knows
//! none of the mechanisms above it: only [`units`](crate::units), and from `jumbo-inside` the system calls and the
//! reading of cgroup files that both worlds need.
//!
//! - [`memory`], [`zones`], [`hugetlb`], [`hvo`], [`thp`], [`cgroup`]: the host, and what it allows this process. [`balloon`]: what a
//!   virtual machine gives back to its own.
//! - [`page_cache`]: huge folios of a file. [`mounts`]: its file system.
//! - [`smaps`], [`task`], [`folios`], [`file_id`], [`peek`]: one process.
//! - `aside`: files of a process that it can hold back, read by a child.
//! - `sys`: the system calls.
//! - [`process`]: starting a program and standing in for it.
//! - [`mod@probe`]: what all of that comes to.
//!
//! Invariant: a file that is not there is no error where a kernel may lack it; a file that cannot be read is one, with its path.

pub(crate) mod aside;
pub mod balloon;
pub mod cgroup;
#[cfg(test)]
pub(crate) mod fake;
pub mod file_id;
pub mod folios;
pub mod hugetlb;
pub mod hvo;
pub mod memory;
pub mod mounts;
pub mod page_cache;
pub mod peek;
pub mod probe;
pub mod process;
mod root;
pub mod smaps;
pub(crate) mod sys;
pub mod task;
pub mod thp;
pub mod zones;

pub use probe::{Probe, probe};
pub use root::{FileError, Root};

use procfs_core::FromRead;

use crate::units::PageSize;

/// A file whose format procfs-core knows.
fn parse<T: FromRead>(root: &Root, relative: &str) -> Result<T, FileError> {
    let bytes = root.read_bytes(relative)?;
    T::from_read(&bytes[..]).map_err(|error| root.misread(relative, error.to_string()))
}

/// The base page of the kernel behind `root`: `AT_PAGESZ` of the auxiliary vector (getauxval(3)),
/// and that of this process where the file is not there.
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
