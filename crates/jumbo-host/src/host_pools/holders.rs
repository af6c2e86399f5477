//! Who has the pages of the kernel's pools: [`Holders`].

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

/// How many files of a mount are looked at.
const FILES: usize = 10_000;

/// What one process has of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// The process.
    pub pid: u32,
    /// Its name, as ps(1) shows it.
    pub name: String,
    /// The page size; `None` where this user may not look, and the bytes are of all sizes.
    pub size: Option<PageSize>,
    /// In pages that it alone maps.
    pub private: Bytes,
    /// In pages that others map too, each of them counting them.
    pub shared: Bytes,
    /// Mapped and not touched yet: reserved, unless the mapping is MAP_NORESERVE.
    pub untouched: Bytes,
}

/// A file on a hugetlbfs mount that has pages, mapped or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldFile {
    /// Where.
    pub path: PathBuf,
    /// The mount's page size, where it is known.
    pub size: Option<PageSize>,
    /// In pages.
    pub bytes: Bytes,
}

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Holders {
    /// Processes, those with the most first.
    pub processes: Vec<Holder>,
    /// Files, the largest first.
    pub files: Vec<HeldFile>,
    /// Processes that this user may not look into, and that may hold more than is shown.
    pub hidden: usize,
}

impl Holder {
    /// Pages it maps.
    pub fn resident(&self) -> Bytes {
        self.private + self.shared
    }
}

impl Holders {
    /// Looks at every process that may hold pages of `pools`, and at the hugetlbfs mounts. Any user sees
    /// how much a process has; by size, and what is reserved, only who may read its smaps.
    ///
    /// # Errors
    /// [`FileError`] where /proc cannot be listed.
    pub fn read(root: &Root, pools: &[Pool]) -> Result<Self, FileError> {
        let mut holders = Self::default();
        if pools.iter().all(|pool| pool.total == Pages(0)) {
            return Ok(holders);
        }
        let base = kernel::base_page(root);
        // Reading smaps takes milliseconds a process; without reservations the status file tells who.
        let all = pools.iter().any(|pool| pool.reserved > Pages(0));
        let pids = task::all(root)?;
        for pid in pids.iter().copied() {
            let Ok(Some(memory)) = task::memory(root, pid) else {
                continue;
            };
            // What the program of a reaper has, the reaper would have once more.
            if (all || memory.hugetlb > Bytes(0))
                && program_of(root, pid, pids.iter().copied()).is_none()
            {
                holders.look(root, base, pid, memory.hugetlb);
            }
        }
        let most = |holder: &Holder| Reverse((holder.resident(), holder.untouched));
        holders.processes.sort_by_key(most);
        holders.files = files(root);
        holders.files.sort_by_key(|file| Reverse(file.bytes));
        Ok(holders)
    }

    /// What is held of `size`, as far as it is known to be of that size.
    pub fn of(&self, size: PageSize) -> impl Iterator<Item = &Holder> {
        let is_of = move |holder: &&Holder| holder.size == Some(size);
        self.processes.iter().filter(is_of)
    }

    fn look(&mut self, root: &Root, base: PageSize, pid: u32, hugetlb: Bytes) {
        let holder = |size, private| Holder {
            pid,
            name: task::name(root, pid).unwrap_or_default(),
            size,
            private,
            ..Holder::default()
        };
        let smaps = match aside::smaps(root, pid) {
            Ok(smaps) => smaps,
            Err(error) if error.is_denied() => {
                self.hidden += 1;
                if hugetlb > Bytes(0) {
                    self.processes.push(holder(None, hugetlb));
                }
                return;
            }
            // It has ended.
            Err(_) => return,
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
        let mut left = FILES;
        walk(&folder, device, size, &mut left, &mut found);
    }
    found
}

/// Every file with pages below `folder`, on its own file system, following no links.
fn walk(
    folder: &Path,
    device: u64,
    size: Option<PageSize>,
    left: &mut usize,
    found: &mut Vec<HeldFile>,
) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        let metadata = entry.metadata().ok();
        let Some(metadata) = metadata.filter(|metadata| metadata.dev() == device) else {
            continue;
        };
        let path = entry.path();
        // st_blocks is in 512 bytes, whatever the block size (inode(7)).
        let bytes = Bytes(metadata.blocks().saturating_mul(512));
        if metadata.is_dir() {
            walk(&path, device, size, left, found);
        } else if metadata.is_file() && bytes > Bytes(0) {
            found.push(HeldFile { path, size, bytes });
        }
    }
}
