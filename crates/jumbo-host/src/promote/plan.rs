//! The blocks that are worth a huge page: [`PromotePlan`].
//!
//! smaps has the mappings and what speaks against them; PAGEMAP_SCAN (6.7) finds what is there and what
//! is huge already without a look at every page, and pagemap counts the pages of the blocks that are
//! left. Before 6.7 pagemap alone tells, and what is huge already is collapsed again, which does nothing.
//!
//! The cost of a block is what a collapse allocates beyond the pages that it frees: the part that is not
//! there, is in swap, or is shared with another process (after a fork), since the other keeps its copy.

use std::collections::BTreeMap;
use std::ops::Range;

use jumbo_inside::orders::MaxWaste;
use rustix::io::Errno;
use serde::Serialize;

use super::{Outcome, Refusal, Target};
use crate::kernel::smaps::Mapping;
use crate::kernel::sys::Pagemap;
use crate::kernel::{FileError, aside, cgroup};
use crate::status::{Kind, process::Observer};
use crate::units::{Bytes, PageSize};

/// A block of which less is there is sparse.
const DENSE_PART: usize = 2;
/// The memory that may be filled up in a process of any size.
const FLOOR: Bytes = Bytes(16 << 20);
/// Before 6.7 a mapping of which less is there than a part of so many is too large to be looked through.
const FULL_PART: u64 = 64;

/// The memory that is to be huge, and what that may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Private anonymous memory: heap, bss, thread stacks.
    pub heap: bool,
    /// Text of files.
    pub text: bool,
    /// Shared memory.
    pub shm: bool,
    /// The memory that blocks may be filled up with.
    pub max_waste: MaxWaste,
}

impl Selection {
    /// Whether a mapping is meant.
    pub(super) fn takes(&self, kind: Kind, mapping: &Mapping<'_>) -> bool {
        match kind {
            Kind::Heap => self.heap,
            // Of data the bss: pages of a file that were written to cannot be collapsed.
            Kind::Data => self.heap && mapping.inode == 0,
            Kind::Text => self.text,
            Kind::Shared => self.shm,
            Kind::Stack | Kind::File => false,
        }
    }
}

/// The memory of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Resident.
    pub resident: Bytes,
    /// Of that mapped by PMD, or on hugetlb pages.
    pub huge: Bytes,
    /// To be collapsed.
    pub gain: Bytes,
    /// The memory that this takes beyond what is resident.
    pub cost: Bytes,
    /// Resident memory that stays on base pages, by the reason.
    pub left: BTreeMap<&'static str, Bytes>,
}

/// The memory that is to be collapsed.
#[derive(Clone, Debug, Serialize)]
pub struct PromotePlan {
    /// The resident memory of the process, of any kind.
    pub resident: Bytes,
    /// The size of a huge page.
    pub huge_page: PageSize,
    /// By kind, those that are meant.
    pub kinds: BTreeMap<Kind, Part>,
    /// The memory that blocks may be filled up with; `None`: any.
    pub bound: Option<Bytes>,
    /// To be collapsed.
    pub gain: Bytes,
    /// The memory that this takes beyond what is resident.
    pub cost: Bytes,
    /// The blocks, the fullest first.
    #[serde(skip)]
    pub(super) blocks: Vec<Block>,
}

/// A block that can be collapsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) kind: Kind,
    /// Its resident memory.
    pub(super) resident: Bytes,
    pub(super) cost: Bytes,
}

/// The reasons in [`Part::left`], in words.
pub fn left_out(reason: &str) -> &str {
    match reason {
        "sparse" => "in blocks that are less than half full",
        "bound" => "in blocks that would take more than --max-waste allows",
        "group" => "in blocks that would take more than its control group can spare",
        "edge" => "outside of whole aligned blocks",
        "declined" => "under MADV_NOHUGEPAGE",
        "unaligned" => "mapped at addresses that do not fit the file's huge pages",
        "hidden" => "in a mapping that is too sparse to look through on this kernel",
        other => other,
    }
}

