//! What the program did to pages of blocks: [`Changes`], and pages that were resident when a block grew
//! by them: [`Tails`].
//!
//! A page that the program has mapped anew, protected, locked or advised outlives the block: the next
//! one at the place would write into a file of the program, or fault. So a freed block with such a page
//! is unmapped at once, and never kept.
#![expect(unsafe_code, reason = "bits are reached by address")]

use core::ops::Range;
use core::ptr::null_mut;

use rustix::mm::{MapFlags, ProtFlags};

use jumbo_sys as sys;

/// Change of pages by the program that outlives their content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::heap) enum Change {
    /// mmap(2), munmap(2), mremap(2), mprotect(2), mseal(2).
    Mapping,
    /// madvise(2), mlock(2). Pages of the pool stay what they are.
    Pages,
}

/// Bytes and pages of a leaf: a bit for each page.
const LEAF_BYTES: usize = 4096;
const LEAF_PAGES: usize = LEAF_BYTES * 8;
/// Leaves: of a terabyte of base pages. Pages beyond count as changed once one is.
const LEAVES: usize = (1 << 40) / 4096 / LEAF_PAGES;

/// Changed pages of a window, by number.
#[derive(Debug)]
pub(super) struct Changes {
    /// Bitmaps, null until a page in them is changed.
    leaves: [*mut u64; LEAVES],
    /// A page was ever changed.
    is_any: bool,
    /// A page without a leaf was changed.
    is_beyond: bool,
}
// SAFETY: the leaves belong to no thread.
unsafe impl Send for Changes {}

impl Changes {
    pub(super) const fn new() -> Self {
        Self {
            leaves: [null_mut(); LEAVES],
            is_any: false,
            is_beyond: false,
        }
    }

    /// Records changed pages.
    pub(super) fn add(&mut self, pages: Range<u32>) {
        self.is_any |= !pages.is_empty();
        self.each_word(pages, true, |word, mask| *word |= mask);
    }

    /// Forgets pages that are unmapped, or lost.
    pub(super) fn forget(&mut self, pages: Range<u32>) {
        if self.is_any {
            self.each_word(pages, false, |word, mask| *word &= !mask);
        }
    }

    /// Reports whether one of the pages is changed.
    pub(super) fn touch(&mut self, pages: Range<u32>) -> bool {
        let mut is_changed = self.is_beyond;
        if self.is_any {
            self.each_word(pages, false, |word, mask| is_changed |= *word & mask != 0);
        }
        is_changed
    }

    /// Moves the changes of pages to others.
    pub(super) fn moved(&mut self, pages: Range<u32>, to: u32) {
        if !self.touch(pages.clone()) {
            return;
        }
        for page in pages.clone() {
            if self.touch(page..page + 1) {
                let to = to + (page - pages.start);
                self.add(to..to + 1);
            }
        }
        self.forget(pages);
    }

    /// Calls `each` with the words of pages and the bits in them; `makes` leaves that are missing.
    fn each_word(&mut self, pages: Range<u32>, makes: bool, mut each: impl FnMut(&mut u64, u64)) {
        let (mut at, end) = (pages.start as usize, pages.end as usize);
        while at < end {
            let (leaf, within) = (at / LEAF_PAGES, at % LEAF_PAGES);
            let rest = (LEAF_PAGES - within).min(end - at);
            let Some(words) = self.leaves.get_mut(leaf) else {
                self.is_beyond |= makes;
                return;
            };
            if words.is_null() && makes {
                let access = ProtFlags::READ | ProtFlags::WRITE;
                match sys::map_own(LEAF_BYTES, access, MapFlags::PRIVATE) {
                    Ok(made) => *words = made.cast(),
                    Err(_) => self.is_beyond = true,
                }
            }
            let words = *words;
            let mut bit = within;
            while !words.is_null() && bit < within + rest {
                let count = (64 - bit % 64).min(within + rest - bit);
                let mask = u64::MAX >> (64 - count) << (bit % 64);
                // SAFETY: a word of the leaf; the window's lock is held.
                each(unsafe { &mut *words.add(bit / 64) }, mask);
                bit += count;
            }
            at += rest;
        }
    }
}

/// Pages that were resident when a block grew by them, in ranges of addresses.
#[derive(Debug)]
pub(super) struct Tails {
    ranges: [(usize, usize); Self::MAX],
    count: usize,
}

impl Tails {
    const MAX: usize = 64;

    pub(super) const fn new() -> Self {
        Self {
            ranges: [(0, 0); Self::MAX],
            count: 0,
        }
    }

    /// Records a range; false if there are too many.
    pub(super) fn add(&mut self, range: &Range<usize>) -> bool {
        let Some(free) = self.ranges.get_mut(self.count) else {
            return false;
        };
        *free = (range.start, range.end);
        self.count += 1;
        true
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the bytes of all ranges.
    pub(super) fn bytes(&self) -> usize {
        let ranges = self.ranges.iter().take(self.count);
        ranges.map(|range| range.1 - range.0).sum()
    }

    /// Forgets those of a block.
    pub(super) fn forget(&mut self, block: &Range<usize>) {
        let mut at = 0;
        while let Some(range) = self.ranges.get(at).filter(|_| at < self.count) {
            if range.0 >= block.end || block.start >= range.1 {
                at += 1;
                continue;
            }
            self.count -= 1;
            self.ranges.swap(at, self.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_those_of_their_pages() {
        let edge = u32::try_from(LEAF_PAGES).unwrap();
        let mut changes = Changes::new();
        assert!(!changes.touch(0..edge * 2));
        changes.add(edge - 3..edge + 100);
        assert!(changes.touch(0..edge - 2) && !changes.touch(0..edge - 3));
        changes.forget(edge - 10..edge + 10);
        assert!(!changes.touch(0..edge + 10) && changes.touch(0..edge + 11));
        changes.moved(edge..edge + 50, edge * 3);
        assert!(!changes.touch(0..edge + 50) && changes.touch(edge + 50..edge + 51));
        assert!(changes.touch(edge * 3 + 10..edge * 3 + 11));
        assert!(!changes.touch(edge * 3..edge * 3 + 10) && !changes.touch(edge * 3 + 50..edge * 4));
    }

    #[test]
    fn tails_are_forgotten_with_their_block() {
        let mut tails = Tails::new();
        for at in 0..Tails::MAX {
            assert!(tails.add(&(at * 0x4000 + 0x1000..at * 0x4000 + 0x3000)));
        }
        assert!(!tails.add(&(1..2)));
        tails.forget(&(0x4000..0x8000));
        assert_eq!(tails.bytes(), (Tails::MAX - 1) * 0x2000);
    }
}
