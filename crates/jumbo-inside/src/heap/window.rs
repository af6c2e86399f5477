//! Large allocations: [`Window`], the extents and the frontier under one lock.
//!
//! Every function here is called with the heap's lock held, but for [`peek`]. What is freed stays mapped
//! for a while (`Dirty`), because the next allocation of its size would fault it in again. Past
//! [`Window::keep`] it goes back to the kernel: whole huge pages are unmapped, so that freed memory is
//! really free and a late access faults; what is smaller than one stays mapped (cutting a huge page would
//! leave mappings behind that can never be huge again) and is given back with MADV_DONTNEED.
//!
//! Invariants: the frontier's next address is that of the first page past the extents; an `Unmapped`
//! extent ends at a huge page, and begins at one or behind a block that ends before (a *gap*, which a block aligned to huge pages leaves); what is in no `Live` extent, and in one only while a function here has it, no code
//! uses.
#![expect(unsafe_code, reason = "gives memory back, and moves it")]

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::backing::Backing;
use super::extents::{Extents, Placement, State};
use super::frontier::Frontier;
use super::memory::{self, PageTable};
use super::supply::SUPPLY;
use super::{BASE_PAGE, Resize};
use crate::gather::{self, Leaving};
use crate::keep::Keep;
use crate::ledger::stats;
use crate::sys;

/// glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits: what is larger it maps and unmaps each time.
const KEEP_BLOCK: usize = 32 << 20;
/// What is kept in any case: enough for a set of blocks that come and go.
const KEEP_LEAST: usize = 16 << 20;
/// The same in a program that grows.
const KEEP_GROWING: usize = 8 << 20;
/// So many addresses are used before any is used again that leaves something over; or twice what the program had at once.
const FRESH: usize = 8 << 30;
/// How often another place is tried when a mapping of the program's is in the way.
const DETOURS: u32 = 8;
/// Larger alignments are left to the program's allocator, which trims what it does not need.
const MOST_ALIGN: usize = 1 << 30;

/// What becomes of memory that is left over of a chunk beyond what may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beyond {
    /// There is none: the chunk is not taken.
    Refuse,
    /// It is not mapped: a gap.
    Gap,
}

/// Which part of the address space a window has, and what its memory is.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) backing: Backing,
    /// Blocks lie in this range.
    pub(super) base: usize,
    pub(super) end: usize,
    /// Where its page records are.
    pub(super) table: usize,
    /// Where it begins, for [`peek`]. Written once.
    pub(super) start: AtomicUsize,
}

/// The state behind the heap's lock.
#[derive(Debug)]
pub(super) struct Window {
    site: &'static Site,
    extents: Extents<PageTable>,
    frontier: Frontier,
    start: usize,
    pmd: usize,
    max_waste: usize,
    /// How much freed memory stays, where the user says so.
    keep: Option<Keep>,
    /// The block that is being taken was asked for at a huge page, so its user lays huge pages out by itself: what is beyond
    /// its end is not made resident with it.
    is_exact: bool,
    /// Bytes handed out, and the most so far.
    live: usize,
    most_live: usize,
    /// Bytes in `Dirty` and in `Clean` extents.
    dirty: usize,
    clean: usize,
    /// The largest block of at most [`KEEP_BLOCK`] that was freed so far.
    largest_kept: usize,
}

/// The bytes that the block at `address` has room for, looked up without the lock.
///
/// A signal handler may do so that interrupted a call of the heap.
///
/// # Safety
/// A block of the caller's begins at `address`: no other thread changes its record.
pub(super) unsafe fn peek(site: &Site, address: usize) -> Option<usize> {
    let page = address.checked_sub(site.start.load(Ordering::Acquire))? / BASE_PAGE;
    // SAFETY: the caller's promise.
    unsafe { memory::peek(site.table, page) }
        .live_pages()
        .map(|pages| pages as usize * BASE_PAGE)
}

impl Window {
    pub(super) const fn new(site: &'static Site) -> Self {
        Self {
            site,
            extents: Extents::new(PageTable::new(site.table)),
            frontier: Frontier::new(site.backing),
            start: 0,
            pmd: 0,
            max_waste: 0,
            keep: None,
            is_exact: false,
            live: 0,
            most_live: 0,
            dirty: 0,
            clean: 0,
            largest_kept: 0,
        }
    }

