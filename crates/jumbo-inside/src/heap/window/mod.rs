//! Large allocations: [`BlockWindow`], the extents and the frontier behind one lock.
//!
//! `place` finds memory for a block, `freed` handles freed blocks.
//!
//! All functions need the heap's lock, except [`peek`]. Freed blocks stay mapped for a while
//! (`Dirty`), because the next allocation of the same size would fault them in again. Beyond
//! [`BlockWindow::keep`] they return to the kernel. Whole huge pages are unmapped, so that a late
//! access faults. Smaller parts stay mapped and are discarded by MADV_DONTNEED: unmapping them
//! would leave mappings that can never be huge again.
//!
//! Invariants: the frontier's next address is the end of the extents. An `Unmapped` extent ends at
//! a huge page; it begins at one, or behind a block with huge page alignment (a *gap*). No code
//! uses pages outside `Live` extents, nor a `Live` extent while a function here holds it.
#![expect(unsafe_code, reason = "frees and moves memory")]

mod changed;
mod demand;
mod freed;
mod place;

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

pub(super) use changed::Change;
use changed::{Changes, Tails};
use demand::Demand;

use super::backing::Backing;
use super::extents::{Alignment, Extents, PageRecord, State};
use super::frontier::Frontier;
use super::memory::{self, RecordTable};
use super::{BASE_PAGE, Resize};
use crate::density;
use crate::gather::{self, PendingFree};
use crate::keep::Keep;
use crate::ledger::stats;
use jumbo_sys as sys;

/// Larger alignments are left to the program's allocator, which trims the excess.
const MAX_ALIGN_BYTES: usize = 1 << 30;
/// Freed extents that wait to be unmapped where no call may do that. More are lost.
const MAX_WAITING: usize = 64;
/// Largest freed block that glibc would keep: its maximum M_MMAP_THRESHOLD.
const MAX_KEPT_BYTES: usize = 32 << 20;

/// Address range of a window, and the source of its memory.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) backing: Backing,
    /// Address range of the blocks.
    pub(super) base: usize,
    pub(super) end: usize,
    /// Address range of the page records.
    pub(super) tables: Range<usize>,
    /// Address of the page records. Written once.
    pub(super) table: AtomicUsize,
    /// Address of the first page, for [`peek`]. Written once.
    pub(super) start: AtomicUsize,
}

/// State behind the heap's lock.
#[derive(Debug)]
pub(super) struct BlockWindow {
    site: &'static Site,
    extents: Extents<RecordTable>,
    frontier: Frontier,
    start: usize,
    pmd: usize,
    max_waste: usize,
    /// Bound on retained memory, if the user set one.
    keep: Option<Keep>,
    /// The caller requested alignment to a huge page, so the program manages huge pages itself:
    /// memory beyond the end of the block is not mapped.
    is_exact: bool,
    /// Unmaps nothing ([`BlockWindow::confine`]).
    is_confined: bool,
    /// Allocated bytes, now and at their peak.
    live: usize,
    peak_live: usize,
    /// Largest freed block that glibc would keep at the end of its heap, in bytes.
    largest_freed: usize,
    /// Bytes in `Dirty` and in `Clean` extents.
    dirty: usize,
    clean: usize,
    /// Memory retained by demand, beside [`BlockWindow::base_keep`].
    demand: Demand,
    /// Pages that the program has changed.
    changes: Changes,
    /// Pages that were resident when a block grew by them.
    tails: Tails,
    /// Extents with changed pages that wait to be unmapped: first page and number; 0: none.
    waiting: [(u32, u32); MAX_WAITING],
    /// Bytes freed since the last check of their density, and from which on the next one is due.
    unchecked: usize,
    check_after: usize,
    /// Number of these checks.
    checks: usize,
}

/// Returns the usable bytes of a block without the lock, for a handler that interrupted a holder.
///
/// # Safety
/// A block of the caller begins at `address`: no other thread changes its record.
pub(super) unsafe fn peek(site: &Site, address: usize) -> Option<usize> {
    let page = address.checked_sub(site.start.load(Ordering::Acquire))? / BASE_PAGE;
    // SAFETY: the caller's promise.
    unsafe { memory::peek(site.table.load(Ordering::Relaxed), page) }
        .live_pages()
        .map(|pages| pages as usize * BASE_PAGE)
}

