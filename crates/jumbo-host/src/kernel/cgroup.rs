//! What this process's control group allows it: hugetlb and memory limits, in both versions
//! (Documentation/admin-guide/cgroup-v1/hugetlb.rst, cgroup-v2.rst).
//!
//! A limit binds together with those of all its ancestors, so the walk goes up to the mount. In a
//! container it ends where the container's view ends: limits above that cannot be seen from inside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use procfs_core::ProcessCGroups;
use procfs_core::process::{MountInfo, MountInfos};
use serde::Serialize;

use super::thp::optional;
use super::{FileError, Root, parse};
use crate::units::{Bytes, PageSize};
use jumbo_inside::headroom::clean_files;

/// A limit, of the group that leaves the least room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// The file that sets it.
    pub file: PathBuf,
    /// What may be used.
    pub limit: Bytes,
    /// What the group uses.
    pub usage: Bytes,
    /// Page cache among that which need not be written first: it makes room when asked to.
    pub reclaimable: Bytes,
}

/// The limits on this process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Which cgroup version has the hugetlb controller here; `None` where none has it.
    pub hugetlb_version: Option<u8>,
    /// On hugetlb pages touched, by size. Beyond it a touch is SIGBUS.
    pub hugetlb: BTreeMap<PageSize, Limit>,
    /// On hugetlb pages reserved, by size (5.7). Beyond it mmap(2) fails with ENOMEM.
    pub reservations: BTreeMap<PageSize, Limit>,
    /// On all memory.
    pub memory: Option<Limit>,
}

impl Limit {
    /// What may still be used.
    pub fn room(&self) -> Bytes {
        let fixed = self.usage.0.saturating_sub(self.reclaimable.0);
        Bytes(self.limit.0.saturating_sub(fixed))
    }

    /// The room without what the group needs to go on growing: an eighth, 64 MiB at most.
    pub fn spare(&self) -> Bytes {
        const MOST: u64 = 64 << 20;
        Bytes(self.room().0.saturating_sub((self.limit.0 / 8).min(MOST)))
    }
}

/// A controller's files: the folder of this process's group, and the mount above it.
struct Group {
    version: u8,
    mount: PathBuf,
    folder: PathBuf,
}

impl Limits {
    /// Reads the limits for hugetlb pages of `sizes` and for memory.
    ///
    /// # Errors
    /// [`FileError`] where /proc/self/{cgroup,mountinfo} or a limit cannot be read or understood.
    pub fn read(root: &Root, sizes: &[PageSize]) -> Result<Self, FileError> {
        let Some(groups) = optional(parse::<ProcessCGroups>(root, "proc/self/cgroup"))? else {
            return Ok(Self::default());
        };
        let mounts: MountInfos = parse(root, "proc/self/mountinfo")?;
        let mut limits = Self::default();
        if let Some(group) = Group::find(root, &groups, &mounts, "hugetlb") {
            limits.hugetlb_version = Some(group.version);
            for size in sizes {
                let pages = format!("hugetlb.{}", unit(*size));
                let touched = group.tightest(root, &pages)?;
                limits.hugetlb.extend(touched.map(|limit| (*size, limit)));
                let reserved = group.tightest(root, &format!("{pages}.rsvd"))?;
                let reserved = reserved.map(|limit| (*size, limit));
                limits.reservations.extend(reserved);
            }
        }
        if let Some(group) = Group::find(root, &groups, &mounts, "memory") {
            limits.memory = group.tightest(root, "memory")?;
        }
        Ok(limits)
    }
}

/// Where the hierarchy with the memory controller is mounted; `None` where there is none.
pub(super) fn memory_mount(root: &Root) -> Result<Option<PathBuf>, FileError> {
    let Some(groups) = optional(parse::<ProcessCGroups>(root, "proc/self/cgroup"))? else {
        return Ok(None);
    };
    let mounts: MountInfos = parse(root, "proc/self/mountinfo")?;
    Ok(Group::find(root, &groups, &mounts, "memory").map(|group| group.mount))
}

