//! Large allocations: [`Window`], the extents and the frontier under one lock.
//!
//! Every function here is called with the heap's lock held. What is freed stays mapped for a while
//! (`Dirty`), because the next allocation of its size would fault it in again; past [`Window::keep`] it
//! is unmapped, as glibc does with its own large chunks, so that freed memory is really free and a late
//! access faults.

use rustix::io::Errno;

use super::extents::{Extents, Placement, State};
use super::frontier::Frontier;
use super::memory::{self, PageTable};
use super::{BASE_PAGE, HEAP_BASE, HEAP_END, Settings, stats};

/// glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits: what is larger it maps and unmaps each time.
const KEEP_BLOCK: usize = 32 << 20;
/// How often another place is tried when somebody else's mapping is in the way.
const DETOURS: u32 = 8;

/// The state behind the heap's lock.
#[derive(Debug)]
pub(super) struct Window {
    extents: Extents<PageTable>,
    frontier: Frontier,
    start: usize,
    pmd: usize,
    max_waste: usize,
    /// Bytes handed out.
    live: usize,
    /// Bytes in `Dirty` extents.
    dirty: usize,
    /// The largest block of at most [`KEEP_BLOCK`] that was freed so far.
    largest_kept: usize,
}

/// What became of a request to resize in place.
#[derive(Debug)]
pub(super) enum Resized {
    /// Done; the block is where it was.
    InPlace,
    /// Done; its pages were moved here.
    Moved(usize),
    /// Nothing was changed; the caller copies. The length of the block.
    No(usize),
    /// No block of ours begins there.
    Unknown,
}

impl Window {
    pub(super) const fn new() -> Self {
        Self {
            extents: Extents::new(PageTable::new()),
            frontier: Frontier::new(),
            start: 0,
            pmd: 0,
            max_waste: 0,
            live: 0,
            dirty: 0,
            largest_kept: 0,
        }
    }

    /// Begins at a place that `random` chooses. Once only.
    pub(super) fn place(&mut self, settings: Settings, random: usize) {
        let chunks = (HEAP_END - HEAP_BASE) / 2 / settings.pmd;
        self.start = HEAP_BASE + random % chunks * settings.pmd;
        self.pmd = settings.pmd;
        self.max_waste = settings.max_waste;
        self.frontier.place(self.start, HEAP_END, settings.pmd);
    }

    /// `size` bytes at a multiple of `align`, and whether they are zero.
    ///
    /// # Errors
    /// `ENOMEM`, or that no place could be found (`EEXIST`).
    pub(super) fn take(&mut self, size: usize, align: usize) -> Result<(usize, bool), Errno> {
        let pages = page_count(size).ok_or(Errno::NOMEM)?;
        let place = self.placement(align, 0)?;
        let mut taken = self.take_pages(pages, place);
        if taken == Err(Errno::NOMEM) && self.dirty > 0 {
            self.purge(0);
            taken = self.take_pages(pages, place);
        }
        let (page, zero) = taken?;
        self.count(pages, true);
        Ok((self.address(page), zero))
    }

    /// Frees the block at `address`. False where none begins there.
    pub(super) fn release(&mut self, address: usize) -> bool {
        let Some((page, pages)) = self.block(address) else {
            return false;
        };
        self.count(pages, false);
        self.release_pages(page, pages);
        true
    }

    /// The bytes that the block at `address` has room for.
    pub(super) fn room(&self, address: usize) -> Option<usize> {
        self.block(address)
            .map(|(_, pages)| pages as usize * BASE_PAGE)
    }

    /// Resizes without copying, where that can be done.
    pub(super) fn resize(&mut self, address: usize, size: usize) -> Resized {
        let Some((page, old)) = self.block(address) else {
            return Resized::Unknown;
        };
        let room = old as usize * BASE_PAGE;
        let Some(new) = page_count(size) else {
            return Resized::No(room);
        };
        if new <= old {
            if new < old {
                let tail = self.extents.split(page, old, new);
                self.count(old - new, false);
                self.release_pages(tail, old - new);
            }
            return Resized::InPlace;
        }
        if self.grow(page, old, new - old) {
            self.count(new - old, true);
            return Resized::InPlace;
        }
        self.relocate(page, old, new)
            .map_or(Resized::No(room), Resized::Moved)
    }

