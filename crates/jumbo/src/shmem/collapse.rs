//! Touch and collapse: [`Region::collapse`].

use std::collections::BTreeMap;

use rustix::io::Errno;

use jumbo_inside::pool::{Room, make_huge};
use jumbo_inside::sys::collapse;
use jumbo_inside::sys::{Pagemap, Pages};

use super::file::Extent;
use super::{Error, Region, Rung, call};
use crate::kernel::lock;
use crate::units::{Bytes, PageSize};

/// What is left to others when a block is collapsed: the kernel takes the huge page before it gives the base pages back.
const LEFT: usize = 64 << 20;
static ROOM: Room = Room::new(LEFT);

/// Which blocks of the PMD size are collapsed. One with a hole that [`Region::punch`] made is left alone in any case, until all of
/// it was written again: a collapse would fill the hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Those of which every page is there: no memory is added.
    Whole,
    /// Those of which a page is there.
    Touched,
    /// All of them.
    All,
}

/// What came of [`Region::collapse`], in blocks of the PMD size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Collapsed {
    /// Made huge.
    pub collapsed: u64,
    /// Huge before; a kernel before Linux 6.7 does not tell, and they count as made huge.
    pub already: u64,
    /// Left as they were: not touched, or not enough, as was asked.
    pub untouched: u64,
    /// Left as they were: with a hole.
    pub holes: u64,
    /// Left as they were: no huge page could be formed, or no memory is left for one.
    pub failed: u64,
}

/// What a region got of one page size, as the kernel names it (Documentation/admin-guide/mm/transhuge.rst). What a first touch brings
/// is the kernel's to count, for the host: `hugepages-*kB/stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Counts {
    /// Pages that it got.
    pub shmem_alloc: u64,
    /// Pages that could not be had.
    pub shmem_fallback: u64,
    /// Of these, those that the memory control group did not allow.
    pub shmem_fallback_charge: u64,
}

impl Region {
    /// Has the kernel put blocks that are on base pages, or on smaller folios, on pages of the PMD size: one touch for each
    /// block, then MADV_COLLAPSE (Linux 6.1). Works on [`Rung::Collapse`] and [`Rung::Kernel`], and does nothing on [`Rung::Hugetlb`].
    /// No byte changes; other threads may write meanwhile. A block at the end that is no whole one is left out.
    ///
    /// # Errors
    /// [`Error::Call`] with EINVAL where the kernel refuses to collapse the first block, and so this memory: [`Region::standing`]
    /// says why, where the controls do.
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
            let asked = match extent {
                Extent::All => true,
                _ if self.holes.contains(&index) => {
                    done.holes += 1;
                    continue;
                }
                Extent::Part => which != Blocks::Whole,
                Extent::Nothing => which == Blocks::All,
            };
            if !asked {
                done.untouched += 1;
                continue;
            }
            // The huge page, the base page that is touched for it, and page tables.
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
                // Later ones may be refused for what another thread is doing to them.
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

    /// How much of it this process has mapped in huge pages: PAGEMAP_SCAN, Linux 6.7; `None` where the kernel does not tell.
    pub fn huge(&self) -> Option<Bytes> {
        if self.standing.rung == Rung::Hugetlb {
            return Some(self.size());
        }
        let all = self.memory.part(0..self.size);
        let huge = Pagemap::open().ok()?.count(all, Pages::Huge).ok()?;
        Some(Bytes(huge as u64))
    }

    /// What it asked for itself and got, by page size.
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
