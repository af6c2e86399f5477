//! The blocks to collapse: [`PromotePlan`].
//!
//! smaps has the mappings and the obstacles. PAGEMAP_SCAN (6.7) finds the present and the huge
//! ranges, and pagemap counts the present pages of a block. Before 6.7 blocks that are huge already
//! are collapsed again, without effect.
//!
//! The cost of a block is the memory that a collapse allocates beyond the pages that it frees: its
//! pages that are absent, in swap, or also mapped by another process (after a fork).

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use jumbo_inside::orders::MaxWaste;
use serde::Serialize;

use super::{Outcome, Refusal, Target};
use crate::kernel::aside::{self, BlockState, MapCalls};
use crate::kernel::cgroup;
use crate::kernel::smaps::Mapping;
use crate::status::{Kind, process::Observer};
use crate::units::{Bytes, PageSize};

/// Divisor of a block: with less than this part present, it is sparse.
const DENSE_DIVISOR: usize = 2;
/// Minimum bound on the memory that fills up blocks.
const MIN_BOUND: Bytes = Bytes(16 << 20);
/// Divisor of a mapping: before 6.7, with less than this part present, a scan would take too long.
const SCAN_DIVISOR: u64 = 64;

/// Kinds of memory to promote, and the bound on the cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Private anonymous memory: heap, bss, thread stacks.
    pub heap: bool,
    /// Text of files.
    pub text: bool,
    /// Other files that it maps.
    pub files: bool,
    /// Shared memory.
    pub shm: bool,
    /// Maximum memory that fills up blocks.
    pub max_waste: MaxWaste,
}

impl Selection {
    /// The heap alone.
    pub fn of_heap(max_waste: MaxWaste) -> Self {
        Self {
            heap: true,
            text: false,
            files: false,
            shm: false,
            max_waste,
        }
    }

    /// Reports whether a mapping is selected.
    pub(super) fn takes(&self, kind: Kind, mapping: &Mapping<'_>) -> bool {
        match kind {
            Kind::Heap => self.heap,
            // Only bss: written pages of a private file mapping cannot be collapsed.
            Kind::Data => self.heap && mapping.inode == 0,
            Kind::Text => self.text,
            Kind::Shared => self.shm,
            Kind::File => self.files && mapping.inode != 0,
            Kind::Stack => false,
        }
    }
}

/// Plan for the memory of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Resident memory.
    pub resident: Bytes,
    /// Resident memory that is mapped by PMD, or on hugetlb pages.
    pub huge: Bytes,
    /// Memory to collapse.
    pub gain: Bytes,
    /// Memory that fills up its blocks.
    pub cost: Bytes,
    /// Resident memory that stays on base pages, by reason.
    pub left: BTreeMap<&'static str, Bytes>,
}

/// Plan for one process.
#[derive(Clone, Debug, Serialize)]
pub struct PromotePlan {
    /// Resident memory of all kinds.
    pub resident: Bytes,
    /// Size of a huge page.
    pub huge_page: PageSize,
    /// Plans for the selected kinds.
    pub kinds: BTreeMap<Kind, Part>,
    /// Maximum memory that fills up blocks; `None`: unbounded.
    pub bound: Option<Bytes>,
    /// Memory to collapse.
    pub gain: Bytes,
    /// Memory that fills up its blocks.
    pub cost: Bytes,
    /// Blocks to collapse, the fullest first.
    #[serde(skip)]
    pub(super) blocks: Vec<Block>,
}

/// A block that can be collapsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) kind: Kind,
    pub(super) resident: Bytes,
    pub(super) cost: Bytes,
}

/// Describes a reason in [`Part::left`].
pub fn left_out(reason: &str) -> &str {
    match reason {
        "sparse" => "in blocks that are less than half full",
        "bound" => "in blocks that would take more than --max-waste allows",
        "group" => "in blocks that would take more than its control group can spare",
        "edge" => "outside of whole aligned blocks",
        "declined" => "under MADV_NOHUGEPAGE",
        "unaligned" => "mapped at addresses that do not fit the file's huge pages",
        "hidden" => "in a mapping that is too sparse to scan on this kernel",
        other => other,
    }
}

