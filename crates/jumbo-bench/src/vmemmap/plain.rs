//! [`DescriptorTable`], and its baseline [`PlainTable`]: a full table of descriptors, like the
//! kernel's without HVO.
//!
//! Each tail contains its head, as readers need. There are no checks and no locks: no full table is
//! faster.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;

/// A table of descriptors. Pages are identified by their number.
pub(super) trait DescriptorTable {
    fn prepare(&self, head: usize, order: u32) -> Result<(), Error>;
    fn release(&self, head: usize) -> Result<(), Error>;
    fn head_of(&self, page: usize) -> Option<usize>;
    /// Pins pages, calls `meanwhile`, and unpins them.
    fn pinned(&self, pages: Range<usize>, meanwhile: &mut dyn FnMut()) -> Result<(), Error>;
    fn pins(&self, page: usize) -> u64;
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Descriptor {
    /// Number of the head plus 1; 0 without a page.
    head: AtomicU64,
    /// Order, in a head.
    order: AtomicU64,
    /// References in the lower half and pins in the upper half, in a head.
    counts: AtomicU64,
}

/// Descriptors, by number of the base page.
pub(super) struct PlainTable(Box<[Descriptor]>);

/// A pin is also a reference.
const PIN: u64 = 1 | 1 << 32;

impl PlainTable {
    pub(super) fn new(pages: usize) -> Self {
        Self((0..pages).map(|_| Descriptor::default()).collect())
    }

    /// Calls `count` for each head in `pages`, with the number of its pages in the range.
    fn by_head(&self, pages: &Range<usize>, count: impl Fn(&AtomicU64, u64)) {
        let mut next = pages.start;
        while next < pages.end
            && let Some(head) = self.head_of(next)
        {
            let first = next;
            while next < pages.end && self.head_of(next) == Some(head) {
                next += 1;
            }
            count(&self.0[head].counts, (next - first) as u64);
        }
    }
}

impl DescriptorTable for PlainTable {
    fn prepare(&self, head: usize, order: u32) -> Result<(), Error> {
        let number = head as u64 + 1;
        let pages = &self.0[head..head + (1 << order)];
        pages[0].order.store(order.into(), Ordering::Relaxed);
        pages[0].counts.store(1, Ordering::Relaxed);
        for page in pages {
            page.head.store(number, Ordering::Release);
        }
        Ok(())
    }

    fn release(&self, head: usize) -> Result<(), Error> {
        let order = self.0[head].order.load(Ordering::Relaxed);
        for page in &self.0[head..head + (1 << order)] {
            page.head.store(0, Ordering::Release);
        }
        Ok(())
    }

    #[inline]
    fn head_of(&self, page: usize) -> Option<usize> {
        let head = self.0[page].head.load(Ordering::Acquire);
        usize::try_from(head).ok()?.checked_sub(1)
    }

    fn pinned(&self, pages: Range<usize>, meanwhile: &mut dyn FnMut()) -> Result<(), Error> {
        self.by_head(&pages, |counts, more| {
            counts.fetch_add(more * PIN, Ordering::AcqRel);
        });
        meanwhile();
        self.by_head(&pages, |counts, less| {
            counts.fetch_sub(less * PIN, Ordering::AcqRel);
        });
        Ok(())
    }

    fn pins(&self, page: usize) -> u64 {
        let head = self.head_of(page).unwrap_or(page);
        self.0[head].counts.load(Ordering::Relaxed) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_counted_per_head() {
        let plain = PlainTable::new(16);
        plain.prepare(4, 2).unwrap();
        plain.prepare(8, 3).unwrap();
        assert_eq!(
            [3, 4, 7, 8, 15].map(|page| plain.head_of(page)),
            [None, Some(4), Some(4), Some(8), Some(8)]
        );
        let mut pins = (0, 0);
        let mut look = || pins = (plain.pins(4), plain.pins(15));
        plain.pinned(6..13, &mut look).unwrap();
        assert_eq!(pins, (2, 5));
        assert_eq!((plain.pins(7), plain.pins(8)), (0, 0));
        plain.release(4).unwrap();
        assert_eq!(plain.head_of(7), None);
    }
}
