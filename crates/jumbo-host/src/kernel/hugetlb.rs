//! The kernel's hugetlb pools: /sys/kernel/mm/hugepages and
//! /sys/devices/system/node/node*/hugepages (Documentation/admin-guide/mm/hugetlbpage.rst), and the
//! hugetlbfs mounts.

use std::collections::BTreeMap;

use procfs_core::Meminfo;
use serde::Serialize;

use super::{FileError, Root, parse};
use super::{absent, optional, size_folders, size_of_folder};
use crate::units::{Bytes, NodeId, PageSize, Pages};
use jumbo_sys::mounts;

/// Folder of the pools, relative to a [`Root`].
pub const FOLDER: &str = "sys/kernel/mm/hugepages";
const NODES: &str = "sys/devices/system/node";

/// Maximum number of repeated reads of numbers that change meanwhile.
const MAX_REREADS: u32 = 64;

/// A hugetlb pool. `total` includes persistent and surplus pages; `free` includes reserved pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pool {
    /// Page size.
    pub size: PageSize,
    /// `nr_hugepages`: all pages of the pool.
    pub total: Pages,
    /// `free_hugepages`: pages that no mapping or file has.
    pub free: Pages,
    /// `resv_hugepages`: free pages reserved for mappings.
    pub reserved: Pages,
    /// `surplus_hugepages`: pages beyond the persistent ones, on demand.
    pub surplus: Pages,
    /// `nr_overcommit_hugepages`: maximum number of surplus pages.
    pub overcommit: Pages,
    /// `demote_size`: size of the parts of a demoted page (5.16).
    pub demote_size: Option<PageSize>,
    /// Pages on each node; empty on kernels without NUMA.
    pub nodes: BTreeMap<NodeId, NodePool>,
}

/// Pages of a pool on one node. Reservations belong to no node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodePool {
    /// `nr_hugepages`.
    pub total: Pages,
    /// `free_hugepages`.
    pub free: Pages,
    /// `surplus_hugepages`.
    pub surplus: Pages,
}

/// A hugetlbfs mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mount {
    /// Mount point.
    pub path: String,
    /// `pagesize=`, `size=`, `min_size=` and other mount options, as the kernel shows them.
    pub options: BTreeMap<String, Option<String>>,
}

impl NodePool {
    /// Pages that stay without demand.
    pub fn persistent(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.surplus.0))
    }

    /// Pages that are mapped.
    pub fn used(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.free.0))
    }
}

impl Pool {
    /// Pages of all nodes.
    pub fn pages(&self) -> NodePool {
        NodePool {
            total: self.total,
            free: self.free,
            surplus: self.surplus,
        }
    }

    /// Pages that stay without demand.
    pub fn persistent(&self) -> Pages {
        self.pages().persistent()
    }

    /// Pages that are mapped.
    pub fn used(&self) -> Pages {
        self.pages().used()
    }

    /// Pages that are neither mapped nor reserved.
    pub fn unused(&self) -> Pages {
        Pages(self.free.0.saturating_sub(self.reserved.0))
    }

    /// Surplus pages that the kernel may still add.
    pub fn may_grow_by(&self) -> Pages {
        Pages(self.overcommit.0.saturating_sub(self.surplus.0))
    }
}

/// All pools by ascending size; `None` where this kernel has no hugetlb.
///
/// Each number is a file of its own, and they change meanwhile: all are read until two reads agree.
pub fn pools(root: &Root) -> Result<Option<Vec<Pool>>, FileError> {
    let Some(folders) = optional(size_folders(root, FOLDER))? else {
        return absent(root).map(|()| None);
    };
    let (pools, _) = stable(|| read_pools(root, &folders))?;
    Ok(Some(pools))
}

/// The pool of the default size according to /proc, without nodes, for hosts that hide /sys; `None`
/// where the kernel has no hugetlb.
pub fn default_pool(root: &Root) -> Result<Option<Pool>, FileError> {
    let Some(size) = default_size(root)? else {
        return Ok(None);
    };
    let read = || {
        let info: Meminfo = parse(root, "proc/meminfo")?;
        let overcommit = optional(root.read_u64("proc/sys/vm/nr_overcommit_hugepages"))?;
        let pages = |number: Option<u64>| Pages(number.unwrap_or(0));
        Ok(Pool {
            size,
            total: pages(info.hugepages_total),
            free: pages(info.hugepages_free),
            reserved: pages(info.hugepages_rsvd),
            surplus: pages(info.hugepages_surp),
            overcommit: pages(overcommit),
            demote_size: None,
            nodes: BTreeMap::new(),
        })
    };
    Ok(Some(stable(read)?.0))
}