/// The file with the memory pressure of the group of `pid`, below a [`Root`]; `None` where it is in no
/// group of version 2 that can be seen from here.
pub fn pressure_file(root: &Root, pid: u32) -> Option<PathBuf> {
    let groups: ProcessCGroups = parse(root, &format!("proc/{pid}/cgroup")).ok()?;
    let group = groups.0.iter().find(|group| group.hierarchy == 0)?;
    let mounts: MountInfos = parse(root, "proc/self/mountinfo").ok()?;
    let mut mounts = mounts.iter();
    let mount = mounts.find(|mount| mount.fs_type == "cgroup2")?;
    let file = inside(mount, &group.pathname).join("memory.pressure");
    let file = file.strip_prefix("/").ok()?.to_owned();
    root.path(&file).exists().then_some(file)
}

/// The path of the group that counts the memory of `pid`, as /proc/PID/cgroup has it; `None` where the process is gone.
pub fn path(root: &Root, pid: u32) -> Option<String> {
    let ProcessCGroups(groups) = parse(root, &format!("proc/{pid}/cgroup")).ok()?;
    let counts = |group: &procfs_core::ProcessCGroup| {
        let mut names = group.controllers.iter();
        names.any(|name| name == "memory")
    };
    let v1 = groups.iter().find(|group| counts(group));
    let group = v1.or_else(|| groups.iter().find(|group| group.hierarchy == 0))?;
    Some(group.pathname.clone())
}

/// The memory limit on `pid`; `None` where there is none that can be seen from here.
pub fn memory_limit(root: &Root, pid: u32) -> Option<Limit> {
    let groups: ProcessCGroups = parse(root, &format!("proc/{pid}/cgroup")).ok()?;
    let mounts: MountInfos = parse(root, "proc/self/mountinfo").ok()?;
    let group = Group::find(root, &groups, &mounts, "memory")?;
    group.tightest(root, "memory").ok()?
}

/// The processes of a control group and of those in it, by ascending PID. `path` is its folder, or its
/// path in the hierarchy of version 2, or of version 1's memory.
///
/// # Errors
/// [`FileError::Io`] where there is no such group.
pub fn members(root: &Root, path: &Path) -> Result<Vec<u32>, FileError> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let mounts: MountInfos = parse(root, "proc/self/mountinfo")?;
    let is_cgroup = |mount: &&MountInfo| {
        mount.fs_type == "cgroup2"
            || mount.fs_type == "cgroup" && mount.super_options.contains_key("memory")
    };
    let mounts = mounts.iter().filter(is_cgroup).map(|mount| {
        let point = mount.mount_point.strip_prefix("/");
        point.unwrap_or(&mount.mount_point).join(below)
    });
    let mut folders = std::iter::once(below.to_owned()).chain(mounts);
    let folder = folders.find(|folder| root.path(folder.join("cgroup.procs")).exists());
    let missing = || FileError::io("read", path)(std::io::ErrorKind::NotFound.into());
    let mut left = vec![folder.ok_or_else(missing)?];
    let mut pids = Vec::new();
    while let Some(folder) = left.pop() {
        // A group may be removed meanwhile; one of threads lists its processes above.
        let list = root.read(folder.join("cgroup.procs")).unwrap_or_default();
        pids.extend(list.split_ascii_whitespace().flat_map(str::parse::<u32>));
        let entries = root.list(&folder).unwrap_or_default().into_iter();
        let folders = entries.map(|entry| folder.join(entry));
        left.extend(folders.filter(|folder| root.path(folder).is_dir()));
    }
    pids.sort_unstable();
    pids.dedup();
    // A process outside the PID namespace of this one is 0.
    pids.retain(|pid| *pid > 0);
    Ok(pids)
}

impl Group {
    fn find(
        root: &Root,
        groups: &ProcessCGroups,
        mounts: &MountInfos,
        controller: &str,
    ) -> Option<Self> {
        let named = |group: &&procfs_core::ProcessCGroup| {
            group.controllers.iter().any(|name| name == controller)
        };
        let v1 = groups.0.iter().find(named);
        let version = if v1.is_some() { 1 } else { 2 };
        let group = v1.or_else(|| groups.0.iter().find(|group| group.hierarchy == 0))?;
        let mount = mounts.iter().find(|mount| match version {
            1 => mount.fs_type == "cgroup" && mount.super_options.contains_key(controller),
            _ => mount.fs_type == "cgroup2",
        })?;
        let found = Self {
            version,
            mount: below_root(root, &mount.mount_point),
            folder: below_root(root, &inside(mount, &group.pathname)),
        };
        // The root of a v2 hierarchy has no limits, so the list of controllers has to tell.
        let is_named = |text: String| text.split_ascii_whitespace().any(|name| name == controller);
        let listed = || root.read(found.mount.join("cgroup.controllers"));
        (version == 1 || listed().is_ok_and(is_named)).then_some(found)
    }

