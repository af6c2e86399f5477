//! The holders of pages of the kernel's pools: [`Holders`].

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::kernel::hugetlb::{self, Pool};
use crate::kernel::{self, FileError, Root, aside, task};
use crate::status::program_of;
use crate::units::{Bytes, PageSize, Pages};

/// Maximum number of files scanned per mount.
const MAX_FILES: usize = 10_000;

/// Pages of one size in one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Process ID.
    pub pid: u32,
    /// Process name, as ps(1) shows it.
    pub name: String,
    /// Page size; `None`: all sizes together, where this user may not read smaps.
    pub size: Option<PageSize>,
    /// Memory in pages that only this process maps.
    pub private: Bytes,
    /// Memory in pages that other processes map too; each counts it.
    pub shared: Bytes,
    /// Mapped but untouched memory: reserved, unless the mapping is MAP_NORESERVE.
    pub untouched: Bytes,
}

/// A file on a hugetlbfs mount that has pages, mapped or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Page size of the mount, if known.
    pub size: Option<PageSize>,
    /// Memory in its pages.
    pub bytes: Bytes,
}

/// All processes and files with pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holders {
    /// Processes, the largest first.
    pub processes: Vec<Holder>,
    /// Files, the largest first.
    pub files: Vec<HeldFile>,
    /// Number of processes whose smaps this user may not read: they may hold more than is shown.
    pub hidden: usize,
}

impl Holder {
    /// Memory in mapped pages.
    pub fn resident(&self) -> Bytes {
        self.private + self.shared
    }
}

impl Holders {
    /// Scans the processes that may hold pages of `pools`, and the hugetlbfs mounts. The total of a
    /// process is public; the sizes and reservations need the right to read its smaps.
    ///
    /// # Errors
    /// [`FileError`] where /proc cannot be listed.
    pub fn read(root: &Root, pools: &[Pool]) -> Result<Self, FileError> {
        let mut holders = Self::default();
        if pools.iter().all(|pool| pool.total == Pages(0)) {
            return Ok(holders);
        }
        let base = kernel::base_page(root);
        // smaps takes milliseconds per process; without reservations the status file suffices.
        let all = pools.iter().any(|pool| pool.reserved > Pages(0));
        let pids = task::all(root)?;
        for pid in pids.iter().copied() {
            let Ok(Some(memory)) = task::memory(root, pid) else {
                continue;
            };
            // A reaper shares its program's memory, which would count twice.
            if (all || memory.hugetlb > Bytes(0))
                && program_of(root, pid, pids.iter().copied()).is_none()
            {
                holders.add(root, base, pid, memory.hugetlb);
            }
        }
        let size = |holder: &Holder| Reverse((holder.resident(), holder.untouched));
        holders.processes.sort_by_key(size);
        holders.files = files(root);
        holders.files.sort_by_key(|file| Reverse(file.bytes));
        Ok(holders)
    }

    /// Returns the holders that are known to have pages of `size`.
    pub fn of(&self, size: PageSize) -> impl Iterator<Item = &Holder> {
        let is_of = move |holder: &&Holder| holder.size == Some(size);
        self.processes.iter().filter(is_of)
    }

    fn add(&mut self, root: &Root, base: PageSize, pid: u32, hugetlb: Bytes) {
        let holder = |size, private| Holder {
            pid,
            name: task::name(root, pid).unwrap_or_default(),
            size,
            private,
            ..Holder::default()
        };
        let smaps = match aside::smaps(root, pid) {
            Ok(smaps) => smaps,
            Err(error) if error.is_missing() => return,
            Err(_) => {
                self.hidden += 1;
                if hugetlb > Bytes(0) {
                    self.processes.push(holder(None, hugetlb));
                }
                return;
            }
        };
        let mut found: BTreeMap<PageSize, Holder> = BTreeMap::new();
        for mapping in smaps.mappings() {
            let Some(size) = mapping.kernel_page_size.filter(|size| *size > base) else {
                continue;
            };
            let holder = found
                .entry(size)
                .or_insert_with(|| holder(Some(size), Bytes(0)));
            holder.private += mapping.private_hugetlb;
            holder.shared += mapping.shared_hugetlb;
            let rest = mapping.size().0.saturating_sub(mapping.hugetlb().0);
            holder.untouched += Bytes(rest);
        }
        self.processes.extend(found.into_values());
    }
}

fn files(root: &Root) -> Vec<HeldFile> {
    let mut found = Vec::new();
    for mount in hugetlb::mounts(root).unwrap_or_default() {
        let option = mount.options.get("pagesize").cloned().flatten();
        let size = option.and_then(|text| text.parse().ok());
        let folder = root.path(mount.path.trim_start_matches('/'));
        let Ok(device) = fs::symlink_metadata(&folder).map(|metadata| metadata.dev()) else {
            continue;
        };
        let mut budget = MAX_FILES;
        walk(&folder, device, size, &mut budget, &mut found);
    }
    found
}

/// Finds every file with pages below `folder` on `device`. Follows no links.
fn walk(
    folder: &Path,
    device: u64,
    size: Option<PageSize>,
    budget: &mut usize,
    found: &mut Vec<HeldFile>,
) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if *budget == 0 {
            return;
        }
        *budget -= 1;
        let metadata = entry.metadata().ok();
        let Some(metadata) = metadata.filter(|metadata| metadata.dev() == device) else {
            continue;
        };
        let path = entry.path();
        // st_blocks is in 512 bytes, whatever the block size (inode(7)).
        let bytes = Bytes(metadata.blocks().saturating_mul(512));
        if metadata.is_dir() {
            walk(&path, device, size, budget, found);
        } else if metadata.is_file() && bytes > Bytes(0) {
            found.push(HeldFile { path, size, bytes });
        }
    }
}
