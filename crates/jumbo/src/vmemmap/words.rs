//! Words of the table: [`State`] of a section, [`Mark`] of a descriptor, [`Counts`] of a head.
//!
//! Each is one atomic word, read and written whole, so a reader of one word needs no lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// An atomic word: of the processor, or in tests of a model that searches the interleavings.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `current` by `new`; the error is the value found instead. SeqCst.
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

/// Entry of the section table, with all data of an optimised huge page.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Section<W> {
    /// A [`State`].
    pub(super) state: W,
    /// [`Counts`] of an optimised page with its head here. Else not live.
    pub(super) counts: W,
    /// Owner word of that page.
    pub(super) owner: W,
    /// Number of threads that may write to the section's descriptors, which keep their memory
    /// meanwhile.
    pub(super) users: W,
}

/// The descriptor of a base page.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Descriptor<W> {
    /// A [`Mark`].
    pub(super) mark: W,
    /// [`Counts`] of a head.
    pub(super) counts: W,
    /// Owner word of a head.
    pub(super) owner: W,
    /// Padding: a descriptor has the kernel's size, and its own cache line.
    _rest: [W; 5],
}

/// State of a section's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// No page in the section, and no memory for descriptors.
    Absent,
    /// One optimised huge page or a part of one, without memory for descriptors.
    Optimised,
    /// A descriptor for each page.
    Described,
}

/// State of a section: its kind, the order of the optimised page, the number of described base
/// pages, and a change counter: a reader that sees the same word twice knows that no change came
/// between.
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

/// Content of a descriptor: the order of its compound page, or none. The head follows from the
/// order, because a compound page is aligned to its size. All pages of a compound page have the
/// same mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(pub(super) u64);

impl Mark {
    /// No page: zeroes, which freed memory reads as.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn of(order: u32) -> Self {
        Self(1 << 8 | u64::from(order))
    }

    pub(super) fn order(self) -> Option<u32> {
        (self != Self::NONE).then_some(u32::try_from(self.0 & 0xff).unwrap_or(0))
    }
}

/// Counts of a head: references, and pins among them. The owner has one reference; 0 is no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts(pub(super) u64);

const PINS: u32 = 32;
/// Limit of each of both counts.
const MAX_COUNT: u64 = 1 << 31;

impl Counts {
    /// No head.
    pub(super) const NONE: Self = Self(0);
    /// Only the owner's reference.
    pub(super) const OWNED: Self = Self(1);
    /// A thread changes the page: no reference can be taken, and only the owner's exists.
    pub(super) const FROZEN: Self = Self(1 << 63);

    /// Returns the value of that many references, or of pins, which are references too.
    pub(super) fn many(count: u64, pins: bool) -> u64 {
        if pins { count | count << PINS } else { count }
    }

    /// Returns the number of references, the owner's included.
    pub(super) fn references(self) -> u64 {
        self.0 & (u64::from(u32::MAX))
    }

    pub(super) fn pins(self) -> u64 {
        (self.0 & !Self::FROZEN.0) >> PINS
    }

    /// Reports whether references can be taken now.
    pub(super) fn is_live(self) -> bool {
        self != Self::NONE && self != Self::FROZEN
    }

    /// Adds a value of [`Counts::many`]; `None` on overflow.
    pub(super) fn with(self, more: u64) -> Option<Self> {
        let (more, sum) = (Self(more), Self(self.0.wrapping_add(more)));
        let fits =
            more.references() < MAX_COUNT && self.references() + more.references() < MAX_COUNT;
        fits.then_some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_compact_and_descriptors_have_the_kernels_size() {
        assert_eq!(size_of::<Section<AtomicU64>>(), 32);
        assert_eq!(size_of::<Descriptor<AtomicU64>>(), 64);
    }

    #[test]
    fn states_keep_their_values_and_never_repeat() {
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
        let all = Counts::many(MAX_COUNT - 2, true);
        let max = Counts::OWNED.with(all).unwrap();
        assert_eq!(
            (max.references(), max.pins()),
            (MAX_COUNT - 1, MAX_COUNT - 2)
        );
        assert!(max.is_live());
        assert_eq!(max.with(1), None);
        assert_eq!(Counts::OWNED.with(Counts::many(MAX_COUNT, true)), None);
        assert_eq!((Counts::FROZEN.references(), Counts::FROZEN.pins()), (0, 0));
        assert_eq!(Mark::of(0).order(), Some(0));
        assert_eq!(Mark::NONE.order(), None);
    }
}
