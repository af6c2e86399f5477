//! Touch and collapse: [`Region::collapse`].

use std::collections::BTreeMap;

use rustix::io::Errno;

use jumbo_inside::pool::{Room, make_huge};
use jumbo_sys::{Pagemap, Pages, collapse};

use super::file::Extent;
use super::{Error, Region, Rung, call};
use crate::mutex::lock;
use crate::units::{Bytes, PageSize};

/// Memory left to other users during a collapse: the kernel allocates the huge page before it frees
/// the base pages.
const MIN_FREE_BYTES: usize = 64 << 20;
static ROOM: Room = Room::new(MIN_FREE_BYTES);

/// PMD-sized blocks to collapse. A block with a hole of [`Region::punch`] is always left, until all
/// of it was written again: a collapse would fill the hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Fully present blocks: no memory is added.
    Whole,
    /// Blocks with at least one present page.
    Touched,
    /// All blocks.
    All,
}

/// Result of [`Region::collapse`], in PMD-sized blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Collapsed {
    /// Made huge.
    pub collapsed: u64,
    /// Huge before. A kernel before Linux 6.7 does not report them: they count as made huge.
    pub already: u64,
    /// Left: not touched, or not enough for the requested [`Blocks`].
    pub untouched: u64,
    /// Left: with a hole.
    pub holes: u64,
    /// Left: no huge page was available, or no memory for one.
    pub failed: u64,
}

/// Counters of a region for one page size, by the kernel's names
/// (Documentation/admin-guide/mm/transhuge.rst). The kernel counts the pages of first touches for
/// the whole host: `hugepages-*kB/stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Counts {
    /// Allocated pages.
    pub shmem_alloc: u64,
    /// Failed allocations.
    pub shmem_fallback: u64,
    /// Failed allocations because of the memory cgroup.
    pub shmem_fallback_charge: u64,
}

impl Region {
    /// Collapses blocks onto pages of the PMD size: one touch for each block, then MADV_COLLAPSE
    /// (Linux 6.1). Works on [`Rung::Collapse`] and [`Rung::Kernel`]; does nothing on
    /// [`Rung::Hugetlb`]. No byte changes; other threads may write meanwhile. An incomplete block
    /// at the end is left.
    ///
    /// # Errors
    /// [`Error::Call`] with EINVAL if the kernel refuses the first block, and so all of this
    /// memory: [`Region::standing`] has the reason if a control causes it.
    pub fn collapse(&self, which: Blocks) -> Result<Collapsed, Error> {
        let mut done = Collapsed::default();
        let block = self.block();
        if self.standing.rung == Rung::Hugetlb {
            done.already = (self.size / block) as u64;
            return Ok(done);
        }
        let pagemap = Pagemap::open().ok();
        for index in 0..self.size / block {
            let range = index * block..(index + 1) * block;
            let failed = call("lseek", block as u64);
            let extent = self.file.extent(range.clone()).map_err(failed)?;
            let addresses = self.memory.part(range);
            let huge = |map: &Pagemap| {
                map.count(addresses.clone(), Pages::Huge)
                    .is_ok_and(|huge| huge == block)
            };
            if pagemap.as_ref().is_some_and(huge) {
                done.already += 1;
                continue;
            }
            let is_requested = match extent {
                Extent::All => true,
                _ if self.holes.contains(&index) => {
                    done.holes += 1;
                    continue;
                }
                Extent::Part => which != Blocks::Whole,
                Extent::Nothing => which == Blocks::All,
            };
            if !is_requested {
                done.untouched += 1;
                continue;
            }
            // The huge page, the touched base page, and page tables.
            let Some(_claim) = ROOM.claim(block + (64 << 10)) else {
                self.count(self.pmd, 0, 1, 1);
                done.failed += 1;
                continue;
            };
            match make_huge(addresses.start, block, block, collapse) {
                Ok(()) => {
                    self.count(self.pmd, 1, 0, 0);
                    done.collapsed += 1;
                }
                // A later block may be refused because another thread changes it.
                Err(Errno::INVAL) if done.collapsed + done.failed == 0 => {
                    return Err(call("MADV_COLLAPSE", block as u64)(Errno::INVAL));
                }
                Err(errno) => {
                    self.count(self.pmd, 0, 1, u64::from(errno == Errno::BUSY));
                    done.failed += 1;
                }
            }
        }
        Ok(done)
    }

    /// Returns the bytes that this process maps by huge pages; `None` before Linux 6.7
    /// (PAGEMAP_SCAN).
    pub fn huge(&self) -> Option<Bytes> {
        if self.standing.rung == Rung::Hugetlb {
            return Some(self.size());
        }
        let all = self.memory.part(0..self.size);
        let huge = Pagemap::open().ok()?.count(all, Pages::Huge).ok()?;
        Some(Bytes(huge as u64))
    }

    /// Returns the counters of its own allocations, by page size.
    pub fn counts(&self) -> BTreeMap<PageSize, Counts> {
        lock(&self.counts).clone()
    }

    pub(super) fn count(&self, size: PageSize, alloc: u64, fallback: u64, charge: u64) {
        let mut counts = lock(&self.counts);
        let counts = counts.entry(size).or_default();
        counts.shmem_alloc += alloc;
        counts.shmem_fallback += fallback;
        counts.shmem_fallback_charge += charge;
    }
}