impl BlockWindow {
    pub(super) const fn new(site: &'static Site) -> Self {
        Self {
            site,
            extents: Extents::new(RecordTable::new()),
            frontier: Frontier::new(site.backing),
            start: 0,
            pmd: 0,
            max_waste: 0,
            keep: None,
            is_exact: false,
            is_confined: false,
            live: 0,
            peak_live: 0,
            largest_freed: 0,
            dirty: 0,
            clean: 0,
            demand: Demand::new(),
            changes: Changes::new(),
            tails: Tails::new(),
            waiting: [(0, 0); MAX_WAITING],
            unchecked: 0,
            check_after: 0,
            checks: 0,
        }
    }

    /// Sets the start of the window from `random`, in chunks of `pmd` bytes, and the address of its
    /// records from `random_table`. Called once. `max_waste` is in percent of the allocated bytes.
    pub(super) fn place(
        &mut self,
        pmd: usize,
        max_waste: usize,
        keep: Option<Keep>,
        random: usize,
        random_table: usize,
    ) {
        let chunks = (self.site.end - self.site.base) / 2 / pmd;
        self.start = self.site.base + random % chunks * pmd;
        self.pmd = pmd;
        self.max_waste = max_waste;
        self.keep = keep;
        self.frontier.place(self.start, self.site.end, pmd);
        // The range has room for the records of all pages, and an unmapped page before them.
        let records = (self.site.end - self.site.base) / BASE_PAGE * size_of::<PageRecord>();
        let places = (self.site.tables.len() - records) / BASE_PAGE - 1;
        let table = self.site.tables.start + (1 + random_table % places) * BASE_PAGE;
        self.extents.table_mut().place(table);
        self.site.table.store(table, Ordering::Relaxed);
        self.site.start.store(self.start, Ordering::Release);
    }

    /// Unmaps and discards nothing from now on, or does so again: memory stays free and resident.
    pub(super) const fn confine(&mut self, now: bool) {
        self.is_confined = now;
    }

    /// Allocates like [`BlockWindow::take`], with a larger alignment if that makes the block
    /// cheaper to free.
    pub(super) fn take_aligned(&mut self, size: usize, align: usize) -> Result<(usize, bool)> {
        self.is_exact = align >= self.pmd;
        let better = gather::alignment(size).max(align);
        let taken = match self.take(size, better) {
            Err(_) if better > align => self.take(size, align),
            taken => taken,
        };
        self.is_exact = false;
        taken
    }

    /// Allocates `size` bytes at a multiple of `align`, and reports whether they are zero.
    pub(super) fn take(&mut self, size: usize, align: usize) -> Result<(usize, bool)> {
        let pages = page_count(size).ok_or(Errno::NOMEM)?;
        if align > MAX_ALIGN_BYTES {
            return Err(Errno::RANGE);
        }
        let alignment = self.alignment(align, 0);
        let mut taken = self.take_pages(pages, alignment);
        if taken == Err(Errno::NOMEM) && self.dirty > self.kept_on_retry(pages) {
            // Freed at once, because deferred frees would not help.
            self.purge(self.kept_on_retry(pages), None);
            taken = self.take_pages(pages, alignment);
        }
        let (page, zero) = taken?;
        self.count(0, pages);
        Ok((self.address(page), zero))
    }

    /// Frees the block at `address`, or keeps it for the next one; false if no block begins there.
    ///
    /// # Safety
    /// Nothing uses a block that begins there from now on.
    pub(super) unsafe fn release(&mut self, address: usize, leaving: &mut PendingFree) -> bool {
        let Some((page, pages)) = self.block(address) else {
            return false;
        };
        let range = self.range(page, pages);
        self.tails.forget(&range);
        self.count(pages, 0);
        if self.site.backing == Backing::Advised && range.len() <= MAX_KEPT_BYTES {
            self.largest_freed = self.largest_freed.max(range.len());
        }
        match self.changes.touch(page..page + pages) {
            true => self.give_up(page, pages),
            false => self.release_pages(page, pages, leaving),
        }
        self.give_up_waiting();
        true
    }

    /// Unmaps a live extent with changed pages, which has no user. Where that is refused (mseal(2)), and in
    /// the pool, whose pages are unmapped whole, nobody uses its addresses again.
    fn give_up(&mut self, page: u32, pages: u32) {
        let range = self.range(page, pages);
        if self.is_confined {
            if let Some(free) = self.waiting.iter_mut().find(|extent| extent.1 == 0) {
                *free = (page, pages);
            }
            return self.extents.lose(page, pages);
        }
        self.changes.forget(page..page + pages);
        // SAFETY: the extent has no user.
        let unmap = || unsafe { self.site.backing.unmap(range.start, range.len(), None) };
        match self.site.backing == Backing::Advised && unmap().is_ok() {
            true => {
                self.extents.recover(page, pages);
                self.unmapped(page, pages);
            }
            false => self.extents.lose(page, pages),
        }
    }