/// Repeats a read until two results in a row agree. After [`MAX_REREADS`] it returns the last
/// result and false.
pub(crate) fn stable<T: PartialEq>(
    read: impl Fn() -> Result<T, FileError>,
) -> Result<(T, bool), FileError> {
    let mut last = read()?;
    for _ in 0..MAX_REREADS {
        let again = read()?;
        if again == last {
            return Ok((again, true));
        }
        last = again;
    }
    Ok((last, false))
}

fn read_pools(root: &Root, folders: &BTreeMap<PageSize, String>) -> Result<Vec<Pool>, FileError> {
    let all = super::nodes(root)?;
    let pool = |&size: &PageSize| {
        let pages = |node, name| root.read_u64(file(size, node, name)).map(Pages);
        let mut nodes = BTreeMap::new();
        for number in &all {
            let node = Some(*number);
            if let Some(total) = optional(pages(node, "nr_hugepages"))? {
                let part = NodePool {
                    total,
                    free: pages(node, "free_hugepages")?,
                    surplus: pages(node, "surplus_hugepages")?,
                };
                nodes.insert(*number, part);
            }
        }
        let demote_size = optional(root.read(file(size, None, "demote_size")))?;
        Ok(Pool {
            size,
            total: pages(None, "nr_hugepages")?,
            free: pages(None, "free_hugepages")?,
            reserved: pages(None, "resv_hugepages")?,
            surplus: pages(None, "surplus_hugepages")?,
            overcommit: pages(None, "nr_overcommit_hugepages")?,
            demote_size: demote_size.and_then(|text| text.trim().parse().ok()),
            nodes,
        })
    };
    folders.keys().map(pool).collect()
}

/// Path of the file `name` of the pool of `size` pages, or of its part on `node`.
pub fn file(size: PageSize, node: Option<NodeId>, name: &str) -> String {
    let kib = size.kib();
    match node {
        None => format!("{FOLDER}/hugepages-{kib}kB/{name}"),
        Some(node) => format!("{NODES}/node{node}/hugepages/hugepages-{kib}kB/{name}"),
    }
}

/// Page size and node in a path of [`file()`].
pub fn of_file(path: &str) -> Option<(PageSize, Option<NodeId>)> {
    let mut parts = path.rsplit('/').skip(1);
    let size = size_of_folder(parts.next()?)?;
    let node = parts.find_map(|part| part.strip_prefix("node")?.parse().ok());
    Some((size, node.map(NodeId)))
}

/// Default page size of `vm.nr_hugepages` and MAP_HUGETLB: `Hugepagesize` of /proc/meminfo. `None`
/// where the kernel has no hugetlb.
pub fn default_size(root: &Root) -> Result<Option<PageSize>, FileError> {
    let info: Meminfo = parse(root, "proc/meminfo")?;
    let size = info.hugepagesize.map(PageSize::new);
    Ok(size.and_then(Result::ok))
}

/// The hugetlbfs mounts in this mount namespace.
pub fn mounts(root: &Root) -> Result<Vec<Mount>, FileError> {
    let table = root.read_bytes("proc/self/mountinfo")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let found = mounts::mounts(&table).filter(|mount| mount.kind == b"hugetlbfs");
    let mount = |mount: mounts::Mount<'_>| Mount {
        path: mounts::path(mount.point).display().to_string(),
        options: (mount.options())
            .map(|(name, value)| (text(name), value.map(text)))
            .collect(),
    };
    Ok(found.map(mount).collect())
}

/// Memory of the pages in use of all pools.
pub fn used(pools: &[Pool]) -> Bytes {
    pools.iter().map(|pool| pool.used().bytes(pool.size)).sum()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_path_names_the_pool() {
        for node in [None, Some(NodeId(3))] {
            let path = file(PageSize::SIZE_1G, node, "nr_hugepages");
            assert_eq!(of_file(&path), Some((PageSize::SIZE_1G, node)));
        }
        assert_eq!(of_file(crate::kernel::hvo::FILE), None);
    }

    #[test]
    fn a_torn_read_is_repeated() {
        let reads = Cell::new(0);
        let read = |values: &'static [u64]| {
            reads.set(0);
            stable(|| {
                let at: usize = reads.replace(reads.get() + 1);
                Ok(values[at % values.len()])
            })
            .unwrap()
        };
        assert_eq!(read(&[7]), (7, true));
        assert_eq!(read(&[12, 8, 8, 9]), (8, true));
        assert!(!read(&[1, 2]).1);
        assert_eq!(reads.get(), MAX_REREADS as usize + 1);
    }
}
