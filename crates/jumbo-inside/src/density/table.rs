//! Address ranges that threads and signal handlers access without a lock: [`RangeTable`].
//!
//! A range is one word, so it is never seen half written. Beside it is a note of the table's user,
//! written while the word marks the slot as claimed. A reader may see the note of a range that
//! ended after it read the word.
//!
//! Invariant: no range has an address between [`RangeTable::cut`] and the next [`RangeTable::add`].
//!
//! Generic over [`Word64`], so that tests search the interleavings of this code.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

/// Base page size, the unit of ranges.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Maximum range, 1 TiB: a larger one takes several slots.
pub(crate) const MAX_BYTES: usize = ((1 << COUNT_BITS) - 1) * PAGE_BYTES;
const COUNT_BITS: u32 = 28;
/// First page beyond a word: mmap(2) returns addresses below 2^47 without a higher hint.
const END_PAGE: usize = 1 << 35;
/// Word of a slot whose note is being written, or read for the last time.
const CLAIMED: u64 = 1;

pub(crate) trait Word64 {
    /// Loads the value, with acquire ordering.
    fn load(&self) -> u64;
    /// Replaces `before` by `after`; false if the value differs.
    fn replace(&self, before: u64, after: u64) -> bool;
}

impl Word64 for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn replace(&self, before: u64, after: u64) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        self.compare_exchange(before, after, success, failure)
            .is_ok()
    }
}

/// Note of a range, which threads may read while it is written.
pub(crate) trait Note {
    /// Makes this note equal to another one.
    fn copy(&self, from: &Self);
}

impl Note for () {
    fn copy(&self, (): &Self) {}
}

/// Range of base pages, never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pages: Range<usize>,
}

impl Span {
    /// Returns the pages that cover an address range; `None` if it is empty or exceeds a word.
    pub(crate) fn new(range: &Range<usize>) -> Option<Self> {
        Self::of_pages(range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES))
    }

    fn of_pages(pages: Range<usize>) -> Option<Self> {
        let fits = pages.len() <= MAX_BYTES / PAGE_BYTES && pages.end <= END_PAGE;
        (!pages.is_empty() && fits).then_some(Self { pages })
    }

    /// Decodes the first page (35 bits), the count (28 bits), a zero bit. Free slots have no page.
    fn of_word(word: u64) -> Option<Self> {
        let bits = |from: u32, count: u32| usize::try_from(word >> from & ((1 << count) - 1));
        let (first, count) = (bits(COUNT_BITS + 1, 35).ok()?, bits(1, COUNT_BITS).ok()?);
        Self::of_pages(first..first + count)
    }

    fn word(&self) -> u64 {
        let (first, count) = (self.pages.start as u64, self.pages.len() as u64);
        first << (COUNT_BITS + 1) | count << 1
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.pages.start * PAGE_BYTES..self.pages.end * PAGE_BYTES
    }

    /// Returns the addresses of the whole blocks of `size` bytes.
    pub(crate) fn blocks(&self, size: usize) -> Range<usize> {
        let Range { start, end } = self.range();
        let first = start.next_multiple_of(size);
        first..(end & !(size - 1)).max(first)
    }

    /// Returns the rest without `gone`: its larger and its smaller end.
    fn without(&self, gone: &Self) -> (Option<Self>, Option<Self>) {
        let Range { start, end } = self.pages;
        let before = start..gone.pages.start.clamp(start, end);
        let after = gone.pages.end.clamp(start, end)..end;
        match before.len() >= after.len() {
            true => (Self::of_pages(before), Self::of_pages(after)),
            false => (Self::of_pages(after), Self::of_pages(before)),
        }
    }
}

/// Place of a range in a table.
#[derive(Debug)]
pub(crate) struct RangeSlot<'t, N, W = AtomicU64> {
    word: &'t W,
    pub(crate) note: &'t N,
}

impl<N, W: Word64> RangeSlot<'_, N, W> {
    pub(crate) fn span(&self) -> Option<Span> {
        Span::of_word(self.word.load())
    }

    /// Replaces a range; false if another thread has changed it.
    pub(crate) fn replace(&self, before: &Span, after: &Span) -> bool {
        self.word.replace(before.word(), after.word())
    }

    /// Ends a range, and passes its note to `ended`; false if another thread has changed it.
    pub(crate) fn end(&self, before: &Span, ended: impl FnOnce(&N)) -> bool {
        let is_ended = self.word.replace(before.word(), CLAIMED);
        if is_ended {
            ended(self.note);
            self.word.replace(CLAIMED, 0);
        }
        is_ended
    }
}

/// Table of at most `COUNT` ranges, each with a note.
#[derive(Debug)]
pub(crate) struct RangeTable<N, const COUNT: usize, W = AtomicU64> {
    words: [W; COUNT],
    notes: [N; COUNT],
}