    /// The limit on `what` with the least room, of this group and its ancestors up to the mount.
    fn tightest(&self, root: &Root, what: &str) -> Result<Option<Limit>, FileError> {
        let (limit, usage) = match self.version {
            1 => ("limit_in_bytes", "usage_in_bytes"),
            _ => ("max", "current"),
        };
        let mut tightest: Option<Limit> = None;
        let folders = self.folder.ancestors();
        for folder in folders.take_while(|folder| folder.starts_with(&self.mount)) {
            let file = folder.join(format!("{what}.{limit}"));
            let Some(text) = optional(root.read(&file))? else {
                continue;
            };
            let Some(bytes) = bounded(text.trim()) else {
                continue;
            };
            let usage = optional(root.read_u64(folder.join(format!("{what}.{usage}"))))?;
            let reclaimable = if what == "memory" {
                let stat = optional(root.read(folder.join("memory.stat")))?.unwrap_or_default();
                clean_files(stat.as_bytes()).map_or(0, |bytes| bytes as u64)
            } else {
                0
            };
            let here = Limit {
                file,
                limit: bytes,
                usage: Bytes(usage.unwrap_or(0)),
                reclaimable: Bytes(reclaimable),
            };
            let looser = |other: &Limit| here.room() < other.room();
            if tightest.as_ref().is_none_or(looser) {
                tightest = Some(here);
            }
        }
        Ok(tightest)
    }
}

/// The group's folder as this mount shows it. A mount can show a part of the hierarchy only (a bind
/// mount into a container); a group outside that part is looked for at the mount's top.
fn inside(mount: &MountInfo, group: &str) -> PathBuf {
    let relative = Path::new(group)
        .strip_prefix(&mount.root)
        .unwrap_or(Path::new(""));
    mount.mount_point.join(relative)
}

fn below_root(root: &Root, path: &Path) -> PathBuf {
    root.path(path.strip_prefix("/").unwrap_or(path))
}

/// `max` in v2, and in v1 a number near the largest there is, mean that there is no limit.
fn bounded(text: &str) -> Option<Bytes> {
    text.parse()
        .ok()
        .filter(|bytes| *bytes < 1 << 60)
        .map(Bytes)
}

/// A size as the files' names have it: `64KB`, `2MB`, `1GB`.
fn unit(size: PageSize) -> String {
    let (shift, unit) = match size.bytes() {
        bytes if bytes >= 1 << 30 => (30, "GB"),
        bytes if bytes >= 1 << 20 => (20, "MB"),
        _ => (10, "KB"),
    };
    format!("{}{unit}", size.bytes() >> shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::fake;

    #[test]
    fn a_process_is_bounded_by_the_groups_above_it() {
        let mounts = "35 31 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let (_folder, root) = fake::host(&[
            ("proc/7/cgroup", "0::/a/b\n"),
            ("proc/8/cgroup", "0::/c\n"),
            ("proc/self/mountinfo", mounts),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
            ("sys/fs/cgroup/a/memory.max", "134217728\n"),
            ("sys/fs/cgroup/a/memory.current", "104857600\n"),
            (
                "sys/fs/cgroup/a/memory.stat",
                "active_file 0\ninactive_file 0\nfile_dirty 0\nfile_writeback 0\n",
            ),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/c/memory.max", "max\n"),
        ]);
        let limit = memory_limit(&root, 7).unwrap();
        // An eighth of 128 MiB of the 28 MiB that are left.
        assert_eq!(limit.spare(), Bytes(12 << 20));
        assert_eq!(memory_limit(&root, 8), None);
        assert_eq!(memory_limit(&root, 9), None);
        let large = Limit {
            limit: Bytes(1 << 30),
            usage: Bytes(1000 << 20),
            ..limit
        };
        assert_eq!(large.spare(), Bytes(0));
    }
}