impl PromotePlan {
    /// Plans for a process. `spent` is the cost of earlier plans of the same command.
    ///
    /// # Errors
    /// [`Refusal`] where the process cannot be read.
    pub fn new(target: &Target, selection: &Selection, spent: Bytes) -> Result<Self, Refusal> {
        let observer = Observer::new(&target.root)?.reading(aside::smaps, aside::entries);
        let (base, pmd) = (crate::kernel::base_page(&target.root), observer.pmd_size());
        let survey = Survey::new(target.pagemap()?, base, pmd);
        let (mut kinds, mut found): (BTreeMap<Kind, Part>, Vec<Block>) = Default::default();
        let (mut resident, mut failed) = (Bytes(0), None);
        let each = observer.each(target.pid(), |kind, mapping| {
            resident += mapping.rss;
            if failed.is_none() && selection.takes(kind, mapping) {
                let kind = if kind == Kind::Data { Kind::Heap } else { kind };
                let part = kinds.entry(kind).or_default();
                if let Err(error) = survey.mapping(kind, mapping, part, &mut found) {
                    failed = Some(error);
                }
            }
        });
        each.map_err(|error| target.unreadable(error))?;
        if let Some(error) = failed {
            return Err(target.unreadable(target.unread("read", error)));
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

    /// Returns the rest of the plan, after an interrupted outcome.
    #[must_use]
    pub fn after(mut self, outcome: &Outcome) -> Self {
        let refused: Bytes = outcome.failures.iter().map(|failure| failure.bytes).sum();
        let done = outcome.obtained + outcome.changed + refused;
        let done = usize::try_from(done.0 / self.huge_page.bytes()).unwrap_or(usize::MAX);
        self.blocks.drain(..done.min(self.blocks.len()));
        self.gain = Bytes(self.huge_page.bytes() * self.blocks.len() as u64);
        self
    }

    /// Reports whether there is nothing to collapse.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// Returns the bound on filled up memory, as in `jumbo run`.
fn bound(max_waste: MaxWaste, resident: Bytes) -> Option<Bytes> {
    match max_waste {
        MaxWaste::Unbounded => None,
        MaxWaste::Percent(0) => Some(Bytes(0)),
        MaxWaste::Percent(percent) => {
            let share = Bytes(resident.0 / 100 * u64::from(percent));
            Some(share.max(MIN_BOUND))
        }
    }
}

/// Chooses the cheapest blocks whose cost fits into `room`; calls `left` for the others.
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

/// Scanner of mappings.
pub(super) struct Survey<'a> {
    calls: &'a MapCalls,
    /// Bytes of a base page.
    base: usize,
    /// Bytes of a huge page.
    pmd: usize,
}

impl<'a> Survey<'a> {
    pub(super) fn new(calls: &'a MapCalls, base: PageSize, pmd: PageSize) -> Self {
        let (base, pmd) = (size(base), size(pmd));
        Self { calls, base, pmd }
    }

    /// Adds the blocks of a mapping to `found`, and the others to `part`.
    fn mapping(
        &self,
        kind: Kind,
        mapping: &Mapping<'_>,
        part: &mut Part,
        found: &mut Vec<Block>,
    ) -> io::Result<()> {
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
        let is_sparse = mapping.rss.0 < mapping.size().0 / SCAN_DIVISOR;
        let reason = match () {
            () if pages > self.base || rest == Bytes(0) => return Ok(()),
            () if mapping.declined => Some("declined"),
            () if is_file && misplaced => Some("unaligned"),
            () if is_sparse && !self.calls.scans() => Some("hidden"),
            () => None,
        };
        if let Some(reason) = reason {
            leave(reason, rest);
            return Ok(());
        }
        self.calls.survey(self.whole(mapping), self.pmd, |block| {
            let present = Bytes(block.present as u64);
            if block.is_huge {
                return;
            }
            rest = Bytes(rest.0.saturating_sub(present.0));
            if block.present < self.pmd / DENSE_DIVISOR {
                return leave("sparse", present);
            }
            found.push(Block {
                address: block.address as u64,
                kind,
                resident: present,
                cost: self.cost(kind, block),
            });
        })?;
        // Approximate: the pages of the blocks were counted after smaps was read.
        leave("edge", rest);
        Ok(())
    }

    /// Returns the memory that fills up a block.
    fn cost(&self, kind: Kind, block: BlockState) -> Bytes {
        // A collapse of file pages frees them for all processes.
        let own = match kind {
            Kind::Heap => block.exclusive,
            _ => block.present,
        };
        Bytes(self.pmd.saturating_sub(own) as u64)
    }

    /// Returns the whole blocks of a mapping.
    pub(super) fn whole(&self, mapping: &Mapping<'_>) -> Range<usize> {
        let word = |address: u64| usize::try_from(address).unwrap_or(usize::MAX);
        let end = word(mapping.end) / self.pmd * self.pmd;
        let start = word(mapping.start).checked_next_multiple_of(self.pmd);
        start.unwrap_or(end).min(end)..end
    }

    /// Reports whether a block is still dense, on base pages, and no costlier than planned.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`]: the process holds the state of its memory back. The errno of
    /// pread(2): it has ended.
    pub(super) fn is_worthwhile(&self, block: &Block) -> io::Result<bool> {
        let start = usize::try_from(block.address).unwrap_or(usize::MAX);
        let mut state = BlockState::default();
        let range = start..start.saturating_add(self.pmd);
        self.calls.survey(range, self.pmd, |found| state = found)?;
        let is_dense = state.present >= self.pmd / DENSE_DIVISOR;
        Ok(is_dense && !state.is_huge && self.cost(block.kind, state) <= block.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fullest_blocks_are_chosen_within_the_bound() {
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
    fn bound_is_a_share_with_a_minimum() {
        let percent = |percent, mib: u64| bound(MaxWaste::Percent(percent), Bytes(mib << 20));
        assert_eq!(percent(5, 100), Some(MIN_BOUND));
        assert_eq!(percent(5, 1000).unwrap().0 >> 20, 50);
        assert_eq!(percent(0, 1000), Some(Bytes(0)));
        assert_eq!(bound(MaxWaste::Unbounded, Bytes(1)), None);
    }
}