impl PromotePlan {
    /// The plan for a process as it is now. `spent` is what earlier plans of the same command filled up.
    ///
    /// # Errors
    /// [`Refusal`] where it cannot be looked into.
    pub fn new(target: &Target, selection: &Selection, spent: Bytes) -> Result<Self, Refusal> {
        let observer = Observer::new(&target.root)?.reading(aside::smaps);
        let (base, pmd) = (crate::kernel::base_page(&target.root), observer.pmd_size());
        let pagemap = target.pagemap()?;
        let mut survey = Survey {
            pagemap: &pagemap,
            base: size(base),
            pmd: size(pmd),
            scans: true,
        };
        let (mut kinds, mut found): (BTreeMap<Kind, Part>, Vec<Block>) = Default::default();
        let (mut resident, mut failed) = (Bytes(0), None);
        let each = observer.each(target.pid(), |kind, mapping| {
            resident += mapping.rss;
            if selection.takes(kind, mapping) {
                let kind = if kind == Kind::Data { Kind::Heap } else { kind };
                let part = kinds.entry(kind).or_default();
                if let Err(error) = survey.mapping(kind, mapping, part, &mut found) {
                    failed = Some(error);
                }
            }
        });
        each.map_err(|error| target.unreadable(error))?;
        if let Some(errno) = failed {
            let path = target.root.path(format!("proc/{}/pagemap", target.pid()));
            return Err(target.unreadable(FileError::io("read", &path)(errno.into())));
        }
        let bound = bound(selection.max_waste, resident);
        let room = bound.map(|bound| Bytes(bound.0.saturating_sub(spent.0)));
        let spare = cgroup::memory_limit(&target.root, target.pid()).map(|limit| limit.spare());
        let is_group = spare.is_some_and(|spare| room.is_none_or(|room| spare < room));
        let (room, reason) = match is_group {
            true => (spare, "group"),
            false => (room, "bound"),
        };
        let blocks = choose(found, room, |kind, block| {
            let part = kinds.entry(kind).or_default();
            *part.left.entry(reason).or_default() += block.resident;
        });
        for block in &blocks {
            let part = kinds.entry(block.kind).or_default();
            part.gain += Bytes(pmd.bytes());
            part.cost += block.cost;
        }
        Ok(Self {
            resident,
            huge_page: pmd,
            bound,
            gain: kinds.values().map(|part| part.gain).sum(),
            cost: kinds.values().map(|part| part.cost).sum(),
            kinds,
            blocks,
        })
    }

    /// The rest of it, after an outcome that was cut short.
    #[must_use]
    pub fn after(mut self, outcome: &Outcome) -> Self {
        let refused: Bytes = outcome.failures.iter().map(|failure| failure.bytes).sum();
        let done = outcome.obtained + outcome.changed + refused;
        let done = usize::try_from(done.0 / self.huge_page.bytes()).unwrap_or(usize::MAX);
        self.blocks.drain(..done.min(self.blocks.len()));
        self.gain = Bytes(self.huge_page.bytes() * self.blocks.len() as u64);
        self
    }

    /// True where there is nothing to collapse.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// The memory that may be filled up, as in `jumbo run`.
fn bound(max_waste: MaxWaste, resident: Bytes) -> Option<Bytes> {
    match max_waste {
        MaxWaste::Unbounded => None,
        MaxWaste::Percent(0) => Some(Bytes(0)),
        MaxWaste::Percent(percent) => {
            let share = Bytes(resident.0 / 100 * u64::from(percent));
            Some(share.max(FLOOR))
        }
    }
}

/// The blocks that fit into `room`, those that cost the least first; `left` has the others.
fn choose(
    mut found: Vec<Block>,
    room: Option<Bytes>,
    mut left: impl FnMut(Kind, &Block),
) -> Vec<Block> {
    found.sort_by_key(|block| (block.cost, block.address));
    let mut cost = Bytes(0);
    found.retain(|block| {
        let fits = room.is_none_or(|room| cost + block.cost <= room);
        match fits {
            true => cost += block.cost,
            false => left(block.kind, block),
        }
        fits
    });
    found
}

pub(super) fn size(page: PageSize) -> usize {
    usize::try_from(page.bytes()).unwrap_or(usize::MAX)
}

/// The pages of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fill {
    /// In memory, huge or not.
    pub(super) present: usize,
    /// In memory, and no other process maps it.
    pub(super) exclusive: usize,
    /// Mapped by PMD.
    pub(super) is_huge: bool,
}

/// Looks through mappings.
pub(super) struct Survey<'a> {
    pub(super) pagemap: &'a Pagemap,
    /// In bytes.
    pub(super) base: usize,
    pub(super) pmd: usize,
    /// The kernel has PAGEMAP_SCAN, as far as is known.
    pub(super) scans: bool,
}

