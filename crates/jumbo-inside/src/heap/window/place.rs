//! Memory for a block: freed memory, then unmapped addresses, then new ones.
#![expect(unsafe_code, reason = "unmaps a block that it could not make")]

use rustix::io::{Errno, Result};

use super::BlockWindow;
use crate::heap::BASE_PAGE;
use crate::heap::backing::Backing;
use crate::heap::extents::{Alignment, State};

/// Addresses used before reuse may leave gaps; twice the program's peak, if that is more.
const MIN_FRESH_BYTES: usize = 8 << 30;
/// Places tried when a mapping of the program is in the way.
const MAX_DETOURS: u32 = 8;
/// Freed memory that a growing program keeps at least.
const MIN_KEEP_GROWING_BYTES: usize = 8 << 20;

impl BlockWindow {
    /// Allocates pages for a block, and reports whether they are zero.
    pub(super) fn take_pages(&mut self, pages: u32, alignment: Alignment) -> Result<(u32, bool)> {
        let bytes = pages as usize * BASE_PAGE;
        if let Some(page) = self.take_unchanged(State::Dirty, pages, alignment) {
            self.demand.used(self.dirty);
            return Ok((page, false));
        }
        self.missed(bytes);
        self.purge_for_growth(bytes);
        Ok((self.take_zeroes(pages, alignment)?, true))
    }

    /// Allocates zero pages, mapped already or now.
    fn take_zeroes(&mut self, pages: u32, alignment: Alignment) -> Result<u32> {
        if let Some(page) = self.take_unchanged(State::Clean, pages, alignment) {
            return Ok(page);
        }
        // One huge page of surplus is always allowed: the next block uses it up.
        let max_surplus = match self.is_exact {
            true => 0,
            false => self.allowed(pages as usize * BASE_PAGE).max(self.pmd),
        };
        // New addresses leave no gaps, but their records stay, so they are bounded.
        let used = self.extents.end() as usize * BASE_PAGE;
        let leaves_gap =
            self.is_exact || used > MIN_FRESH_BYTES.max(self.peak_live.saturating_mul(2));
        let reused = self.take_unmapped(pages, alignment, max_surplus, leaves_gap);
        if reused.is_ok() {
            return reused;
        }
        match self.take_fresh(pages, alignment) {
            // All addresses were used once.
            Err(Errno::RANGE) => self.take_unmapped(pages, alignment, max_surplus, true),
            fresh => fresh,
        }
    }

    /// Frees unused memory before `bytes` more become resident beyond the program's peak. A growing
    /// table does not keep its former copies resident.
    fn purge_for_growth(&mut self, bytes: usize) {
        let is_ours = self.site.backing == Backing::Advised && self.keep.is_none();
        let before = self.peak_live.saturating_sub(self.live + bytes);
        // Within the allowed waste nothing is freed, which bounds the work under the heap's lock.
        let keep = before.max(MIN_KEEP_GROWING_BYTES).max(self.allowed(bytes));
        let keep = keep.min(self.keep_with(bytes));
        if is_ours && self.dirty > keep {
            // At once: deferred frees would come after the new memory is resident.
            self.purge(keep, None);
        }
    }

    /// Allocates whole chunks of the unmapped extents, and frees the unused rest.
    ///
    /// A clean extent in front (an earlier surplus) is used up first, so that blocks are as
    /// contiguous as at the frontier. Mapped surplus beyond `max_surplus` stays unmapped with
    /// `leaves_gap`; else it is `ERANGE`.
    fn take_unmapped(
        &mut self,
        pages: u32,
        alignment: Alignment,
        max_surplus: usize,
        leaves_gap: bool,
    ) -> Result<u32> {
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
        if is_excess && leaves_gap {
            needed = exact;
        }
        if needed < count {
            let rest = self.extents.split(page, count, needed);
            self.extents.release(rest, count - needed, State::Unmapped);
        }
        let mapped = match is_excess && !leaves_gap {
            true => Err(Errno::RANGE),
            false => self.map_again(page, needed),
        };
        if let Err(errno) = mapped {
            // A mapping of the program is there: the addresses are lost for good.
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

    fn take_fresh(&mut self, pages: u32, alignment: Alignment) -> Result<u32> {
        for _ in 0..MAX_DETOURS {
            match self.take_at_frontier(pages, alignment) {
                Err(Errno::EXIST) => self.detour()?,
                other => return other,
            }
        }
        Err(Errno::EXIST)
    }

    fn take_at_frontier(&mut self, pages: u32, alignment: Alignment) -> Result<u32> {
        let end = self.extents.end();
        let at = alignment.first_from(end).filter(|at| *at < 1 << 31);
        let at = at.ok_or(Errno::NOMEM)?;
        // Skipped pages are mapped only if mapped already, or less than a chunk before the block.
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

    /// Grows the window by `pages`, which become a live extent, and calls `and` with it.
    pub(super) fn append(
        &mut self,
        pages: u32,
        and: impl FnOnce(&mut Self, u32, u32),
    ) -> Result<u32> {
        let end = self.extents.end().checked_add(pages);
        let end = end.filter(|end| *end < 1 << 31).ok_or(Errno::NOMEM)?;
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

    /// Passes a mapping of the program. The addresses in between are lost for good.
    fn detour(&mut self) -> Result<()> {
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

    fn reach(&mut self, end: u32) -> Result<()> {
        self.extents.table_mut().reach(end)
    }

    pub(super) fn map_again(&self, page: u32, pages: u32) -> Result<()> {
        let range = self.range(page, pages);
        self.site.backing.map(range.start, range.len())
    }
}
