//! Access to the kernel: files under /proc and /sys that no other crate reads, and other processes.
//!
//! Every path starts at a [`Root`], which tests replace with a folder of their own. This module
//! uses no mechanism: only units and `jumbo-sys`.
//!
//! - [`memory`], [`pressure`], [`zones`], [`hugetlb`], [`hvo`], [`thp`]: the host. [`cgroup`]: the
//!   limits on this process. [`balloon`]: free page reporting of a virtual machine.
//! - [`groups`]: the control groups of units, pods and containers.
//! - [`page_cache`]: huge folios of a file. [`mounts`]: its file system.
//! - [`smaps`], [`task`], [`folios`], [`file_id`], [`peek`]: one process.
//! - `aside`: files of a process whose read can block, read by a child.
//! - [`process`]: starts a program and acts as its parent.
//! - [`mod@probe`]: the available facilities.
//!
//! Errors are [`FileError`]s with a path: a file exists and cannot be read or parsed, or a process
//! is gone. A missing file is no error where a kernel may lack it.

pub(crate) mod aside;
pub mod balloon;
pub mod cgroup;
#[cfg(test)]
pub(crate) mod fake;
pub mod file_id;
pub mod groups;
pub mod hugetlb;
pub mod hvo;
pub mod memory;
pub mod mounts;
pub mod page_cache;
pub mod peek;
pub mod pressure;
pub mod probe;
pub mod process;
pub mod task;
pub mod zones;

pub use aside::maps;
pub use jumbo_sys::files::{FileError, Root, base_page};
pub use jumbo_sys::{folios, smaps, thp, version};
pub use probe::{Probe, probe};

use jumbo_sys::files::{absent, nodes, optional, size_folders, size_of_folder};
use procfs_core::FromRead;

/// Parses a file with procfs-core.
///
/// # Errors
/// [`FileError`] if it cannot be read or parsed.
fn parse<T: FromRead>(root: &Root, relative: &str) -> Result<T, FileError> {
    let bytes = root.read_bytes(relative)?;
    T::from_read(&bytes[..]).map_err(|error| root.misread(relative, error.to_string()))
}
