//! Hugetlb and memory limits of a control group, in both versions
//! (Documentation/admin-guide/cgroup-v1/hugetlb.rst, cgroup-v2.rst).
//!
//! The limits of all ancestors apply too, so the walk goes up to the mount. In a container, limits
//! above the mount are invisible.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{FileError, Root, optional};
use crate::units::{Bytes, PageSize};
use jumbo_sys::cgroup::{Group, clean_files, groups, limit, with_controller};
use jumbo_sys::mounts::{self, Mount, mounts};

/// The table of mounts.
const MOUNTS: &str = "proc/self/mountinfo";

/// The tightest limit of a group and its ancestors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// File with the limit.
    pub file: PathBuf,
    /// Maximum usage.
    pub limit: Bytes,
    /// Current usage.
    pub usage: Bytes,
    /// Clean page cache in `usage`, which the kernel can reclaim without a write.
    pub reclaimable: Bytes,
}

/// The limits on this process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Version of the cgroups that have the hugetlb controller; `None` where none has it.
    pub hugetlb_version: Option<u8>,
    /// Limits on touched hugetlb pages, by size. A touch beyond them is SIGBUS.
    pub hugetlb: BTreeMap<PageSize, Limit>,
    /// Limits on reserved hugetlb pages, by size (5.7). Beyond them mmap(2) fails with ENOMEM.
    pub reservations: BTreeMap<PageSize, Limit>,
    /// Limit on all memory.
    pub memory: Option<Limit>,
}

impl Limit {
    /// Memory that the group can still get.
    pub fn room(&self) -> Bytes {
        let fixed = self.usage.0.saturating_sub(self.reclaimable.0);
        Bytes(self.limit.0.saturating_sub(fixed))
    }

    /// The room less a reserve for growth of the group: an eighth of the limit, 64 MiB at most.
    pub fn spare(&self) -> Bytes {
        const MAX_RESERVE_BYTES: u64 = 64 << 20;
        let reserve = (self.limit.0 / 8).min(MAX_RESERVE_BYTES);
        Bytes(self.room().0.saturating_sub(reserve))
    }
}

/// Folders of a controller: that of the process's group, and the mount above it.
struct ControllerGroup {
    version: u8,
    mount: PathBuf,
    folder: PathBuf,
}

impl Limits {
    /// Reads the limits for hugetlb pages of `sizes` and for memory.
    pub fn read(root: &Root, sizes: &[PageSize]) -> Result<Self, FileError> {
        let mut limits = Self::default();
        if let Some(group) = ControllerGroup::of(root, "self", "hugetlb")? {
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
        if let Some(group) = ControllerGroup::of(root, "self", "memory")? {
            limits.memory = group.tightest(root, "memory")?;
        }
        Ok(limits)
    }
}

/// Mount point of the hierarchy with the memory controller; `None` where there is none.
pub(super) fn memory_mount(root: &Root) -> Result<Option<PathBuf>, FileError> {
    let group = ControllerGroup::of(root, "self", "memory")?;
    Ok(group.map(|group| group.mount))
}

/// Path, relative to a [`Root`], of the memory pressure file of the group of `pid`; `None` without
/// a visible group of version 2.
pub fn pressure_file(root: &Root, pid: u32) -> Option<PathBuf> {
    let text = root.read_bytes(format!("proc/{pid}/cgroup")).ok()?;
    let group = groups(&text).find(|group| group.version == 2)?;
    let table = root.read_bytes(MOUNTS).ok()?;
    let mount = mounts(&table).find(|mount| mount.kind == b"cgroup2")?;
    let file = inside(&mount, &group).join("memory.pressure");
    let file = file.strip_prefix("/").ok()?.to_owned();
    root.path(&file).exists().then_some(file)
}

/// Path of the group that counts the memory of `pid`, as in /proc/PID/cgroup; `None` where the
/// process is gone.
pub fn path(root: &Root, pid: u32) -> Option<String> {
    let text = root.read_bytes(format!("proc/{pid}/cgroup")).ok()?;
    let group = with_controller(&text, b"memory")?;
    Some(String::from_utf8_lossy(group.path).into_owned())
}

/// The memory limit on `pid`; `None` where none is visible.
pub fn memory_limit(root: &Root, pid: u32) -> Option<Limit> {
    let group = ControllerGroup::of(root, pid, "memory").ok()??;
    group.tightest(root, "memory").ok()?
}

/// PIDs of the processes of a control group and its descendants, ascending. `path` is its folder,
/// or its path in the hierarchy of version 2 or of version 1's memory controller.
///
/// # Errors
/// [`FileError::Io`] where there is no such group.
pub fn members(root: &Root, path: &Path) -> Result<Vec<u32>, FileError> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let table = root.read_bytes(MOUNTS)?;
    let is_cgroup = |mount: &Mount<'_>| {
        mount.kind == b"cgroup2" || mount.kind == b"cgroup" && mount.has(b"memory")
    };
    let mounts = mounts(&table).filter(is_cgroup).map(|mount| {
        let point = mounts::path(mount.point);
        point.strip_prefix("/").unwrap_or(&point).join(below)
    });
    let mut folders = std::iter::once(below.to_owned()).chain(mounts);
    let folder = folders.find(|folder| root.path(folder.join("cgroup.procs")).exists());
    let missing = || FileError::io("read", path)(std::io::ErrorKind::NotFound.into());
    let mut left = vec![folder.ok_or_else(missing)?];
    let mut pids = Vec::new();
    while let Some(folder) = left.pop() {
        // A group may be removed meanwhile. A threaded group lists its processes in its ancestor.
        let list = root.read(folder.join("cgroup.procs")).unwrap_or_default();
        pids.extend(list.split_ascii_whitespace().flat_map(str::parse::<u32>));
        let entries = root.list(&folder).unwrap_or_default().into_iter();
        let folders = entries.map(|entry| folder.join(entry));
        left.extend(folders.filter(|folder| root.path(folder).is_dir()));
    }
    pids.sort_unstable();
    pids.dedup();
    // A process outside this PID namespace is listed as 0.
    pids.retain(|pid| *pid > 0);
    Ok(pids)
}

