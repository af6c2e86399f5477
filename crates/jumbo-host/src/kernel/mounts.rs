//! Mounts in this mount namespace: /proc/self/mountinfo (proc_pid_mountinfo(5)).

use std::collections::BTreeMap;

use jumbo_sys::mounts::{Mount, mounts, path};
use serde::Serialize;

use super::{FileError, Root};

/// Type of each mounted file system, by major and minor number of its device as in `maps`.
pub fn by_device(root: &Root) -> Result<BTreeMap<(u32, u32), String>, FileError> {
    let table = root.read_bytes("proc/self/mountinfo")?;
    let kind = |mount: Mount<'_>| String::from_utf8_lossy(mount.kind).into_owned();
    Ok(mounts(&table)
        .map(|mount| (mount.device, kind(mount)))
        .collect())
}

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

/// Reports whether a file system is served by another host or a program, and so may block.
pub fn may_not_answer(kind: &str) -> bool {
    let remote = [
        "nfs", "cifs", "smb", "9p", "ceph", "afs", "fuse", "virtiofs", "lustre", "gfs2", "ocfs2",
    ];
    remote.iter().any(|name| kind.starts_with(name))
}
