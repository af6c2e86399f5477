//! Mounts in this mount namespace: /proc/self/mountinfo (proc_pid_mountinfo(5)).

use std::collections::BTreeMap;

use jumbo_sys::mounts::{mounts, path};
use serde::Serialize;

use super::{FileError, Root};

/// A tmpfs. Its option `huge=` applies to its files, not `shmem_enabled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tmpfs {
    /// Mount point.
    pub path: String,
    /// Value of `huge=`, by default `never` (tmpfs(5), Documentation/filesystems/tmpfs.rst).
    pub huge: String,
}

/// All visible tmpfs mounts.
pub fn tmpfs(root: &Root) -> Result<Vec<Tmpfs>, FileError> {
    let table = root.read_bytes("proc/self/mountinfo")?;
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for mount in mounts(&table) {
        let path = path(mount.point).display().to_string();
        // A later mount hides an earlier one.
        found.remove(&path);
        if mount.kind == b"tmpfs" {
            let huge = mount.options().find(|(name, _)| *name == b"huge");
            let huge = huge.and_then(|(_, value)| value).unwrap_or(b"never");
            found.insert(path, String::from_utf8_lossy(huge).into_owned());
        }
    }
    let found = found.into_iter();
    Ok(found.map(|(path, huge)| Tmpfs { path, huge }).collect())
}

/// Folder of the files of `shm_open`.
pub const DEV_SHM: &str = "/dev/shm";