    /// Begins at a place that `random` chooses, in chunks of `pmd` bytes. Once only. `max_waste` is in percent of what is
    /// handed out.
    pub(super) fn place(
        &mut self,
        pmd: usize,
        max_waste: usize,
        keep: Option<Keep>,
        random: usize,
    ) {
        let chunks = (self.site.end - self.site.base) / 2 / pmd;
        self.start = self.site.base + random % chunks * pmd;
        self.pmd = pmd;
        self.max_waste = max_waste;
        self.keep = keep;
        self.frontier.place(self.start, self.site.end, pmd);
        self.site.start.store(self.start, Ordering::Release);
    }

    /// As [`Window::take`], at a multiple of more than `align` where that helps to free it.
    ///
    /// # Errors
    /// As [`Window::take`].
    pub(super) fn take_aligned(
        &mut self,
        size: usize,
        align: usize,
    ) -> Result<(usize, bool), Errno> {
        self.is_exact = align >= self.pmd;
        let better = gather::alignment(size).max(align);
        let taken = match self.take(size, better) {
            Err(_) if better > align => self.take(size, align),
            taken => taken,
        };
        self.is_exact = false;
        taken
    }

    /// `size` bytes at a multiple of `align`, and whether they are zero.
    ///
    /// # Errors
    /// `ENOMEM`, or that no place could be found (`EEXIST`, `ERANGE`).
    pub(super) fn take(&mut self, size: usize, align: usize) -> Result<(usize, bool), Errno> {
        let pages = page_count(size).ok_or(Errno::NOMEM)?;
        if align > MOST_ALIGN {
            return Err(Errno::RANGE);
        }
        let place = self.placement(align, 0);
        let mut taken = self.take_pages(pages, place);
        if taken == Err(Errno::NOMEM) && self.dirty > self.spared(pages) {
            // Freed at once, or it would be no help.
            self.purge(self.spared(pages), None);
            taken = self.take_pages(pages, place);
        }
        let (page, zero) = taken?;
        self.count(pages, true);
        Ok((self.address(page), zero))
    }

    /// Frees the block at `address`, at once unless it may be kept for the next one. False where none begins there.
    ///
    /// # Safety
    /// Where one does, nothing uses it from now on.
    pub(super) unsafe fn release(
        &mut self,
        address: usize,
        keep: bool,
        leaving: &mut Leaving,
    ) -> bool {
        let Some((page, pages)) = self.block(address) else {
            return false;
        };
        self.count(pages, false);
        let length = pages as usize * BASE_PAGE;
        // SAFETY: the caller's promise.
        let unmap = || unsafe { self.site.backing.unmap(address, length, None) };
        if !keep && unmap().is_ok() {
            self.unmapped(page, pages);
            return true;
        }
        self.release_pages(page, pages, leaving);
        true
    }

    /// The bytes that the block at `address` has room for.
    pub(super) fn room(&self, address: usize) -> Option<usize> {
        self.block(address)
            .map(|(_, pages)| pages as usize * BASE_PAGE)
    }

    /// Whether blocks have come as far as that address.
    pub(super) fn holds(&self, address: usize) -> bool {
        (self.start..self.address(self.extents.end())).contains(&address)
    }

    /// Resizes without copying, where that can be done.
    ///
    /// # Safety
    /// Nothing uses what the block at `address` has beyond `size`, nor, where it moves, its old place.
    pub(super) unsafe fn resize(
        &mut self,
        address: usize,
        size: usize,
        leaving: &mut Leaving,
    ) -> Resize {
        let Some((page, old)) = self.block(address) else {
            return Resize::Unknown;
        };
        let room = old as usize * BASE_PAGE;
        let Some(new) = page_count(size) else {
            return Resize::Copy(room);
        };
        if new <= old {
            if new < old {
                let tail = self.extents.split(page, old, new);
                self.count(old - new, false);
                self.release_pages(tail, old - new, leaving);
            }
            return Resize::Done(address);
        }
        if self.grow(page, old, new - old) {
            self.count(new - old, true);
            return Resize::Done(address);
        }
        self.relocate(page, old, new)
            .map_or(Resize::Copy(room), Resize::Done)
    }

    /// Gives free memory back that need not be kept. True if there was any.
    pub(super) fn trim(&mut self, leaving: &mut Leaving) -> bool {
        self.purge(self.keep(), Some(leaving))
    }

    /// Gives all free memory back. True if there was any.
    pub(super) fn give_up(&mut self, leaving: &mut Leaving) -> bool {
        self.purge(0, Some(leaving))
    }