impl ControllerGroup {
    /// The group of `pid`, a PID or `self`; `None` where no visible hierarchy has the controller.
    fn of(root: &Root, pid: impl Display, controller: &str) -> Result<Option<Self>, FileError> {
        let text = optional(root.read_bytes(format!("proc/{pid}/cgroup")))?.unwrap_or_default();
        let Some(group) = with_controller(&text, controller.as_bytes()) else {
            return Ok(None);
        };
        let table = root.read_bytes(MOUNTS)?;
        let mount = mounts(&table).find(|mount| match group.version {
            1 => mount.kind == b"cgroup" && mount.has(controller.as_bytes()),
            _ => mount.kind == b"cgroup2",
        });
        let found = mount.map(|mount| Self {
            version: group.version,
            mount: below_root(root, &mounts::path(mount.point)),
            folder: below_root(root, &inside(&mount, &group)),
        });
        // The root of a v2 hierarchy has no limit files, so its list of controllers decides.
        let is_named = |text: String| text.split_ascii_whitespace().any(|name| name == controller);
        let listed = |found: &Self| root.read(found.mount.join("cgroup.controllers"));
        Ok(found.filter(|found| group.version == 1 || listed(found).is_ok_and(is_named)))
    }

    /// The tightest limit on `what` of this group and its ancestors up to the mount.
    fn tightest(&self, root: &Root, what: &str) -> Result<Option<Limit>, FileError> {
        let (limits, usage) = match self.version {
            1 => ("limit_in_bytes", "usage_in_bytes"),
            _ => ("max", "current"),
        };
        let mut tightest: Option<Limit> = None;
        let folders = self.folder.ancestors();
        for folder in folders.take_while(|folder| folder.starts_with(&self.mount)) {
            let file = folder.join(format!("{what}.{limits}"));
            let text = optional(root.read_bytes(&file))?;
            let bytes = text.and_then(|text| limit(&text));
            let Some(bytes) = bytes.filter(|bytes| *bytes != usize::MAX) else {
                continue;
            };
            let usage = optional(root.read_u64(folder.join(format!("{what}.{usage}"))))?;
            let reclaimable = if what == "memory" {
                let stat =
                    optional(root.read_bytes(folder.join("memory.stat")))?.unwrap_or_default();
                clean_files(&stat).map_or(0, |bytes| bytes as u64)
            } else {
                0
            };
            let here = Limit {
                file,
                limit: Bytes(bytes as u64),
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

/// The group's folder below a mount. A mount can show only a part of the hierarchy (a bind mount
/// into a container). A group outside that part maps to the mount point.
fn inside(mount: &Mount<'_>, group: &Group<'_>) -> PathBuf {
    let relative = Path::new(OsStr::from_bytes(group.path))
        .strip_prefix(mounts::path(mount.root))
        .unwrap_or(Path::new(""));
    mounts::path(mount.point).join(relative)
}

fn below_root(root: &Root, path: &Path) -> PathBuf {
    root.path(path.strip_prefix("/").unwrap_or(path))
}

/// A size in the format of file names: `64KB`, `2MB`, `1GB`.
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
    fn limits_of_ancestors_apply() {
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
        // 28 MiB of room, less an eighth of 128 MiB.
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
