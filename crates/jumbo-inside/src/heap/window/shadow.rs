//! The memory that glibc would keep: [`Shadow`], the layout of its heap without the memory.
//!
//! glibc puts blocks of up to a threshold into one growing heap, and takes the best fit there. A freed
//! block between live ones stays resident. Programs whose blocks have many sizes so have free memory
//! beside live memory for good, with glibc as here. Where jumbo gave that back, the next block would
//! fault in anew, and the program would be slower than plain. So that amount stays, and no more.
//!
//! Rules of malloc(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), with their defaults: blocks
//! beyond the threshold are mapped and unmapped; freeing such a block of up to 32 MiB raises the
//! threshold to its size; the end of the heap goes back once twice the threshold is free there.
//!
//! Invariant: `free` is the sum of the free extents, in pages.

use crate::heap::BASE_PAGE;
use crate::heap::extents::{Extents, Grow, Placement, State};

/// DEFAULT_MMAP_THRESHOLD and DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64 bits, in pages.
const LEAST_THRESHOLD: u32 = (128 << 10) >> BASE_PAGE.trailing_zeros();
const MOST_THRESHOLD: u32 = (32 << 20) >> BASE_PAGE.trailing_zeros();
/// The place of a block that glibc would map by itself.
pub(super) const MAPPED: u32 = u32::MAX;
const ANYWHERE: Placement = Placement {
    modulus: 1,
    remainder: 0,
};

/// The layout of glibc's heap: blocks are numbers of pages, and places are pages.
#[derive(Debug)]
pub(super) struct Shadow<T> {
    extents: Extents<T>,
    threshold: u32,
    free: u32,
}

impl<T: Grow> Shadow<T> {
    pub(super) const fn new(table: T) -> Self {
        Self {
            extents: Extents::new(table),
            threshold: LEAST_THRESHOLD,
            free: 0,
        }
    }

    pub(super) const fn table_mut(&mut self) -> &mut T {
        self.extents.table_mut()
    }

    /// The free memory in glibc's heap, in bytes.
    pub(super) const fn free(&self) -> usize {
        self.free as usize * BASE_PAGE
    }

    /// The free memory that glibc would leave at the end of its heap, in bytes.
    pub(super) const fn trim_threshold(&self) -> usize {
        self.threshold as usize * BASE_PAGE * 2
    }

    /// The place of a block of `pages` in glibc's heap, or [`MAPPED`].
    pub(super) fn take(&mut self, pages: u32) -> u32 {
        // glibc maps a block of the threshold's size, and its header makes this one larger.
        if pages >= self.threshold {
            return MAPPED;
        }
        if let Some(page) = self.extents.take(State::Dirty, pages, ANYWHERE) {
            self.free = self.free.saturating_sub(pages);
            return page;
        }
        let end = self.extents.end();
        let (top, length) = match self.extents.claim_before(end, State::Dirty) {
            Some((top, length)) if length < pages => (top, length),
            Some((top, length)) => {
                self.extents.release(top, length, State::Dirty);
                (end, 0)
            }
            None => (end, 0),
        };
        if !self.extents.table_mut().reaches(top.saturating_add(pages)) {
            if length > 0 {
                self.extents.release(top, length, State::Dirty);
            }
            return MAPPED;
        }
        self.free = self.free.saturating_sub(length);
        self.extents.append(pages - length, State::Live);
        self.extents.join(top, length, pages - length);
        top
    }

    /// Frees a block of `pages` at `place`, which [`Shadow::take`] returned: the program may have written over it.
    pub(super) fn release(&mut self, place: u32, pages: u32) {
        if place == MAPPED && (self.threshold..=MOST_THRESHOLD).contains(&pages) {
            self.threshold = pages;
        }
        self.forget(place, pages);
    }

    /// As [`Shadow::release`], of a block that another one replaces: the threshold stays.
    pub(super) fn forget(&mut self, place: u32, pages: u32) {
        if place == MAPPED || self.extents.live(place) != Some(pages) {
            return;
        }
        let freed = self.extents.release(place, pages, State::Dirty);
        self.free = self.free.saturating_add(pages);
        let is_last = freed.start + freed.pages == self.extents.end();
        if is_last && freed.pages >= self.threshold * 2 {
            self.extents.cut(freed.start, freed.pages, State::Dirty);
            self.free = self.free.saturating_sub(freed.pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::extents::{Record, Table};
    use core::ops::Range;

    const MIB: u32 = (1 << 20) >> BASE_PAGE.trailing_zeros();

    #[derive(Debug)]
    struct Pages(Vec<Record>);

    impl Table for Pages {
        fn get(&self, page: u32) -> Record {
            self.0[page as usize]
        }
        fn set(&mut self, page: u32, record: Record) {
            self.0[page as usize] = record;
        }
        fn forget(&mut self, _pages: Range<u32>, _within: Range<u32>) {}
    }

    impl Grow for Pages {
        fn reaches(&mut self, end: u32) -> bool {
            self.0.len() >= end as usize
        }
    }

    /// Room for 400 MiB of blocks, of which one of 30 MiB was mapped and freed.
    fn begun() -> Shadow<Pages> {
        let mut shadow = Shadow::new(Pages(vec![Record::default(); 400 * MIB as usize]));
        let block = shadow.take(30 * MIB);
        assert_eq!(block, MAPPED);
        shadow.release(block, 30 * MIB);
        shadow
    }

    #[test]
    fn a_block_is_mapped_until_one_of_its_size_was_freed() {
        let mut shadow = begun();
        assert_eq!(shadow.trim_threshold(), 60 << 20);
        assert_eq!(shadow.take(30 * MIB), MAPPED);
        assert_eq!((shadow.take(MIB), shadow.take(2 * MIB)), (0, MIB));
        let larger = shadow.take(33 * MIB);
        shadow.release(larger, 33 * MIB);
        assert_eq!(shadow.trim_threshold(), 60 << 20, "beyond the most");
    }

    #[test]
    fn free_memory_between_live_blocks_stays_and_the_end_goes() {
        let mut shadow = begun();
        let blocks: Vec<u32> = (0..10).map(|_| shadow.take(20 * MIB)).collect();
        shadow.release(blocks[4], 20 * MIB);
        assert_eq!(shadow.free(), 20 << 20);
        assert_eq!(shadow.take(15 * MIB), blocks[4], "the hole fits");
        assert_eq!(shadow.free(), 5 << 20);
        shadow.release(blocks[9], 20 * MIB);
        shadow.release(blocks[8], 20 * MIB);
        assert_eq!(shadow.free(), 45 << 20);
        shadow.release(blocks[7], 20 * MIB);
        assert_eq!(shadow.free(), 5 << 20, "60 MiB at the end went back");
        assert_eq!(shadow.take(25 * MIB), blocks[7]);
    }

    #[test]
    fn the_free_end_grows_into_a_block() {
        let mut shadow = begun();
        let blocks: Vec<u32> = (0..3).map(|_| shadow.take(10 * MIB)).collect();
        shadow.release(blocks[2], 10 * MIB);
        assert_eq!(shadow.take(25 * MIB), blocks[2]);
        assert_eq!(shadow.free(), 0);
    }

    #[test]
    fn without_memory_for_the_table_and_with_a_wrong_place_nothing_is_free() {
        let mut shadow = begun();
        let blocks: Vec<u32> = (0..20).map(|_| shadow.take(20 * MIB)).collect();
        assert_eq!(shadow.take(20 * MIB), MAPPED);
        shadow.release(blocks[3] + 1, 20 * MIB);
        shadow.release(blocks[3], 19 * MIB);
        assert_eq!(shadow.free(), 0);
    }
}