    /// Gives free memory back until at most `keep` bytes of it may be resident; true if any was. Large ranges are handed
    /// to `leaving`, where there is one, to be freed without the heap's lock.
    fn purge(&mut self, keep: usize, mut leaving: Option<&mut Leaving>) -> bool {
        let (before, backing) = (self.dirty, self.site.backing);
        while self.dirty > keep {
            let Some((page, pages)) = self.extents.take_largest(State::Dirty) else {
                break;
            };
            let range = self.range(page, pages);
            let mut inner = self.whole_chunks(&range);
            if backing == Backing::Pool {
                // No more of the pool than has to go.
                let most = (self.dirty - keep).next_multiple_of(self.pmd);
                inner.start = inner.start.max(inner.end.saturating_sub(most));
            }
            self.dirty -= range.len();
            // SAFETY: the extent was free, and is this function's now.
            unsafe {
                if !inner.is_empty()
                    && backing
                        .unmap(inner.start, inner.len(), leaving.as_deref_mut())
                        .is_ok()
                {
                    // The edges are smaller than a huge page: they stay as they are.
                    self.carve(page, pages, &inner, Self::add_dirty);
                } else if backing.discard(range.start, range.len()).is_ok() {
                    // It is less than a huge page, or there are too many mappings (vm.max_map_count): it keeps its addresses.
                    self.add_clean(page, pages);
                } else {
                    // A refusal (locked memory, the pool's) leaves it resident, and `Clean` would be wrong.
                    self.add_dirty(page, pages);
                    break;
                }
            }
        }
        self.dirty < before
    }

    /// Pages in the middle of a live extent were unmapped: `inner`, whole chunks. They become
    /// `Unmapped`, and what is around them is handed to `edge`.
    fn carve(
        &mut self,
        page: u32,
        pages: u32,
        inner: &Range<usize>,
        edge: fn(&mut Self, u32, u32),
    ) {
        let (head, tail) = (
            self.page(inner.start) - page,
            page + pages - self.page(inner.end),
        );
        let mut middle = (page, pages);
        if head > 0 {
            middle = (self.extents.split(page, pages, head), pages - head);
            edge(self, page, head);
        }
        if tail > 0 {
            let rest = self.extents.split(middle.0, middle.1, middle.1 - tail);
            middle.1 -= tail;
            edge(self, rest, tail);
        }
        let freed = self.extents.release(middle.0, middle.1, State::Unmapped);
        self.extents.forget(freed, middle.0, middle.1);
    }

    /// The pages of a live extent were unmapped, all of them: it becomes free.
    fn unmapped(&mut self, page: u32, pages: u32) {
        let inner = self.whole_chunks(&self.range(page, pages));
        if inner.is_empty() {
            self.refill(page, pages);
        } else {
            self.carve(page, pages, &inner, Self::refill);
        }
    }

    /// Maps pages of a live extent anew and frees them. Where that fails the addresses are lost.
    fn refill(&mut self, page: u32, pages: u32) {
        if self.map_again(page, pages).is_ok() {
            self.add_clean(page, pages);
        }
    }

    fn take_pages(&mut self, pages: u32, place: Placement) -> Result<(u32, bool), Errno> {
        if let Some(page) = self.extents.take(State::Dirty, pages, place) {
            self.dirty -= pages as usize * BASE_PAGE;
            return Ok((page, false));
        }
        self.make_way(pages as usize * BASE_PAGE);
        if let Some(page) = self.extents.take(State::Clean, pages, place) {
            self.clean -= pages as usize * BASE_PAGE;
            return Ok((page, true));
        }
        // One huge page may always be left over: it is used up by what comes next.
        let most = match self.is_exact {
            true => 0,
            false => self.allowed(pages as usize * BASE_PAGE).max(self.pmd),
        };
        // Fresh addresses are the most seamless, but their records stay: so there is an end to them.
        let used = self.extents.end() as usize * BASE_PAGE;
        let beyond = match self.is_exact || used > FRESH.max(self.most_live.saturating_mul(2)) {
            true => Beyond::Gap,
            false => Beyond::Refuse,
        };
        if let Ok(page) = self.take_unmapped(pages, place, most, beyond) {
            return Ok((page, true));
        }
        let fresh = self.take_fresh(pages, place);
        if fresh == Err(Errno::RANGE) {
            // All addresses have been used once.
            return self
                .take_unmapped(pages, place, most, Beyond::Gap)
                .map(|page| (page, true));
        }
        fresh
    }

