//! Memory of the host: /proc/{meminfo,vmstat,buddyinfo} and its nodes.

use std::collections::BTreeMap;

use procfs_core::{Meminfo, VmStat};
use serde::Serialize;

use super::{FileError, Root, parse};
use crate::units::{Bytes, NodeId, Order, PageSize, Pages};

/// Size of `struct page`, one for each base page, on all 64-bit kernels.
pub const DESCRIPTOR: Bytes = Bytes(64);

/// Values of /proc/meminfo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Memory managed by the kernel.
    pub total: Bytes,
    /// Free memory.
    pub free: Bytes,
    /// Memory available without swapping (Linux 3.14).
    pub available: Bytes,
    /// Anonymous memory of all processes.
    pub anon: Bytes,
    /// Anonymous memory in THPs mapped by PMD.
    pub anon_huge: Bytes,
    /// Shared memory and tmpfs.
    pub shmem: Bytes,
    /// Shared memory in huge folios.
    pub shmem_huge: Bytes,
    /// Page cache in huge folios.
    pub file_huge: Bytes,
    /// Page tables.
    pub page_tables: Bytes,
    /// All pages of all hugetlb pools.
    pub hugetlb: Bytes,
    /// Commit limit under strict overcommit.
    pub commit_limit: Bytes,
    /// Committed memory.
    pub committed: Bytes,
    /// Swap space.
    pub swap_total: Bytes,
    /// Free swap space.
    pub swap_free: Bytes,
}

/// /proc/vmstat, by the kernel's names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Events(pub BTreeMap<String, u64>);

/// The free blocks of one zone, from /proc/buddyinfo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Zone {
    /// The node it belongs to.
    pub node: NodeId,
    /// `DMA`, `DMA32`, `Normal`, `Movable`.
    pub name: String,
    /// Number of free blocks of each order, from 0 up.
    pub blocks: Vec<u64>,
}

/// Memory of page metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Metadata {
    /// Bytes of it.
    pub bytes: Bytes,
    /// True if the kernel counted it; else it is computed, 64 bytes per base page, without the
    /// savings of HVO.
    pub counted: bool,
}

impl Memory {
    /// Reads /proc/meminfo.
    ///
    /// # Errors
    /// [`FileError`] if the file cannot be read or parsed.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        let info: Meminfo = parse(root, "proc/meminfo")?;
        let optional = |bytes: Option<u64>| Bytes(bytes.unwrap_or(0));
        Ok(Self {
            total: Bytes(info.mem_total),
            free: Bytes(info.mem_free),
            available: Bytes(info.mem_available.unwrap_or(info.mem_free)),
            anon: optional(info.anon_pages),
            anon_huge: optional(info.anon_hugepages),
            shmem: optional(info.shmem),
            shmem_huge: optional(info.shmem_hugepages),
            file_huge: optional(info.file_huge_pages),
            page_tables: optional(info.page_tables),
            hugetlb: optional(info.hugetlb),
            commit_limit: optional(info.commit_limit),
            committed: Bytes(info.committed_as),
            swap_total: Bytes(info.swap_total),
            swap_free: Bytes(info.swap_free),
        })
    }
}

impl Events {
    /// Reads /proc/vmstat.
    ///
    /// # Errors
    /// [`FileError`] if the file cannot be read or parsed.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        let VmStat(events) = parse(root, "proc/vmstat")?;
        let count = |(name, value)| (name, u64::try_from(value).unwrap_or(0));
        Ok(Self(events.into_iter().map(count).collect()))
    }

    /// Returns a counter; `None` if the kernel does not have it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    /// Returns the memory of page metadata: nr_memmap_pages and nr_memmap_boot_pages (Linux 6.12),
    /// else computed from the total memory.
    pub fn metadata(&self, memory: &Memory, base: PageSize) -> Metadata {
        match (
            self.get("nr_memmap_pages"),
            self.get("nr_memmap_boot_pages"),
        ) {
            (Some(pages), Some(boot)) => Metadata {
                bytes: Pages(pages + boot).bytes(base),
                counted: true,
            },
            _ => Metadata {
                bytes: Bytes(memory.total.whole_pages(base).0 * DESCRIPTOR.0),
                counted: false,
            },
        }
    }
}

impl Zone {
    /// Reads /proc/buddyinfo.
    ///
    /// # Errors
    /// [`FileError`] if the file cannot be read or parsed.
    pub fn read_all(root: &Root) -> Result<Vec<Self>, FileError> {
        let relative = "proc/buddyinfo";
        let zone = |line: &str| {
            let (node, rest) = line.strip_prefix("Node ")?.split_once(',')?;
            let mut words = rest.split_ascii_whitespace().skip(1);
            Some(Self {
                node: NodeId(node.parse().ok()?),
                name: words.next()?.to_owned(),
                blocks: words.map(|word| word.parse().ok()).collect::<Option<_>>()?,
            })
        };
        let text = root.read(relative)?;
        let parsed = |line| {
            let other = || format!("`{line}` where free blocks of a zone were expected");
            zone(line).ok_or_else(|| root.misread(relative, other()))
        };
        text.lines().map(parsed).collect()
    }

    /// Returns the number of pages of `size` in the free blocks. `None` if the allocator's largest
    /// block is smaller: the adjacency of blocks is unknown.
    pub fn whole(&self, size: PageSize, base: PageSize) -> Option<Pages> {
        let wanted = usize::try_from(size.order(base).0).ok()?;
        let blocks = self.blocks.get(wanted..).filter(|b| !b.is_empty())?;
        Some(Pages(weighed(blocks)))
    }

    /// Returns the size of the largest possible block.
    pub fn largest(&self, base: PageSize) -> Option<PageSize> {
        let order = u32::try_from(self.blocks.len().checked_sub(1)?).ok()?;
        Some(Order(order).size(base))
    }

    /// Returns its free memory.
    pub fn free(&self, base: PageSize) -> Bytes {
        Pages(weighed(&self.blocks)).bytes(base)
    }
}

/// Sums blocks in units of the first, each order twice as large as the one before.
fn weighed(blocks: &[u64]) -> u64 {
    blocks.iter().zip(0..).map(|(n, order)| n << order).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_blocks_count_as_the_pages_they_hold() {
        let zone = Zone {
            node: NodeId(0),
            name: "Normal".to_owned(),
            blocks: vec![3, 0, 0, 0, 0, 0, 0, 0, 0, 5, 7],
        };
        let base = PageSize::SIZE_4K;
        assert_eq!(zone.whole(PageSize::SIZE_2M, base), Some(Pages(5 + 14)));
        assert_eq!(zone.whole(base, base), Some(Pages(3 + 5 * 512 + 7 * 1024)));
        assert_eq!(zone.whole(PageSize::SIZE_1G, base), None);
        assert_eq!(zone.largest(base), PageSize::new(4 << 20).ok());
        assert_eq!(zone.free(base).0, (3 + 5 * 512 + 7 * 1024) * 4096);
    }
}
