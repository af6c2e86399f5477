//! Ranges in blocks: [`Ranges`]. Those that the program has mapped anew, protected, locked or advised,
//! and those that came resident with a block that grew.
//!
//! Pages of the first kind outlive the block: the next one at the place would write into a file of the
//! program, or fault. So a freed block of this kind is unmapped at once, and never kept.

use core::ops::Range;

/// Ranges that are told apart. Beyond them each block counts as one with a range.
const MAX_RANGES: usize = 64;

/// Ranges of live blocks.
#[derive(Debug)]
pub(super) struct Ranges {
    ranges: [(usize, usize); MAX_RANGES],
    count: usize,
    is_full: bool,
}

impl Ranges {
    pub(super) const fn new() -> Self {
        Self {
            ranges: [(0, 0); MAX_RANGES],
            count: 0,
            is_full: false,
        }
    }

    /// Records a range; false if there are too many.
    pub(super) fn add(&mut self, range: &Range<usize>) -> bool {
        let known = self.ranges.iter().take(self.count);
        if known
            .into_iter()
            .any(|it| it.0 <= range.start && range.end <= it.1)
        {
            return true;
        }
        let free = self.ranges.get_mut(self.count);
        self.is_full |= free.is_none();
        free.is_some_and(|free| {
            *free = (range.start, range.end);
            self.count += 1;
            true
        })
    }

    /// Returns the bytes of all ranges.
    pub(super) fn bytes(&self) -> usize {
        let ranges = self.ranges.iter().take(self.count);
        ranges.map(|range| range.1 - range.0).sum()
    }

    /// Reports whether a range has a part of a block.
    pub(super) fn touch(&self, block: &Range<usize>) -> bool {
        self.is_full
            || self
                .ranges
                .iter()
                .take(self.count)
                .any(|it| overlap(*it, block))
    }

    /// Forgets a block that is unmapped, or lost.
    pub(super) fn forget(&mut self, block: &Range<usize>) {
        let mut at = 0;
        while let Some(range) = self.ranges.get(at).filter(|_| at < self.count) {
            if !overlap(*range, block) {
                at += 1;
                continue;
            }
            self.count -= 1;
            self.ranges.swap(at, self.count);
        }
    }

    /// Moves the ranges of a block to its new address.
    pub(super) fn moved(&mut self, block: &Range<usize>, to: usize) {
        for range in self.ranges.iter_mut().take(self.count) {
            if overlap(*range, block) {
                let by = to.wrapping_sub(block.start);
                *range = (range.0.wrapping_add(by), range.1.wrapping_add(by));
            }
        }
    }
}

fn overlap(range: (usize, usize), block: &Range<usize>) -> bool {
    range.0 < block.end && block.start < range.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_stay_with_their_block() {
        let mut changes = Ranges::new();
        changes.add(&(0x2000..0x3000));
        changes.add(&(0x2000..0x3000));
        changes.add(&(0x9000..0xa000));
        assert!(changes.touch(&(0x1000..0x2001)) && !changes.touch(&(0x3000..0x9000)));
        changes.moved(&(0x1000..0x4000), 0x11000);
        assert!(changes.touch(&(0x12000..0x13000)) && !changes.touch(&(0x1000..0x4000)));
        changes.forget(&(0x11000..0x14000));
        assert!(!changes.touch(&(0x11000..0x14000)) && changes.touch(&(0x9000..0xa000)));
        assert_eq!(changes.count, 1);
    }

    #[test]
    fn each_block_is_changed_once_there_are_too_many() {
        let mut changes = Ranges::new();
        for at in 0..=MAX_RANGES {
            assert!(!changes.touch(&(1..2)));
            changes.add(&(at * 0x2000..at * 0x2000 + 1));
        }
        assert!(changes.touch(&(1..2)));
    }
}