    /// Unmaps free memory until at most `keep` bytes of it are left mapped.
    pub(super) fn purge(&mut self, keep: usize) {
        while self.dirty > keep {
            let Some((page, pages)) = self.extents.take_largest(State::Dirty) else {
                return;
            };
            let (start, end) = (self.address(page), self.address(page + pages));
            self.dirty -= end - start;
            // Whole huge pages go first: a cut through one costs its neighbours their huge page.
            let inner = start.next_multiple_of(self.pmd)..end & !(self.pmd - 1);
            let inner = if inner.is_empty() { start..end } else { inner };
            if memory::unmap(inner.start, inner.len()).is_err() {
                // Too many mappings (vm.max_map_count). The memory goes back, the addresses stay.
                let _ = memory::discard(start, end - start);
                self.dirty += end - start;
                self.extents.release(page, pages, State::Dirty);
                return;
            }
            let (head, tail) = (
                self.page(inner.start) - page,
                page + pages - self.page(inner.end),
            );
            let mut middle = (page, pages);
            if head > 0 {
                middle = (self.extents.split(page, pages, head), pages - head);
                self.keep_dirty(page, head);
            }
            if tail > 0 {
                let rest = self.extents.split(middle.0, middle.1, middle.1 - tail);
                middle.1 -= tail;
                self.keep_dirty(rest, tail);
            }
            self.extents.release(middle.0, middle.1, State::Unmapped);
        }
    }

    /// Unmaps all free memory. True if there was any.
    pub(super) fn trim(&mut self) -> bool {
        let before = self.dirty;
        self.purge(0);
        self.dirty < before
    }

    fn take_pages(&mut self, pages: u32, place: Placement) -> Result<(u32, bool), Errno> {
        if let Some(page) = self.extents.take(State::Dirty, pages, place) {
            self.dirty -= pages as usize * BASE_PAGE;
            return Ok((page, false));
        }
        if let Some(page) = self.extents.take(State::Unmapped, pages, place) {
            match self.map_again(page, pages) {
                Ok(()) => return Ok((page, true)),
                // Somebody mapped something there: those addresses are lost to us, for good.
                Err(Errno::EXIST) => {}
                Err(errno) => {
                    self.extents.release(page, pages, State::Unmapped);
                    return Err(errno);
                }
            }
        }
        self.take_fresh(pages, place)
    }

