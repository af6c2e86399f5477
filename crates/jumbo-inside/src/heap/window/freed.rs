//! Retention of freed blocks, and their return to the kernel.
#![expect(unsafe_code, reason = "frees memory")]

use core::fmt::Write as _;
use core::ops::Range;

use super::BlockWindow;
use crate::debug;
use crate::density;
use crate::gather::PendingFree;
use crate::heap::BASE_PAGE;
use crate::heap::backing::Backing;
use crate::heap::demand;
use crate::heap::extents::State;
use crate::heap::supply::SUPPLY;
use crate::sync::{millis, now};
use jumbo_sys as sys;

/// Freed memory that is kept while the program fills other memory.
const KEEP_BESIDE_FILL_BYTES: usize = 4 << 20;
/// Growth of other memory from which as little is kept.
const MIN_FILL_BYTES: usize = 32 << 20;
/// Maximum of freed bytes between two checks whether the program fills its blocks.
const MAX_UNCHECKED_BYTES: usize = 8 << 20;
/// Pieces that the watching thread frees per acquisition of the lock.
const MAX_PIECES: usize = 8;

impl BlockWindow {
    /// Frees unused memory until at most `keep` bytes are resident; reports whether it freed any.
    /// Hands large ranges to `leaving`, if given, which frees them without the heap's lock.
    pub(in crate::heap) fn purge(
        &mut self,
        keep: usize,
        leaving: Option<&mut PendingFree>,
    ) -> bool {
        self.purge_pieces(keep, usize::MAX, self.is_rest_wanted(), leaving)
    }

    fn is_rest_wanted(&self) -> bool {
        self.site.backing == Backing::Pool || self.keeps_by_demand()
    }

    /// Variant of [`BlockWindow::purge`] that frees `pieces` at most; `is_wanted`: no more than
    /// necessary, since the rest is wanted.
    fn purge_pieces(
        &mut self,
        keep: usize,
        pieces: usize,
        is_wanted: bool,
        mut leaving: Option<&mut PendingFree>,
    ) -> bool {
        let (before, backing) = (self.dirty, self.site.backing);
        for _ in 0..pieces {
            if self.dirty <= keep || self.is_confined {
                break;
            }
            let Some((page, pages)) = self.extents.take_largest(State::Dirty) else {
                break;
            };
            let range = self.range(page, pages);
            let mut inner = self.whole_chunks(&range);
            if is_wanted {
                let max = (self.dirty - keep).next_multiple_of(self.pmd);
                inner.start = inner.start.max(inner.end.saturating_sub(max));
            }
            self.dirty -= range.len();
            // SAFETY: the extent was free, and belongs to this function now.
            unsafe {
                if !inner.is_empty()
                    && backing
                        .unmap(inner.start, inner.len(), leaving.as_deref_mut())
                        .is_ok()
                {
                    // The edges, smaller than a huge page, stay resident.
                    self.carve(page, pages, &inner, Self::add_dirty);
                } else if backing.discard(range.start, range.len(), self.pmd).is_ok() {
                    // Smaller than a huge page, or too many mappings (vm.max_map_count).
                    self.add_clean(page, pages);
                } else {
                    // A refusal (locked memory, the pool): `Clean` would be wrong.
                    self.add_dirty(page, pages);
                    break;
                }
            }
        }
        if self.dirty < before {
            debug::note(
                [before - self.dirty, self.dirty, 0],
                |line, [bytes, kept, _]| {
                    write!(line, "freed blocks: {bytes} bytes returned, {kept} stay")
                },
            );
        }
        self.dirty < before
    }