impl<N, const COUNT: usize> RangeTable<N, COUNT> {
    /// Returns an empty table; all words are zero.
    pub(crate) const fn new(notes: [N; COUNT]) -> Self {
        Self {
            words: [const { AtomicU64::new(0) }; COUNT],
            notes,
        }
    }
}

impl<N: Note, const COUNT: usize, W: Word64> RangeTable<N, COUNT, W> {
    /// Returns all slots, used or not.
    pub(crate) fn slots(&self) -> impl Iterator<Item = RangeSlot<'_, N, W>> {
        let slots = self.words.iter().zip(&self.notes);
        slots.map(|(word, note)| RangeSlot { word, note })
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = (RangeSlot<'_, N, W>, Span)> {
        self.slots()
            .filter_map(|slot| slot.span().map(|span| (slot, span)))
    }

    /// Adds a range, after `prepare` has written its note; false if no slot is free.
    pub(crate) fn add(&self, span: &Span, prepare: impl FnOnce(&N)) -> bool {
        self.put(span, prepare).is_some()
    }

    fn put(&self, span: &Span, prepare: impl FnOnce(&N)) -> Option<RangeSlot<'_, N, W>> {
        let slot = self.slots().find(|slot| slot.word.replace(0, CLAIMED))?;
        prepare(slot.note);
        slot.word.replace(CLAIMED, span.word()).then_some(slot)
    }

    /// Removes pages from all ranges. A range cut in the middle keeps its larger end; the smaller one
    /// takes another slot, if one is free. `ended` receives the notes of removed ranges.
    pub(crate) fn cut(&self, gone: &Span, ended: impl Fn(&N)) {
        for slot in self.slots() {
            while let Some(before) = slot.span() {
                let (larger, smaller) = before.without(gone);
                // Added first: another thread's cut finds it here or there.
                let other = smaller
                    .as_ref()
                    .and_then(|span| self.put(span, |note| note.copy(slot.note)));
                let is_done = match &larger {
                    Some(left) if *left == before => true,
                    Some(left) => slot.replace(&before, left),
                    None => slot.end(&before, &ended),
                };
                if is_done {
                    break;
                }
                // Another thread has changed the range.
                if let (Some(other), Some(span)) = (other, smaller) {
                    other.end(&span, |_| {});
                }
            }
        }
    }

    /// Frees, in the child of a fork, the slots that a thread of the parent had claimed.
    pub(crate) fn forked(&self) {
        for word in &self.words {
            word.replace(CLAIMED, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shuttle::sync::Arc;
    use shuttle::thread;

    const PAGE: usize = PAGE_BYTES;

    fn span(pages: Range<usize>) -> Span {
        Span::of_pages(pages).unwrap()
    }

    impl Word64 for shuttle::sync::atomic::AtomicU64 {
        fn load(&self) -> u64 {
            self.load(Ordering::Acquire)
        }

        fn replace(&self, before: u64, after: u64) -> bool {
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            self.compare_exchange(before, after, success, failure)
                .is_ok()
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add(Range<usize>),
        Cut(Range<usize>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let pages = || (0usize..60, 1usize..20).prop_map(|(first, count)| first..first + count);
        let step = prop_oneof![pages().prop_map(Step::Add), pages().prop_map(Step::Cut),];
        prop::collection::vec(step, 1..40)
    }

    proptest! {
        #[test]
        fn a_word_is_read_as_it_was_written(
            start in 0usize..END_PAGE - (1 << COUNT_BITS),
            length in 1usize..1 << COUNT_BITS,
        ) {
            let some = Span::of_pages(start..start + length).unwrap();
            prop_assert_eq!(Span::of_word(some.word()), Some(some));
        }

        #[test]
        fn the_rest_of_a_cut_has_no_removed_page(
            start in 0usize..50,
            length in 1usize..50,
            from in 0usize..100,
            gone in 1usize..50,
        ) {
            let (all, gone) = (span(start..start + length), span(from..from + gone));
            let (larger, smaller) = all.without(&gone);
            let pages = |span: Option<Span>| span.map_or(0..0, |span| span.pages);
            let (larger, smaller) = (pages(larger), pages(smaller));
            prop_assert!(larger.len() >= smaller.len());
            let is_left = |page: &usize| larger.contains(page) || smaller.contains(page);
            let left = all.pages.clone().filter(|page| !gone.pages.contains(page));
            prop_assert_eq!(left.clone().filter(is_left).count(), left.count());
            prop_assert!(!gone.pages.clone().any(|page| is_left(&page)));
        }

        #[test]
        fn a_table_has_only_added_and_uncut_pages(steps in steps()) {
            let table = RangeTable::<(), 4>::new([(); 4]);
            let mut may_be = [false; 80];
            for step in steps {
                let (pages, is_added) = match step {
                    Step::Add(pages) => (pages.clone(), table.add(&span(pages), |()| ())),
                    Step::Cut(pages) => {
                        table.cut(&span(pages.clone()), |()| ());
                        may_be[pages].fill(false);
                        continue;
                    }
                };
                if is_added {
                    let holds = |span: Span| {
                        span.pages.start <= pages.start && pages.end <= span.pages.end
                    };
                    let is_there = table.each().any(|(_, span)| holds(span));
                    prop_assert!(is_there, "{pages:?}");
                    may_be[pages].fill(true);
                }
            }
            for (_, span) in table.each() {
                prop_assert!(span.pages.clone().all(|page| may_be[page]), "{span:?}");
            }
        }
    }

    #[test]
    fn a_range_beyond_a_word_has_no_span() {
        assert_eq!(Span::new(&(7 * PAGE..8 * PAGE + MAX_BYTES)), None);
        assert_eq!(
            Span::of_pages(END_PAGE - 1..END_PAGE + 1),
            None,
            "past the end"
        );
        assert_eq!(Span::new(&(PAGE..PAGE)), None);
        assert_eq!(Span::new(&(PAGE - 1..PAGE + 1)), Some(span(0..2)));
    }

    #[test]
    fn only_whole_blocks_are_scanned() {
        let pmd = 2 << 20;
        assert_eq!(span(511..1537).blocks(pmd), pmd..3 * pmd);
        assert!(span(513..1023).blocks(pmd).is_empty());
    }

    /// Both ends of a range that is cut in the middle stay in a table with room, with its note.
    #[test]
    fn a_range_cut_in_the_middle_is_two() {
        let table = RangeTable::<AtomicU64, 3>::new([const { AtomicU64::new(0) }; 3]);
        assert!(table.add(&span(0..10), |note| note.store(7, Ordering::Relaxed)));
        for gone in [6..7, 2..3, 8..9] {
            table.cut(&span(gone), |_| panic!("no range is gone"));
        }
        let mut left: Vec<_> = table.each().map(|(_, span)| span.pages.clone()).collect();
        left.sort_by_key(|pages| pages.start);
        // No slot was left for 9..10.
        assert_eq!(left, [0..2, 3..6, 7..8]);
        assert!(
            table
                .each()
                .all(|(slot, _)| slot.note.load(Ordering::Relaxed) == 7)
        );
    }

    impl Note for AtomicU64 {
        fn copy(&self, from: &Self) {
            self.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    type Model = RangeTable<AtomicU64, 3, shuttle::sync::atomic::AtomicU64>;

    fn search(scenario: impl Fn(&Arc<Model>) + Send + Sync + Clone + 'static) {
        let scenario = move || {
            scenario(&Arc::new(RangeTable {
                words: core::array::from_fn(|_| shuttle::sync::atomic::AtomicU64::new(0)),
                notes: core::array::from_fn(|_| AtomicU64::new(0)),
            }));
        };
        shuttle::check_random(scenario.clone(), 600);
        shuttle::check_pct(scenario, 600, 3);
    }

    /// Each thread adds a range with its number as the note, cuts a part out, then the rest.
    #[test]
    fn threads_that_share_slots_lose_and_leak_no_range() {
        search(|table| {
            let worker = |number: usize| {
                let table = Arc::clone(table);
                thread::spawn(move || {
                    let at = number * 100;
                    let mine = |note: &AtomicU64| note.load(Ordering::Relaxed) == number as u64;
                    let set = |note: &AtomicU64| note.store(number as u64, Ordering::Relaxed);
                    let is_there = || {
                        let mut found = table.each().filter(|(_, span)| span.pages.contains(&at));
                        found.next().is_some_and(|(slot, _)| mine(slot.note))
                    };
                    for _ in 0..2 {
                        if table.add(&span(at..at + 20), set) {
                            assert!(is_there(), "{number} added");
                            let none = |_: &AtomicU64| panic!("nothing is gone yet");
                            table.cut(&span(at + 15..at + 20), none);
                            assert!(is_there(), "{number} cut");
                        }
                        let ended = |note: &AtomicU64| assert!(mine(note), "another's note");
                        table.cut(&span(at..at + 20), ended);
                        assert!(!is_there(), "{number} is gone");
                    }
                })
            };
            let workers = [1, 2, 3, 4].map(worker);
            for worker in workers {
                worker.join().unwrap();
            }
            assert_eq!(table.each().count(), 0);
            let places = (0..3).all(|at| table.add(&span(at..at + 1), |_| ()));
            assert!(
                places && !table.add(&span(3..4), |_| ()),
                "each slot can be had again, once"
            );
        });
    }
}