impl Survey<'_> {
    /// Adds a mapping's blocks.
    fn mapping(
        &mut self,
        kind: Kind,
        mapping: &Mapping<'_>,
        part: &mut Part,
        found: &mut Vec<Block>,
    ) -> Result<(), Errno> {
        let pages = mapping.kernel_page_size.map_or(self.base, size);
        part.resident += mapping.rss + mapping.hugetlb();
        part.huge += mapping.pmd_mapped() + mapping.hugetlb();
        let mut rest = Bytes(mapping.rss.0.saturating_sub(mapping.pmd_mapped().0));
        let mut leave = |reason, bytes: Bytes| {
            if bytes > Bytes(0) {
                *part.left.entry(reason).or_default() += bytes;
            }
        };
        let is_file = kind != Kind::Heap && mapping.inode != 0;
        let place = mapping.start.wrapping_sub(mapping.offset);
        let misplaced = !place.is_multiple_of(self.pmd as u64);
        let is_sparse = mapping.rss.0 < mapping.size().0 / FULL_PART;
        let reason = match () {
            () if pages > self.base || rest == Bytes(0) => return Ok(()),
            () if mapping.declined => Some("declined"),
            () if is_file && misplaced => Some("unaligned"),
            () if is_sparse && !self.scans() => Some("hidden"),
            () => None,
        };
        if let Some(reason) = reason {
            leave(reason, rest);
            return Ok(());
        }
        for at in self.blocks(mapping.start..mapping.end)? {
            let fill = self.look(at)?;
            let present = Bytes(fill.present as u64);
            if fill.is_huge {
                continue;
            }
            rest = Bytes(rest.0.saturating_sub(present.0));
            if fill.present < self.pmd / DENSE_PART {
                leave("sparse", present);
                continue;
            }
            found.push(Block {
                address: at as u64,
                kind,
                resident: present,
                cost: self.cost(kind, fill),
            });
        }
        // The pages of the blocks were counted a moment after smaps was read.
        leave("edge", rest);
        Ok(())
    }

    /// The memory that it takes to make a block whole.
    pub(super) fn cost(&self, kind: Kind, fill: Fill) -> Bytes {
        // Pages of a file are those of all its processes.
        let own = match kind {
            Kind::Heap => fill.exclusive,
            _ => fill.present,
        };
        Bytes(self.pmd.saturating_sub(own) as u64)
    }

    /// The addresses of the blocks of a range of which something is in memory on base pages.
    fn blocks(&mut self, range: Range<u64>) -> Result<Vec<usize>, Errno> {
        let word = |address: u64| usize::try_from(address).unwrap_or(usize::MAX);
        let Some(start) = word(range.start).checked_next_multiple_of(self.pmd) else {
            return Ok(Vec::new());
        };
        let end = word(range.end) / self.pmd * self.pmd;
        if start >= end {
            return Ok(Vec::new());
        }
        if !self.scans() {
            return Ok((start..end).step_by(self.pmd).collect());
        }
        let mut blocks = Vec::new();
        self.pagemap.walk(start..end, |run, found| {
            if !found.present || found.huge {
                return;
            }
            let first = run.start / self.pmd * self.pmd;
            for at in (first..run.end).step_by(self.pmd) {
                if blocks.last() != Some(&at) {
                    blocks.push(at);
                }
            }
        })?;
        Ok(blocks)
    }

    /// Finds out whether the kernel has PAGEMAP_SCAN.
    pub(super) fn find_out(&mut self) {
        self.scans();
    }

    /// Whether the kernel has PAGEMAP_SCAN.
    fn scans(&mut self) -> bool {
        self.scans = self.scans && self.pagemap.walk(0..self.base, |_, _| ()).is_ok();
        self.scans
    }

    /// The pages of the block at an address.
    pub(super) fn look(&self, at: usize) -> Result<Fill, Errno> {
        let range = at..at + self.pmd;
        let mut is_huge = false;
        if self.scans {
            self.pagemap
                .walk(range.clone(), |_, found| is_huge |= found.huge)?;
        }
        Ok(Fill {
            present: self.pagemap.present(range.clone(), self.base)?,
            exclusive: self.pagemap.exclusive(range, self.base)?,
            is_huge,
        })
    }

    /// Whether a block is worth it still, at no more than `cost`.
    pub(super) fn is_still(&self, block: &Block) -> Result<bool, Errno> {
        let fill = self.look(usize::try_from(block.address).unwrap_or(usize::MAX))?;
        let is_dense = fill.present >= self.pmd / DENSE_PART;
        Ok(is_dense && !fill.is_huge && self.cost(block.kind, fill) <= block.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_blocks_are_chosen_and_the_bound_holds() {
        let block = |address, kib: u64| Block {
            address,
            kind: Kind::Heap,
            resident: Bytes((2048 - kib) << 10),
            cost: Bytes(kib << 10),
        };
        let found = vec![block(1, 512), block(2, 0), block(3, 900), block(4, 4)];
        let mut left = Vec::new();
        let room = Some(Bytes(516 << 10));
        let chosen = choose(found, room, |_, block| left.push(block.address));
        let chosen: Vec<_> = chosen.iter().map(|block| block.address).collect();
        assert_eq!((chosen, left), (vec![2, 4, 1], vec![3]));
    }

    #[test]
    fn the_bound_is_a_share_and_sixteen_mebibytes_at_least() {
        let percent = |percent, mib: u64| bound(MaxWaste::Percent(percent), Bytes(mib << 20));
        assert_eq!(percent(5, 100), Some(FLOOR));
        assert_eq!(percent(5, 1000).unwrap().0 >> 20, 50);
        assert_eq!(percent(0, 1000), Some(Bytes(0)));
        assert_eq!(bound(MaxWaste::Unbounded, Bytes(1)), None);
    }
}
