//! The words of the table, and what they mean: [`State`] of a section, [`Mark`] of a descriptor, [`Counts`] of a head.
//!
//! Each is one atomic word, so each is read and written whole. What can be read of a page from one word needs no lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic word: the processor's, or in tests that of a model which searches the interleavings.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `current` by `new` ; the value that was there instead is the error. SeqCst.
    fn replace(&self, current: u64, new: u64) -> Result<u64, u64>;
    fn fetch_add(&self, more: u64, order: Ordering) -> u64;
    fn fetch_sub(&self, less: u64, order: Ordering) -> u64;
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    fn replace(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }

    fn fetch_add(&self, more: u64, order: Ordering) -> u64 {
        self.fetch_add(more, order)
    }

    fn fetch_sub(&self, less: u64, order: Ordering) -> u64 {
        self.fetch_sub(less, order)
    }
}

/// A section's entry in the section table: all that is known of an optimised huge page.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Section<W> {
    /// A [`State`].
    pub(super) state: W,
    /// Where the section is the head of an optimised page: its [`Counts`]. Else not live.
    pub(super) counts: W,
    /// The owner word of that page.
    pub(super) owner: W,
    /// How many threads are about to write to descriptors of the section. Their memory stays for so long.
    pub(super) users: W,
}

/// The descriptor of a base page.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Descriptor<W> {
    /// A [`Mark`].
    pub(super) mark: W,
    /// Of a head: its [`Counts`].
    pub(super) counts: W,
    /// Of a head: the owner word.
    pub(super) owner: W,
    /// Zeroes: a descriptor is as large as the kernel's, and no two share a line of the cache.
    _rest: [W; 5],
}

/// What a section's descriptors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// There is no page in the section, and no memory behind its descriptors.
    Absent,
    /// It is one, or a part of one, optimised huge page: there is no memory behind its descriptors.
    Optimised,
    /// Each page has its descriptor.
    Described,
}

/// The state of a section: its kind, the order of the optimised page, how many of its base pages are described, and a
/// number that every change counts up, so that a reader who sees the same word twice knows that nothing was in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State(pub(super) u64);

const ORDER: u32 = 2;
const PRESENT: u32 = 8;
const CHANGES: u32 = 28;

impl State {
    pub(super) fn kind(self) -> Kind {
        match self.0 & 3 {
            0 => Kind::Absent,
            1 => Kind::Optimised,
            _ => Kind::Described,
        }
    }

    pub(super) fn order(self) -> u32 {
        Self::bits(self.0, ORDER, PRESENT)
    }

    pub(super) fn present(self) -> u32 {
        Self::bits(self.0, PRESENT, CHANGES)
    }

    fn bits(word: u64, from: u32, to: u32) -> u32 {
        // At most 20 bits.
        u32::try_from((word >> from) & ((1 << (to - from)) - 1)).unwrap_or(0)
    }

    fn next(self, kind: u64, order: u32, present: u32) -> Self {
        let changes = (self.0 >> CHANGES).wrapping_add(1);
        Self(kind | u64::from(order) << ORDER | u64::from(present) << PRESENT | changes << CHANGES)
    }

    pub(super) fn absent(self) -> Self {
        self.next(0, 0, 0)
    }

    pub(super) fn optimised(self, order: u32) -> Self {
        self.next(1, order, 0)
    }

    pub(super) fn described(self, present: u32) -> Self {
        self.next(2, 0, present)
    }
}

/// What a descriptor says of its page: the order of the compound page that it is in, or that it is in none. The head follows
/// from that, because a compound page is aligned to its size. It is the same for all pages of a compound page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(pub(super) u64);

impl Mark {
    /// No page, and what memory holds that was given back: zeroes.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn of(order: u32) -> Self {
        Self(1 << 8 | u64::from(order))
    }

    pub(super) fn order(self) -> Option<u32> {
        (self != Self::NONE).then_some(u32::try_from(self.0 & 0xff).unwrap_or(0))
    }
}

/// A head's counts: references, and how many of them are pins. The owner's own reference is one; 0 is no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts(pub(super) u64);

const PINS: u32 = 32;
/// Each of both counts stays below.
const MOST: u64 = 1 << 31;

impl Counts {
    /// No head.
    pub(super) const NONE: Self = Self(0);
    /// The owner's reference alone.
    pub(super) const OWNED: Self = Self(1);
    /// A thread changes the page: no reference is to be had, and none is out but the owner's.
    pub(super) const FROZEN: Self = Self(1 << 63);

    /// That many references, or pins, which are references too.
    pub(super) fn many(count: u64, pins: bool) -> u64 {
        if pins { count | count << PINS } else { count }
    }

    /// References, the owner's too.
    pub(super) fn references(self) -> u64 {
        self.0 & (u64::from(u32::MAX))
    }

    pub(super) fn pins(self) -> u64 {
        (self.0 & !Self::FROZEN.0) >> PINS
    }

    /// A head that references are to be had of now.
    pub(super) fn is_live(self) -> bool {
        self != Self::NONE && self != Self::FROZEN
    }

    /// With so many more, as by [`Counts::many`]; `None` where they could not be counted.
    pub(super) fn with(self, more: u64) -> Option<Self> {
        let (more, sum) = (Self(more), Self(self.0.wrapping_add(more)));
        let fits = more.references() < MOST && self.references() + more.references() < MOST;
        fits.then_some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_compact_and_descriptors_are_the_kernels_size() {
        assert_eq!(size_of::<Section<AtomicU64>>(), 32);
        assert_eq!(size_of::<Descriptor<AtomicU64>>(), 64);
    }

    #[test]
    fn states_hold_what_they_are_given_and_never_repeat() {
        let zero = State(0);
        assert_eq!(
            (zero.kind(), zero.order(), zero.present()),
            (Kind::Absent, 0, 0)
        );
        let huge = zero.optimised(18);
        assert_eq!(
            (huge.kind(), huge.order(), huge.present()),
            (Kind::Optimised, 18, 0)
        );
        let described = huge.described(1 << 18);
        assert_eq!(
            (described.kind(), described.order(), described.present()),
            (Kind::Described, 0, 1 << 18)
        );
        let again = described.absent().optimised(18);
        assert_ne!(again, huge);
        assert_eq!(State(u64::MAX).absent(), State(0), "it wraps");
    }

    #[test]
    fn counts_do_not_run_into_each_other() {
        let all = Counts::many(MOST - 2, true);
        let most = Counts::OWNED.with(all).unwrap();
        assert_eq!((most.references(), most.pins()), (MOST - 1, MOST - 2));
        assert!(most.is_live());
        assert_eq!(most.with(1), None);
        assert_eq!(Counts::OWNED.with(Counts::many(MOST, true)), None);
        assert_eq!((Counts::FROZEN.references(), Counts::FROZEN.pins()), (0, 0));
        assert_eq!(Mark::of(0).order(), Some(0));
        assert_eq!(Mark::NONE.order(), None);
    }
}
