//! Where a block comes from: what was freed and is resident or mapped, then addresses that were unmapped, then new ones.
#![expect(unsafe_code, reason = "unmaps a block that it could not make")]

use rustix::io::Errno;

use super::BlockWindow;
use crate::heap::BASE_PAGE;
use crate::heap::backing::Backing;
use crate::heap::extents::{Alignment, State};

/// So many addresses are used before any is used again that leaves something over; or twice what the program had at once.
const MIN_FRESH_BYTES: usize = 8 << 30;
/// How often another place is tried when a mapping of the program's is in the way.
const MAX_DETOURS: u32 = 8;
/// What is kept in any case of a program that grows.
const MIN_KEEP_GROWING_BYTES: usize = 8 << 20;

/// What becomes of memory that is left over of a chunk excess what may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Excess {
    /// There is none: the chunk is not taken.
    Refuse,
    /// It is not mapped: a gap.
    Gap,
}

impl BlockWindow {
    /// Pages for a block, and whether they are zero.
    pub(super) fn take_pages(
        &mut self,
        pages: u32,
        alignment: Alignment,
    ) -> Result<(u32, bool), Errno> {
        let bytes = pages as usize * BASE_PAGE;
        if let Some(page) = self.extents.take(State::Dirty, pages, alignment) {
            self.dirty -= bytes;
            self.demand.used(self.dirty);
            return Ok((page, false));
        }
        self.missed(bytes);
        self.purge_for_growth(bytes);
        self.take_zeroes(pages, alignment)
    }

    /// Pages that are mapped, or become so, and are zero.
    fn take_zeroes(&mut self, pages: u32, alignment: Alignment) -> Result<(u32, bool), Errno> {
        if let Some(page) = self.extents.take(State::Clean, pages, alignment) {
            self.clean -= pages as usize * BASE_PAGE;
            return Ok((page, true));
        }
        // One huge page may always be left over: it is used up by what comes next.
        let max_surplus = match self.is_exact {
            true => 0,
            false => self.allowed(pages as usize * BASE_PAGE).max(self.pmd),
        };
        // Fresh addresses are the max_surplus seamless, but their records stay: so there is an end to them.
        let used = self.extents.end() as usize * BASE_PAGE;
        let excess =
            match self.is_exact || used > MIN_FRESH_BYTES.max(self.peak_live.saturating_mul(2)) {
                true => Excess::Gap,
                false => Excess::Refuse,
            };
        if let Ok(page) = self.take_unmapped(pages, alignment, max_surplus, excess) {
            return Ok((page, true));
        }
        let fresh = self.take_fresh(pages, alignment);
        if fresh == Err(Errno::RANGE) {
            // All addresses have been used once.
            return self
                .take_unmapped(pages, alignment, max_surplus, Excess::Gap)
                .map(|page| (page, true));
        }
        fresh
    }

    /// So many bytes more are about to become resident: what is kept beside them goes where the program never had as much at once.
    /// A table that grows does not leave its smaller selves beside it.
    fn purge_for_growth(&mut self, bytes: usize) {
        let is_ours = self.site.backing == Backing::Advised && self.keep.is_none();
        let before = self.peak_live.saturating_sub(self.live + bytes);
        // The allowed waste may be there: so little goes under the heap's lock, however large the program is.
        let keep = before.max(MIN_KEEP_GROWING_BYTES).max(self.allowed(bytes));
        if is_ours && self.dirty > keep {
            // At once: what comes is resident before another thread would be through.
            self.purge(keep, None);
        }
    }