    /// Unmaps the extents that wait for it.
    fn give_up_waiting(&mut self) {
        if !self.is_confined && self.waiting.iter().any(|extent| extent.1 != 0) {
            for (page, pages) in core::mem::replace(&mut self.waiting, [(0, 0); MAX_WAITING]) {
                if pages != 0 {
                    self.give_up(page, pages);
                }
            }
        }
    }

    /// Takes free pages in `state`. Pages that the program has changed are given up.
    pub(super) fn take_unchanged(
        &mut self,
        state: State,
        pages: u32,
        alignment: Alignment,
    ) -> Option<u32> {
        while let Some(page) = self.extents.take(state, pages, alignment) {
            let bytes = pages as usize * BASE_PAGE;
            match state {
                State::Dirty => self.dirty -= bytes,
                _ => self.clean -= bytes,
            }
            if !self.changes.touch(page..page + pages) {
                return Some(page);
            }
            self.give_up(page, pages);
        }
        None
    }

    /// Records that the program has changed the pages of a range; reports whether they are in blocks.
    pub(super) fn change(&mut self, range: &Range<usize>, change: Change) -> bool {
        let is_in_blocks = range.start < self.address(self.extents.end()) && self.start < range.end;
        if is_in_blocks && (self.site.backing == Backing::Advised || change == Change::Mapping) {
            let first = range.start.saturating_sub(self.start) / BASE_PAGE;
            let end = range.end.saturating_sub(self.start).div_ceil(BASE_PAGE);
            let [first, end] = [first, end].map(|page| u32::try_from(page).unwrap_or(u32::MAX));
            self.changes.add(first..end.min(self.extents.end()));
        }
        is_in_blocks
    }

    /// Handles resident pages by which a block has grown, as mremap(2) gives none: within a part of the
    /// allowed waste they stay until the block is resized or freed. The part is larger for the one block of
    /// a program that fills it as it grows.
    pub(super) fn leave_tail(&mut self, tail: Range<usize>) {
        /// Smallest tail: a system call costs as much as the faults of a few pages.
        const MIN_BYTES: usize = 64 << 10;
        let is_ours = self.site.backing == Backing::Advised && !self.is_confined;
        if tail.len() < MIN_BYTES || !is_ours {
            return;
        }
        let parts = if self.tails.is_empty() { 4 } else { 16 };
        let sum = self.tails.bytes() + tail.len();
        let stays = sum <= density::allowance() / parts && self.tails.add(&tail);
        if !stays {
            // SAFETY: the program has not written to these pages of its block yet.
            let _ = unsafe { (self.site.backing).discard(tail.start, tail.len(), self.pmd) };
        }
    }

    /// Returns the usable bytes of the block at `address`.
    pub(super) fn room(&self, address: usize) -> Option<usize> {
        self.block(address)
            .map(|(_, pages)| pages as usize * BASE_PAGE)
    }

    /// Resizes a block without copying, if possible.
    ///
    /// # Safety
    /// Nothing uses the block beyond `size` bytes, nor its old place if it moves.
    pub(super) unsafe fn resize(
        &mut self,
        address: usize,
        size: usize,
        leaving: &mut PendingFree,
    ) -> Resize {
        let Some((page, old)) = self.block(address) else {
            return Resize::Unknown;
        };
        let room = old as usize * BASE_PAGE;
        self.tails.forget(&self.range(page, old));
        let Some(new) = page_count(size) else {
            return Resize::Copy(room);
        };
        if new <= old {
            if new < old && !self.changes.touch(page + new..page + old) {
                let tail = self.extents.split(page, old, new);
                self.count(old, new);
                self.release_pages(tail, old - new, leaving);
            }
            return Resize::Done(address);
        }
        if self.grow(page, old, new - old) {
            self.count(old, new);
            return Resize::Done(address);
        }
        self.relocate(page, old, new)
            .map_or(Resize::Copy(room), Resize::Done)
    }

    /// Frees memory beyond [`BlockWindow::keep`]; reports whether there was any.
    pub(super) fn trim(&mut self, leaving: &mut PendingFree) -> bool {
        self.purge(self.keep(), Some(leaving))
    }

