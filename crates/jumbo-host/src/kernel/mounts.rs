//! Mounts in this mount namespace: /proc/self/mountinfo (proc_pid_mountinfo(5)).

use std::collections::BTreeMap;

use procfs_core::process::MountInfos;
use serde::Serialize;

use super::{FileError, Root, parse};

/// Type of each mounted file system, by major and minor number of its device as in `maps`.
pub fn by_device(root: &Root) -> Result<BTreeMap<(u32, u32), String>, FileError> {
    let infos: MountInfos = parse(root, "proc/self/mountinfo")?;
    let device = |majmin: &str| {
        let (major, minor) = majmin.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let mounts = infos.into_iter();
    let mounts = mounts.filter_map(|info| Some((device(&info.majmin)?, info.fs_type)));
    Ok(mounts.collect())
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
    let infos: MountInfos = parse(root, "proc/self/mountinfo")?;
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for info in infos {
        let path = info.mount_point.display().to_string();
        // A later mount hides an earlier one.
        found.remove(&path);
        if info.fs_type == "tmpfs" {
            let huge = info.super_options.get("huge").cloned().flatten();
            found.insert(path, huge.unwrap_or_else(|| "never".to_owned()));
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