    /// Takes whole chunks out of the unmapped extents, and frees again what is not needed of them.
    ///
    /// A clean extent in front (what was left over the last time) is used up first, so that blocks
    /// follow each other as seamlessly as at the frontier. `max_surplus` bounds what may be left over; where it would be more, `excess`
    /// says what becomes of it.
    fn take_unmapped(
        &mut self,
        pages: u32,
        alignment: Alignment,
        max_surplus: usize,
        excess: Excess,
    ) -> Result<u32, Errno> {
        let chunk = self.chunk_pages();
        let lead = alignment.remainder % chunk;
        let whole = |pages: u32| pages.checked_next_multiple_of(chunk).ok_or(Errno::NOMEM);
        // The block begins `lead` pages into the first chunk.
        let from = Alignment {
            modulus: alignment.modulus.max(chunk),
            remainder: alignment.remainder - lead,
        };
        let count = whole(pages.checked_add(lead).ok_or(Errno::NOMEM)?)?;
        let page = self
            .extents
            .take(State::Unmapped, count, from)
            .ok_or(Errno::NOMEM)?;
        let front = match self.extents.claim_before(page, State::Clean) {
            Some((start, length)) if alignment.modulus > 1 || length >= pages => {
                self.extents.release(start, length, State::Clean);
                0
            }
            front => front.map_or(0, |(_, length)| length),
        };
        let exact = pages + lead - front;
        let mut needed = whole(exact)?;
        let surplus = (needed - exact) as usize * BASE_PAGE;
        let is_excess = surplus + self.clean - front as usize * BASE_PAGE > max_surplus;
        if is_excess && excess == Excess::Gap {
            needed = exact;
        }
        if needed < count {
            let rest = self.extents.split(page, count, needed);
            self.extents.release(rest, count - needed, State::Unmapped);
        }
        let mapped = match is_excess && excess == Excess::Refuse {
            true => Err(Errno::RANGE),
            false => self.map_again(page, needed),
        };
        if let Err(errno) = mapped {
            // Where a mapping of the program's is there, those addresses are lost to us, for good.
            if errno != Errno::EXIST {
                self.extents.release(page, needed, State::Unmapped);
            }
            if front > 0 {
                self.extents.release(page - front, front, State::Clean);
            }
            return Err(errno);
        }
        self.clean -= front as usize * BASE_PAGE;
        self.extents.join(page - front, front, needed);
        let mut block = (page - front, front + needed);
        if lead > 0 {
            let start = self.extents.split(block.0, block.1, lead);
            self.add_clean(block.0, lead);
            block = (start, block.1 - lead);
        }
        if block.1 > pages {
            let rest = self.extents.split(block.0, block.1, pages);
            self.add_clean(rest, block.1 - pages);
        }
        Ok(block.0)
    }

    fn take_fresh(&mut self, pages: u32, alignment: Alignment) -> Result<(u32, bool), Errno> {
        for _ in 0..MAX_DETOURS {
            match self.take_at_frontier(pages, alignment) {
                Err(Errno::EXIST) => self.detour()?,
                other => return other.map(|page| (page, true)),
            }
        }
        Err(Errno::EXIST)
    }

    fn take_at_frontier(&mut self, pages: u32, alignment: Alignment) -> Result<u32, Errno> {
        let end = self.extents.end();
        let at = alignment.first_from(end).filter(|at| *at < 1 << 31);
        let at = at.ok_or(Errno::NOMEM)?;
        // What is left out is mapped only where it is already, or less than a chunk in front of the block.
        let chunk = at - at % self.chunk_pages();
        let from = match self.frontier.is_at_edge() {
            true => end,
            false => end.next_multiple_of(self.chunk_pages()),
        };
        if chunk > from {
            if from > end {
                self.append(from - end, Self::add_clean)?;
            }
            self.reach(chunk)?;
            self.frontier.jump(self.address(chunk));
            let gap = self.extents.append(chunk - from, State::Live);
            self.extents.release(gap, chunk - from, State::Unmapped);
        }
        let lead = at - self.extents.end();
        if lead > 0 {
            self.append(lead, Self::add_clean)?;
        }
        self.append(pages, |_, _, _| ())
    }

    /// Lets the window grow by `pages`, which become a live extent for `and` to do with as it likes.
    pub(super) fn append(
        &mut self,
        pages: u32,
        and: impl FnOnce(&mut Self, u32, u32),
    ) -> Result<u32, Errno> {
        let end = self
            .extents
            .end()
            .checked_add(pages)
            .filter(|end| *end < 1 << 31);
        let end = end.ok_or(Errno::NOMEM)?;
        let size = pages as usize * BASE_PAGE;
        let growth = self.frontier.take(size, self.is_exact)?;
        if let Err(errno) = self.reach(end) {
            // SAFETY: no part of it has become an extent.
            unsafe { self.frontier.undo(growth) };
            return Err(errno);
        }
        debug_assert_eq!(growth.start, self.address(self.extents.end()));
        let page = self.extents.append(pages, State::Live);
        and(self, page, pages);
        Ok(page)
    }

    /// Goes round a mapping of the program's. The addresses in between stay taken for good.
    fn detour(&mut self) -> Result<(), Errno> {
        let beyond = (self.frontier.beyond() - self.start) / BASE_PAGE;
        let beyond = u32::try_from(beyond)
            .ok()
            .filter(|page| *page < 1 << 31)
            .ok_or(Errno::RANGE)?;
        self.reach(beyond)?;
        let (left, right) = self.frontier.skip();
        if right > left {
            let pages = self.page(right) - self.page(left);
            let page = self.extents.append(pages, State::Live);
            self.add_clean(page, pages);
        }
        let lost = beyond - self.extents.end();
        if lost > 0 {
            self.extents.append(lost, State::Live);
        }
        Ok(())
    }

    fn reach(&mut self, end: u32) -> Result<(), Errno> {
        self.extents.table_mut().reach(end)
    }

    pub(super) fn map_again(&self, page: u32, pages: u32) -> Result<(), Errno> {
        let range = self.range(page, pages);
        self.site.backing.map(range.start, range.len())
    }
}