    fn take_fresh(&mut self, pages: u32, place: Placement) -> Result<(u32, bool), Errno> {
        for _ in 0..DETOURS {
            let end = self.extents.end();
            let at = place.first_from(end).ok_or(Errno::NOMEM)?;
            let total = (at - end).checked_add(pages).ok_or(Errno::NOMEM)?;
            let new_end = end
                .checked_add(total)
                .filter(|end| *end < 1 << 31)
                .ok_or(Errno::NOMEM)?;
            let size = total as usize * BASE_PAGE;
            let allowed = self.allowed(size);
            self.extents.table_mut().reach(new_end)?;
            match self.frontier.take(size, allowed) {
                Ok(_) => {
                    if at > end {
                        self.extents.append(at - end, State::Live);
                        self.keep_dirty(end, at - end);
                    }
                    return Ok((self.extents.append(pages, State::Live), true));
                }
                Err(Errno::EXIST) => self.detour()?,
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EXIST)
    }

    /// Goes round a mapping of somebody else's. The addresses in between stay taken for good.
    fn detour(&mut self) -> Result<(), Errno> {
        let (left, right) = self.frontier.skip();
        let next = self.page_checked(self.frontier.next())?;
        self.extents.table_mut().reach(next)?;
        if right > left {
            let page = self
                .extents
                .append(self.page(right) - self.page(left), State::Live);
            self.keep_dirty(page, self.page(right) - page);
        }
        let lost = next - self.extents.end();
        if lost > 0 {
            self.extents.append(lost, State::Live);
        }
        Ok(())
    }

    fn map_again(&self, page: u32, pages: u32) -> Result<(), Errno> {
        let (start, length) = (self.address(page), pages as usize * BASE_PAGE);
        memory::map(start, length)?;
        // A refusal is counted by `advise`.
        let _ = memory::advise(start, length);
        Ok(())
    }

    fn grow(&mut self, page: u32, pages: u32, extra: u32) -> bool {
        if page + pages == self.extents.end() {
            let Some(end) = (page + pages)
                .checked_add(extra)
                .filter(|end| *end < 1 << 31)
            else {
                return false;
            };
            let size = extra as usize * BASE_PAGE;
            let allowed = self.allowed(size);
            let reached = self.extents.table_mut().reach(end).is_ok();
            if reached && self.frontier.take(size, allowed).is_ok() {
                self.extents.grow_end(page, pages, extra);
                return true;
            }
            return false;
        }
        match self.extents.grow(page, extra) {
            Some(State::Dirty) => {
                self.dirty -= extra as usize * BASE_PAGE;
                true
            }
            Some(_) => {
                let mapped = self.map_again(page + pages, extra);
                if mapped.is_err() {
                    let tail = self.extents.split(page, pages + extra, pages);
                    // Lost where somebody else's mapping is there; free again otherwise.
                    if mapped != Err(Errno::EXIST) {
                        self.extents.release(tail, extra, State::Unmapped);
                    }
                }
                mapped.is_ok()
            }
            None => false,
        }
    }

    /// Moves a block by its page tables. Both places lie alike within a huge page, so that huge pages
    /// move whole.
    fn relocate(&mut self, page: u32, old: u32, new: u32) -> Option<usize> {
        let length = old as usize * BASE_PAGE;
        if length < self.pmd {
            return None;
        }
        let from = self.address(page);
        let place = self.placement(self.pmd, from % self.pmd).ok()?;
        let (target, _) = self.take_pages(new, place).ok()?;
        let to = self.address(target);
        if memory::relocate(from, to, length).is_err() {
            // The target may have been unmapped before the move failed (mremap(2) with
            // MREMAP_FIXED); in doubt those addresses are not used again.
            let _ = memory::unmap(to, new as usize * BASE_PAGE);
            self.extents.release(target, new, State::Unmapped);
            return None;
        }
        self.count(new - old, true);
        self.extents.release(page, old, State::Unmapped);
        Some(to)
    }

    fn release_pages(&mut self, page: u32, pages: u32) {
        let length = pages as usize * BASE_PAGE;
        if length <= KEEP_BLOCK {
            self.largest_kept = self.largest_kept.max(length);
        }
        self.keep_dirty(page, pages);
        self.purge(self.keep());
    }

    fn keep_dirty(&mut self, page: u32, pages: u32) {
        self.dirty += pages as usize * BASE_PAGE;
        self.extents.release(page, pages, State::Dirty);
    }

    /// What glibc would keep (its trim threshold: twice the largest chunk it unmapped so far), and the
    /// allowed waste on top.
    fn keep(&self) -> usize {
        self.largest_kept * 2 + self.allowed(0)
    }

    fn allowed(&self, more: usize) -> usize {
        ((self.live + more) / 100).saturating_mul(self.max_waste)
    }

    fn count(&mut self, pages: u32, more: bool) {
        let bytes = pages as usize * BASE_PAGE;
        self.live = if more {
            self.live + bytes
        } else {
            self.live - bytes
        };
        stats::live(self.live as u64);
    }

    fn block(&self, address: usize) -> Option<(u32, u32)> {
        let offset = address
            .checked_sub(self.start)
            .filter(|_| address.is_multiple_of(BASE_PAGE))?;
        let page = u32::try_from(offset / BASE_PAGE).ok()?;
        Some((page, self.extents.live(page)?))
    }

    fn placement(&self, align: usize, offset: usize) -> Result<Placement, Errno> {
        let modulus = u32::try_from(align.div_ceil(BASE_PAGE)).map_err(|_| Errno::NOMEM)?;
        let remainder = (offset.wrapping_sub(self.start) / BASE_PAGE) & (modulus as usize - 1);
        // The remainder is below the modulus, which is a u32.
        Ok(Placement {
            modulus,
            remainder: u32::try_from(remainder).map_err(|_| Errno::NOMEM)?,
        })
    }

    fn address(&self, page: u32) -> usize {
        self.start + page as usize * BASE_PAGE
    }

    fn page(&self, address: usize) -> u32 {
        self.page_checked(address).unwrap_or(u32::MAX)
    }

    fn page_checked(&self, address: usize) -> Result<u32, Errno> {
        u32::try_from((address - self.start) / BASE_PAGE).map_err(|_| Errno::NOMEM)
    }
}

/// How many pages `size` bytes take: at least one.
fn page_count(size: usize) -> Option<u32> {
    u32::try_from(size.max(1).div_ceil(BASE_PAGE))
        .ok()
        .filter(|pages| *pages < 1 << 31)
}