    /// So many bytes more are about to become resident: what is kept beside them goes where the program never had as much at once.
    /// A table that grows does not leave its smaller selves beside it.
    fn make_way(&mut self, bytes: usize) {
        let is_ours = self.site.backing == Backing::Advised && self.keep.is_none();
        let before = self.most_live.saturating_sub(self.live + bytes);
        // The allowed waste may be there: so little goes under the heap's lock, however large the program is.
        let keep = before.max(KEEP_GROWING).max(self.allowed(bytes));
        if is_ours && self.dirty > keep {
            // At once: what comes is resident before another thread would be through.
            self.purge(keep, None);
        }
    }

    /// Takes whole chunks out of the unmapped extents, and frees again what is not needed of them.
    ///
    /// A clean extent in front (what was left over the last time) is used up first, so that blocks
    /// follow each other as seamlessly as at the frontier. `most` bounds what may be left over; where it would be more, `beyond`
    /// says what becomes of it.
    fn take_unmapped(
        &mut self,
        pages: u32,
        place: Placement,
        most: usize,
        beyond: Beyond,
    ) -> Result<u32, Errno> {
        let chunk = self.chunk_pages();
        let lead = place.remainder % chunk;
        let whole = |pages: u32| pages.checked_next_multiple_of(chunk).ok_or(Errno::NOMEM);
        // The block begins `lead` pages into the first chunk.
        let from = Placement {
            modulus: place.modulus.max(chunk),
            remainder: place.remainder - lead,
        };
        let count = whole(pages.checked_add(lead).ok_or(Errno::NOMEM)?)?;
        let page = self
            .extents
            .take(State::Unmapped, count, from)
            .ok_or(Errno::NOMEM)?;
        let front = match self.extents.claim_before(page, State::Clean) {
            Some((start, length)) if place.modulus > 1 || length >= pages => {
                self.extents.release(start, length, State::Clean);
                0
            }
            front => front.map_or(0, |(_, length)| length),
        };
        let exact = pages + lead - front;
        let mut needed = whole(exact)?;
        let surplus = (needed - exact) as usize * BASE_PAGE;
        let is_beyond = surplus + self.clean - front as usize * BASE_PAGE > most;
        if is_beyond && beyond == Beyond::Gap {
            needed = exact;
        }
        if needed < count {
            let rest = self.extents.split(page, count, needed);
            self.extents.release(rest, count - needed, State::Unmapped);
        }
        let mapped = match is_beyond && beyond == Beyond::Refuse {
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

    fn take_fresh(&mut self, pages: u32, place: Placement) -> Result<(u32, bool), Errno> {
        for _ in 0..DETOURS {
            match self.take_at_frontier(pages, place) {
                Err(Errno::EXIST) => self.detour()?,
                other => return other.map(|page| (page, true)),
            }
        }
        Err(Errno::EXIST)
    }

    fn take_at_frontier(&mut self, pages: u32, place: Placement) -> Result<u32, Errno> {
        let end = self.extents.end();
        let at = place.first_from(end).filter(|at| *at < 1 << 31);
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
    fn append(&mut self, pages: u32, and: impl FnOnce(&mut Self, u32, u32)) -> Result<u32, Errno> {
        let end = self
            .extents
            .end()
            .checked_add(pages)
            .filter(|end| *end < 1 << 31);
        let end = end.ok_or(Errno::NOMEM)?;
        let size = pages as usize * BASE_PAGE;
        let allowed = match self.is_exact {
            true => 0,
            false => self.allowed(size).saturating_sub(self.clean),
        };
        let growth = self.frontier.take(size, allowed)?;
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

    fn map_again(&self, page: u32, pages: u32) -> Result<(), Errno> {
        let range = self.range(page, pages);
        self.site
            .backing
            .map(range.start, range.len())
            .map(|_advised| ())
    }

    fn grow(&mut self, page: u32, pages: u32, extra: u32) -> bool {
        let end = page + pages;
        if end == self.extents.end() {
            let merge = |window: &mut Self, _, _| window.extents.join(page, pages, extra);
            return self.append(extra, merge).is_ok();
        }
        let bytes = extra as usize * BASE_PAGE;
        if self.extents.grow(page, extra, State::Dirty) {
            self.dirty -= bytes;
            return true;
        }
        if self.extents.grow(page, extra, State::Clean) {
            self.clean -= bytes;
            return true;
        }
        false
    }

    /// Moves a block by its page tables. Both places lie alike within a huge page, so that huge pages
    /// move whole.
    fn relocate(&mut self, page: u32, old: u32, new: u32) -> Option<usize> {
        let length = old as usize * BASE_PAGE;
        // The pool's pages stay where they were counted.
        if length < self.pmd || self.site.backing == Backing::Pool {
            return None;
        }
        let from = self.address(page);
        let place = self.placement(self.pmd, from % self.pmd);
        let (target, _) = self.take_pages(new, place).ok()?;
        let to = self.address(target);
        // SAFETY: the block's user asked for the move, and the target was taken for it; the heap's lock is held.
        unsafe {
            if sys::move_mapping(from, to, length).is_err() {
                // Whether the target is still mapped is not known (mremap(2) unmaps it first): it stays
                // taken for good. Since Linux 6.17 a move may also stop between two mappings; then the
                // pages that have moved already go back.
                sys::move_back(from, to, length);
                return None;
            }
        }
        self.count(new - old, true);
        self.unmapped(page, old);
        Some(to)
    }

    fn release_pages(&mut self, page: u32, pages: u32, leaving: &mut Leaving) {
        let length = pages as usize * BASE_PAGE;
        if length <= KEEP_BLOCK {
            self.largest_kept = self.largest_kept.max(length);
        }
        self.add_dirty(page, pages);
        self.purge(self.keep(), Some(leaving));
    }

    fn add_dirty(&mut self, page: u32, pages: u32) {
        let freed = self.extents.release(page, pages, State::Dirty);
        self.dirty += (pages + freed.absorbed) as usize * BASE_PAGE;
        self.clean -= freed.absorbed as usize * BASE_PAGE;
    }

    /// Frees mapped pages that are not resident. Whole chunks of them are unmapped, so that they can be
    /// huge again.
    fn add_clean(&mut self, page: u32, pages: u32) {
        let freed = self.extents.release(page, pages, State::Clean);
        self.clean += pages as usize * BASE_PAGE;
        let inner = self.whole_chunks(&self.range(freed.start, freed.pages));
        // SAFETY: the extent is free.
        let unmap = || unsafe { self.site.backing.unmap(inner.start, inner.len(), None) };
        if !inner.is_empty() && unmap().is_ok() {
            self.extents.claim(freed.start, freed.pages, State::Clean);
            self.clean -= freed.pages as usize * BASE_PAGE;
            self.carve(freed.start, freed.pages, &inner, Self::add_clean);
        }
    }

    /// What the user says; else what glibc would keep (its trim threshold: twice the largest chunk it unmapped so far), and
    /// the allowed waste on top. Of the pool all but its surplus.
    fn keep(&self) -> usize {
        match (self.site.backing, self.keep) {
            (Backing::Pool, _) => self.dirty.saturating_sub(SUPPLY.surplus()),
            (Backing::Advised, Some(keep)) => keep.of(self.most_live),
            (Backing::Advised, None) => (self.largest_kept * 2).max(KEEP_LEAST) + self.allowed(0),
        }
    }

    /// How much may stay free when there is no room for so many pages more: nothing, but of the pool what is
    /// beyond them, and all where that would not help.
    fn spared(&self, pages: u32) -> usize {
        let needed = (pages as usize * BASE_PAGE).next_multiple_of(self.pmd);
        match self.site.backing {
            Backing::Pool => self.dirty.checked_sub(needed).unwrap_or(self.dirty),
            Backing::Advised => 0,
        }
    }

    /// The waste that is allowed when there are so many bytes more.
    fn allowed(&self, more: usize) -> usize {
        ((self.live + more) / 100 + 1).saturating_mul(self.max_waste)
    }

    fn count(&mut self, pages: u32, more: bool) {
        let bytes = pages as usize * BASE_PAGE;
        self.live = if more {
            self.live + bytes
        } else {
            self.live - bytes
        };
        self.most_live = self.most_live.max(self.live);
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

    /// Blocks at `offset` past a multiple of `align`, which is at most [`MOST_ALIGN`].
    fn placement(&self, align: usize, offset: usize) -> Placement {
        let modulus = u32::try_from(align.div_ceil(BASE_PAGE)).unwrap_or(1);
        let pages = (offset.wrapping_sub(self.start) / BASE_PAGE) & (modulus as usize - 1);
        Placement {
            modulus,
            remainder: u32::try_from(pages).unwrap_or(0),
        }
    }

    /// The chunks in `range` that nothing else is in: the last one, too, where a gap follows.
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

    /// The page at an address of the window, which has fewer than 2^31.
    fn page(&self, address: usize) -> u32 {
        u32::try_from((address - self.start) / BASE_PAGE).unwrap_or(u32::MAX)
    }
}

/// How many pages `size` bytes take: at least one.
fn page_count(size: usize) -> Option<u32> {
    u32::try_from(size.max(1).div_ceil(BASE_PAGE))
        .ok()
        .filter(|pages| *pages < 1 << 31)
}