    /// Marks `inner`, unmapped chunks of a live extent, as `Unmapped`; `edge` gets the rest.
    pub(super) fn carve(
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

    /// Frees a live extent whose pages were all unmapped.
    pub(super) fn unmapped(&mut self, page: u32, pages: u32) {
        let inner = self.whole_chunks(&self.range(page, pages));
        if inner.is_empty() {
            self.refill(page, pages);
        } else {
            self.carve(page, pages, &inner, Self::refill);
        }
    }

    /// Maps pages of a live extent again and frees them. On failure the addresses are lost.
    fn refill(&mut self, page: u32, pages: u32) {
        if self.map_again(page, pages).is_ok() {
            self.add_clean(page, pages);
        }
    }

    pub(super) fn release_pages(&mut self, page: u32, pages: u32, leaving: &mut PendingFree) {
        self.check_density(page, pages);
        self.add_dirty(page, pages);
        let before = self.dirty;
        if before > self.keep() && self.purge(self.keep(), Some(leaving)) && self.is_by_demand() {
            self.demand.returned(before - self.dirty, millis(now()));
        }
    }

    fn is_by_demand(&self) -> bool {
        self.site.backing == Backing::Advised && self.keep.is_none() && demand::is_on()
    }

    /// Records an allocation of `bytes` that no free memory served.
    pub(super) fn missed(&mut self, bytes: usize) {
        if self.is_by_demand() && self.demand.has_returned() {
            self.demand.missed(bytes, millis(now()));
        }
    }

    /// Returns the bytes of free memory that may be resident.
    pub(in crate::heap) const fn free(&self) -> usize {
        self.dirty
    }

    /// Reports whether a large retained block may be discarded for calloc(3): the user has set no
    /// bound, and the program is not known to fill such blocks.
    pub(in crate::heap) fn may_drop(&self) -> bool {
        self.keep.is_none() && !self.keeps_by_demand()
    }

    /// Returns the bytes of allocated and free memory that may be resident.
    pub(in crate::heap) const fn total(&self) -> usize {
        self.live + self.dirty
    }

    pub(in crate::heap) fn keeps_by_demand(&self) -> bool {
        self.demand.kept() > 0
    }

    /// Lets allocated and free memory together grow by `growth` bytes (negative: shrink).
    pub(in crate::heap) fn limit_total(&mut self, growth: isize) {
        let total = self.total();
        self.demand.limit(total.saturating_add_signed(growth));
    }

    pub(in crate::heap) fn end_demand(&mut self) {
        self.demand.end();
    }

    /// Lowers the demand as it ages.
    pub(in crate::heap) fn age(&mut self) {
        self.demand.age(self.dirty, self.base_keep(), millis(now()));
    }

    /// Frees a part of what is beyond the bound; reports whether more is left.
    pub(in crate::heap) fn shrink(&mut self, leaving: Option<&mut PendingFree>) -> bool {
        let keep = self.keep();
        self.purge_pieces(keep, MAX_PIECES, self.is_rest_wanted(), leaving) && self.dirty > keep
    }

    /// Frees memory before the program fills `bytes` elsewhere: as much of what stays by demand,
    /// and most of the rest where that is much.
    pub(in crate::heap) fn about_to_fill(&mut self, bytes: usize, leaving: &mut PendingFree) {
        let is_much = bytes >= MIN_FILL_BYTES && self.is_by_demand();
        if !self.keeps_by_demand() && !is_much {
            return;
        }
        self.demand.lower(bytes, self.live + self.dirty);
        let keep = match is_much {
            true => self.keep().min(KEEP_BESIDE_FILL_BYTES),
            false => self.keep(),
        };
        self.purge(keep, Some(leaving));
    }

    /// Frees `bytes` for other memory that is about to grow beyond its peak by as much.
    pub(in crate::heap) fn make_room(&mut self, bytes: usize, leaving: &mut PendingFree) {
        if self.is_by_demand() {
            self.demand.lower(bytes, self.live + self.dirty);
            let keep = self.keep().min(self.dirty.saturating_sub(bytes));
            self.purge_pieces(keep, usize::MAX, true, Some(leaving));
        }
    }

    /// Frees memory that stays by demand before the program may fill `bytes` elsewhere. The next scan
    /// of [`demand`] measures again.
    pub(in crate::heap) fn make_room_for_now(&mut self, bytes: usize, leaving: &mut PendingFree) {
        if self.keeps_by_demand() && self.is_by_demand() {
            self.demand.expect_growth(bytes);
            self.purge(self.keep(), Some(leaving));
        }
    }

    /// Ends the retention of a program that frees blocks which it has filled in part: the next block
    /// at their place would add to the resident part. Checks a block now and then, the more
    /// often the larger it is.
    fn check_density(&mut self, page: u32, pages: u32) {
        // A filter may forbid the check.
        if !self.keeps_by_demand() || !self.is_by_demand() {
            return;
        }
        self.unchecked += pages as usize * BASE_PAGE;
        if self.unchecked < self.check_after {
            return;
        }
        self.unchecked = 0;
        // Any order of blocks has each of them checked sooner or later.
        self.checks += 1;
        let random = density::hash(self.checks);
        self.check_after = random % MAX_UNCHECKED_BYTES;
        let range = self.range(page, pages);
        if sys::unfiltered(|| density::is_filled(&range, random >> 32)) == Some(false) {
            self.demand.end_for_sparse(millis(now()));
        }
    }

    pub(super) fn add_dirty(&mut self, page: u32, pages: u32) {
        let freed = self.extents.release(page, pages, State::Dirty);
        self.dirty += (pages + freed.absorbed) as usize * BASE_PAGE;
        self.clean -= freed.absorbed as usize * BASE_PAGE;
    }

    /// Frees mapped pages that are not resident, and unmaps whole chunks, which can be huge again.
    pub(super) fn add_clean(&mut self, page: u32, pages: u32) {
        let freed = self.extents.release(page, pages, State::Clean);
        self.clean += pages as usize * BASE_PAGE;
        let inner = self.whole_chunks(&self.range(freed.start, freed.pages));
        // SAFETY: the extent is free.
        let unmap = || unsafe { self.site.backing.unmap(inner.start, inner.len(), None) };
        if !inner.is_empty() && !self.is_confined && unmap().is_ok() {
            self.extents.claim(freed.start, freed.pages, State::Clean);
            self.clean -= freed.pages as usize * BASE_PAGE;
            self.carve(freed.start, freed.pages, &inner, Self::add_clean);
        }
    }

    /// Returns the bytes of free memory that are kept.
    pub(in crate::heap) fn keep(&self) -> usize {
        self.keep_with(0)
    }

    /// Returns the bytes of free memory that are kept with `more` allocated bytes.
    pub(super) fn keep_with(&self, more: usize) -> usize {
        let base = self.base_keep();
        match self.keeps_by_demand() && self.is_by_demand() {
            true => self.demand.keep(base, self.live + more),
            false => base,
        }
    }

    /// Returns the bytes kept without demand: the user's bound, else glibc's trim threshold (twice
    /// the largest chunk it unmapped) plus the allowed waste, enough for blocks that are freed and
    /// allocated in turn; of the pool, all but its surplus.
    fn base_keep(&self) -> usize {
        match (self.site.backing, self.keep) {
            (Backing::Pool, _) => self.dirty.saturating_sub(SUPPLY.surplus()),
            (Backing::Advised, Some(keep)) => keep.of(self.peak_live),
            (Backing::Advised, None) => {
                (self.largest_freed * 2).max(density::floor()) + self.allowed(0)
            }
        }
    }

    /// Returns the bytes kept when `pages` more found no room: none; of the pool, all beyond
    /// `pages`, and everything if freeing it would not suffice.
    pub(super) fn kept_on_retry(&self, pages: u32) -> usize {
        let needed = (pages as usize * BASE_PAGE).next_multiple_of(self.pmd);
        match self.site.backing {
            Backing::Pool => self.dirty.checked_sub(needed).unwrap_or(self.dirty),
            Backing::Advised => 0,
        }
    }

    /// Returns the allowed waste with `more` allocated bytes.
    pub(super) fn allowed(&self, more: usize) -> usize {
        ((self.live + more) / 100 + 1).saturating_mul(self.max_waste)
    }
}
