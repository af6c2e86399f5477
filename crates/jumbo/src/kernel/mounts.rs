//! What is mounted where this process is: /proc/self/mountinfo (proc_pid_mountinfo(5)).

use std::collections::BTreeMap;

use procfs_core::process::MountInfos;

use super::{FileError, Root, parse};

/// The type of each mounted file system, by the major and the minor number of its device, as `maps` shows it.
///
/// # Errors
/// [`FileError`] where the file cannot be read or understood.
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

/// True of file systems that another host or a program answers for, or does not.
pub fn may_not_answer(kind: &str) -> bool {
    let remote = [
        "nfs", "cifs", "smb", "9p", "ceph", "afs", "fuse", "virtiofs", "lustre", "gfs2", "ocfs2",
    ];
    remote.iter().any(|name| kind.starts_with(name))
}