    /// Frees all unused memory; reports whether there was any.
    pub(super) fn purge_all(&mut self, leaving: &mut PendingFree) -> bool {
        self.purge(0, Some(leaving))
    }

    fn grow(&mut self, page: u32, pages: u32, extra: u32) -> bool {
        let end = page + pages;
        if end == self.extents.end() {
            let merge = |window: &mut Self, _, _| window.extents.join(page, pages, extra);
            return self.append(extra, merge).is_ok();
        }
        if self.changes.touch(end..end.saturating_add(extra)) {
            return false;
        }
        let bytes = extra as usize * BASE_PAGE;
        if self.extents.grow(page, extra, State::Dirty) {
            self.dirty -= bytes;
            self.demand.used(self.dirty);
            self.leave_tail(self.range(page + pages, extra));
            return true;
        }
        if self.extents.grow(page, extra, State::Clean) {
            self.clean -= bytes;
            return true;
        }
        false
    }

    /// Moves a block by its page tables, to the same offset within a huge page.
    fn relocate(&mut self, page: u32, old: u32, new: u32) -> Option<usize> {
        let length = old as usize * BASE_PAGE;
        // The pool counts its pages by address.
        if length < self.pmd || self.site.backing == Backing::Pool {
            return None;
        }
        let from = self.address(page);
        let alignment = self.alignment(self.pmd, from % self.pmd);
        let (target, is_zero) = self.take_pages(new, alignment).ok()?;
        let to = self.address(target);
        density::moving(&(from..from + length));
        // SAFETY: the block's user requested the move, and the target was allocated for it. A
        // refusal may leave the target unmapped (mremap(2)), so it stays allocated.
        unsafe { sys::move_units(from, to, length, self.pmd, false) }.ok()?;
        density::moved(from, to, length);
        if !is_zero {
            self.leave_tail(self.range(target + old, new - old));
        }
        self.changes.moved(page..page + old, self.page(to));
        self.count(old, new);
        self.unmapped(page, old);
        Some(to)
    }

    /// Returns the bytes of live blocks.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Counts a block of `old` pages that has `new` pages now.
    fn count(&mut self, old: u32, new: u32) {
        self.live = self.live + new as usize * BASE_PAGE - old as usize * BASE_PAGE;
        self.peak_live = self.peak_live.max(self.live);
        if self.site.backing == Backing::Advised {
            stats::live(self.live as u64);
        }
    }

    fn block(&self, address: usize) -> Option<(u32, u32)> {
        let offset = address
            .checked_sub(self.start)
            .filter(|_| address.is_multiple_of(BASE_PAGE))?;
        let page = u32::try_from(offset / BASE_PAGE).ok()?;
        Some((page, self.extents.live(page)?))
    }

    /// Constrains blocks to `offset` past a multiple of `align`, at most [`MAX_ALIGN_BYTES`].
    fn alignment(&self, align: usize, offset: usize) -> Alignment {
        let modulus = u32::try_from(align.div_ceil(BASE_PAGE)).unwrap_or(1);
        let pages = (offset.wrapping_sub(self.start) / BASE_PAGE) & (modulus as usize - 1);
        Alignment {
            modulus,
            remainder: u32::try_from(pages).unwrap_or(0),
        }
    }

    /// Returns the whole chunks of `range`; the last may be partial if a gap follows.
    fn whole_chunks(&self, range: &Range<usize>) -> Range<usize> {
        let end = match self.extents.begins(self.page(range.end), State::Unmapped) {
            true => range.end,
            false => range.end & !(self.pmd - 1),
        };
        range.start.next_multiple_of(self.pmd)..end
    }

    fn chunk_pages(&self) -> u32 {
        u32::try_from(self.pmd / BASE_PAGE).unwrap_or(1)
    }

    fn range(&self, page: u32, pages: u32) -> Range<usize> {
        self.address(page)..self.address(page + pages)
    }

    fn address(&self, page: u32) -> usize {
        self.start + page as usize * BASE_PAGE
    }

    /// Returns the page at an address of the window, which has fewer than 2^31 pages.
    fn page(&self, address: usize) -> u32 {
        u32::try_from((address - self.start) / BASE_PAGE).unwrap_or(u32::MAX)
    }
}

/// Returns the pages that `size` bytes take: at least one.
fn page_count(size: usize) -> Option<u32> {
    u32::try_from(size.max(1).div_ceil(BASE_PAGE))
        .ok()
        .filter(|pages| *pages < 1 << 31)
}
