//! Free and used pages of the window: [`Extents`], a segregated-fit index that allocates no memory.
//!
//! An extent is a run of pages in one [`State`]. The [`PageRecord`]s of its first and last page
//! have its length and state (boundary tags, outside the pages, so that free pages are never
//! touched). A free extent is linked into the bin of its size class. Taking and releasing are O(1):
//! a bitmap has the bins that are not empty.
//!
//! Invariants: extents tile `0..end` without gap or overlap; no two neighbours are free in the same
//! state; a free extent is in exactly one bin. The tests check all three after every step.

use core::ops::Range;

/// State of the pages of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum State {
    /// Allocated, or lost to a mapping of the program.
    Live,
    /// Free and mapped, maybe resident, not zero: the cheapest to reuse.
    Dirty,
    /// Free and mapped, not resident: zero at the first touch.
    Clean,
    /// Free and unmapped, in whole huge pages.
    Unmapped,
}

/// Record of one page, valid at the first and the last page of an extent only.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct PageRecord {
    pages: u32,
    /// [`State`] as a raw number, because the program can write there.
    tag: u32,
    next: u32,
    prev: u32,
}

impl PageRecord {
    /// Decodes the state. An invalid number counts as `Live`, so that it frees no memory.
    const fn state(self) -> State {
        match self.tag {
            1 => State::Dirty,
            2 => State::Clean,
            3 => State::Unmapped,
            _ => State::Live,
        }
    }

    /// Returns the length of the live extent that begins here, if there is one.
    pub(super) fn live_pages(self) -> Option<u32> {
        (self.is_block() && self.pages > 0).then_some(self.pages)
    }

    /// Reports whether it is the first or last record of a block.
    const fn is_block(self) -> bool {
        self.tag == State::Live as u32
    }
}

/// Storage of the records: one for each page below [`Extents::end`].
pub(super) trait Records {
    fn get(&self, page: u32) -> PageRecord;
    fn set(&mut self, page: u32, record: PageRecord);
    /// Invalidates the records of `pages`: the last valid ones in `within`, which may be freed.
    fn forget(&mut self, pages: Range<u32>, within: Range<u32>);
}

/// Constraint on an extent's first page: `page % modulus == remainder`. `modulus`: a power of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alignment {
    pub(super) modulus: u32,
    pub(super) remainder: u32,
}

impl Alignment {
    /// Returns the first page at or after `page` that satisfies the constraint.
    pub(super) fn first_from(self, page: u32) -> Option<u32> {
        let off = self.remainder.wrapping_sub(page) & (self.modulus - 1);
        page.checked_add(off)
    }
}

const NO_PAGE: u32 = u32::MAX;
/// Eight classes per power of two: an extent is at most an eighth larger than its class.
const BINS: usize = 30 * 8;
/// One bank of bins per free state.
const BANKS: usize = 3;
/// Extents of the request's own class that are tried before a larger class.
const MAX_CANDIDATES: u32 = 16;

/// Result of [`Extents::release`].
#[derive(Clone, Copy, Debug)]
pub(super) struct FreedExtent {
    /// First page of the free extent, with merged neighbours.
    pub(super) start: u32,
    pub(super) pages: u32,
    /// Pages that were `Clean` and are `Dirty` now.
    pub(super) absorbed: u32,
}

/// The index. Pages are numbered from the start of the window.
#[derive(Debug)]
pub(super) struct Extents<T> {
    table: T,
    end: u32,
    bins: [[u32; BINS]; BANKS],
    filled: [[u64; BINS.div_ceil(64)]; BANKS],
}

fn class(pages: u32) -> usize {
    let class = if pages < 8 {
        pages
    } else {
        let log = pages.ilog2();
        (log - 2) * 8 + ((pages >> (log - 3)) & 7)
    };
    class as usize
}

impl<T: Records> Extents<T> {
    pub(super) const fn new(table: T) -> Self {
        Self {
            table,
            end: 0,
            bins: [[NO_PAGE; BINS]; BANKS],
            filled: [[0; BINS.div_ceil(64)]; BANKS],
        }
    }

    /// Returns the end of the pages that were ever used.
    pub(super) const fn end(&self) -> u32 {
        self.end
    }

    pub(super) const fn table_mut(&mut self) -> &mut T {
        &mut self.table
    }

    /// Returns the length of the live extent that begins at `page`, if one does.
    pub(super) fn live(&self, page: u32) -> Option<u32> {
        if page >= self.end {
            return None;
        }
        let record = self.table.get(page);
        let last = page.checked_add(record.pages)?.checked_sub(1)?;
        let tail = (record.pages > 0 && last < self.end).then(|| self.table.get(last))?;
        let is_whole = tail.pages == record.pages;
        (is_whole && record.is_block() && tail.is_block()).then_some(record.pages)
    }

    /// Takes a lost extent back.
    pub(super) fn recover(&mut self, start: u32, pages: u32) {
        self.tag(start, pages, State::Live);
    }

    /// Gives up a live extent: no block begins there any more, and it is never free.
    pub(super) fn lose(&mut self, start: u32, pages: u32) {
        const LOST: u32 = u32::MAX;
        for page in [start, start + pages - 1] {
            let record = self.table.get(page);
            self.table.set(
                page,
                PageRecord {
                    tag: LOST,
                    ..record
                },
            );
        }
    }

    /// Reports whether an extent in `state` begins at `page`, where another one ends.
    pub(super) fn begins(&self, page: u32, state: State) -> bool {
        page < self.end && self.table.get(page).state() == state
    }

    /// Appends `pages` in `state`, and returns the first. The caller has extended the table.
    pub(super) fn append(&mut self, pages: u32, state: State) -> u32 {
        let start = self.end;
        self.end += pages;
        if state == State::Live {
            self.tag(start, pages, state);
        } else {
            self.insert(start, pages, state);
        }
        start
    }

    /// Allocates `pages` contiguous pages from the free extents in `state`.
    pub(super) fn take(&mut self, state: State, pages: u32, alignment: Alignment) -> Option<u32> {
        // An extent of this length has a fitting run at any start.
        let sure = pages.checked_add(alignment.modulus - 1)?;
        let fits = |start: u32, length: u32| {
            let at = alignment.first_from(start)?;
            (u64::from(at) + u64::from(pages) <= u64::from(start) + u64::from(length)).then_some(at)
        };
        let mut found = None;
        let mut candidate = self.bins[bank(state)][class(pages)];
        for _ in 0..MAX_CANDIDATES {
            if candidate == NO_PAGE {
                break;
            }
            let record = self.table.get(candidate);
            if let Some(at) = fits(candidate, record.pages) {
                found = Some((candidate, record.pages, at));
                break;
            }
            candidate = record.next;
        }
        let (start, length, at) = found.or_else(|| {
            let start = self.first_filled(state, class(sure) + 1)?;
            let length = self.table.get(start).pages;
            fits(start, length).map(|at| (start, length, at))
        })?;
        self.remove(start, length, state);
        if at > start {
            self.insert(start, at - start, state);
        }
        let rest = start + length - (at + pages);
        if rest > 0 {
            self.insert(at + pages, rest, state);
        }
        self.tag(at, pages, State::Live);
        Some(at)
    }

    /// Extends the live extent at `start` by `extra` pages, if a free one in `state` follows it.
    pub(super) fn grow(&mut self, start: u32, extra: u32, state: State) -> bool {
        let Some(pages) = self.live(start) else {
            return false;
        };
        let next = start + pages;
        if next >= self.end {
            return false;
        }
        let record = self.table.get(next);
        if record.state() != state || record.pages < extra {
            return false;
        }
        self.remove(next, record.pages, state);
        if record.pages > extra {
            self.insert(next + extra, record.pages - extra, state);
        }
        self.tag(start, pages + extra, State::Live);
        true
    }

    /// Merges two live extents: `pages` from `start` on, and the `extra` behind them.
    pub(super) fn join(&mut self, start: u32, pages: u32, extra: u32) {
        self.tag(start, pages + extra, State::Live);
    }

    /// Splits the live extent at `start` after `keep` pages; returns the start of the second part.
    pub(super) fn split(&mut self, start: u32, pages: u32, keep: u32) -> u32 {
        self.tag(start, keep, State::Live);
        self.tag(start + keep, pages - keep, State::Live);
        start + keep
    }

    /// Frees the live extent at `start` into `state`, merged with free neighbours in that state.
    /// `Dirty` also merges `Clean` neighbours, so that former huge pages become one extent again.
    pub(super) fn release(&mut self, start: u32, pages: u32, state: State) -> FreedExtent {
        let mut freed = FreedExtent {
            start,
            pages,
            absorbed: 0,
        };
        // A loop, because a dirty neighbour may follow a clean one.
        while let Some(page) = freed.start.checked_sub(1) {
            let before = self.table.get(page);
            if !merges(state, before.state()) {
                break;
            }
            freed.start -= before.pages;
            let start = freed.start;
            self.absorb(&mut freed, start, before, state);
        }
        while freed.start + freed.pages < self.end {
            let next = freed.start + freed.pages;
            let after = self.table.get(next);
            if !merges(state, after.state()) {
                break;
            }
            self.absorb(&mut freed, next, after, state);
        }
        self.insert(freed.start, freed.pages, state);
        freed
    }

    /// Frees the memory of the records of `pages` from `start` on, which were unmapped and are part
    /// of `freed`. All addresses are used once before any is reused, so the records would pile up.
    pub(super) fn forget(&mut self, freed: FreedExtent, start: u32, pages: u32) {
        let within = freed.start + 1..freed.start + freed.pages - 1;
        // The end records of the merged neighbours are invalid too.
        let first = start.saturating_sub(1).max(within.start);
        let last = (start + pages + 1).min(within.end);
        if first < last {
            self.table.forget(first..last, within);
        }
    }

    fn absorb(&mut self, freed: &mut FreedExtent, start: u32, neighbour: PageRecord, state: State) {
        self.remove(start, neighbour.pages, neighbour.state());
        freed.pages += neighbour.pages;
        if neighbour.state() != state {
            freed.absorbed += neighbour.pages;
        }
    }

    /// Allocates the whole free extent that ends before `page`, if it is in `state`.
    pub(super) fn claim_before(&mut self, page: u32, state: State) -> Option<(u32, u32)> {
        let before = self.table.get(page.checked_sub(1)?);
        (before.state() == state).then(|| {
            self.claim(page - before.pages, before.pages, state);
            (page - before.pages, before.pages)
        })
    }

    /// Allocates the whole free extent at `start`.
    pub(super) fn claim(&mut self, start: u32, pages: u32, state: State) {
        self.remove(start, pages, state);
        self.tag(start, pages, State::Live);
    }

    /// Allocates one of the largest free extents in `state`.
    pub(super) fn take_largest(&mut self, state: State) -> Option<(u32, u32)> {
        let bank = bank(state);
        let word = self.filled[bank].iter().rposition(|word| *word != 0)?;
        let bit = 63 - self.filled[bank][word].leading_zeros() as usize;
        let start = self.bins[bank][word * 64 + bit];
        let pages = self.table.get(start).pages;
        self.claim(start, pages, state);
        Some((start, pages))
    }

    fn first_filled(&self, state: State, from: usize) -> Option<u32> {
        let bank = bank(state);
        let mut word = from / 64;
        let mut bits = self.filled[bank].get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.filled[bank].get(word)?;
        }
        Some(self.bins[bank][word * 64 + bits.trailing_zeros() as usize])
    }

    fn tag(&mut self, start: u32, pages: u32, state: State) {
        let record = PageRecord {
            pages,
            tag: state as u32,
            next: NO_PAGE,
            prev: NO_PAGE,
        };
        self.table.set(start, record);
        self.table.set(start + pages - 1, record);
    }

    fn insert(&mut self, start: u32, pages: u32, state: State) {
        let (bank, class) = (bank(state), class(pages));
        let head = core::mem::replace(&mut self.bins[bank][class], start);
        self.filled[bank][class / 64] |= 1 << (class % 64);
        self.tag(start, pages, state);
        self.update(start, |record| record.next = head);
        if head != NO_PAGE {
            self.update(head, |record| record.prev = start);
        }
    }

    fn remove(&mut self, start: u32, pages: u32, state: State) {
        let (bank, class) = (bank(state), class(pages));
        let PageRecord { next, prev, .. } = self.table.get(start);
        if next != NO_PAGE {
            self.update(next, |record| record.prev = prev);
        }
        if prev != NO_PAGE {
            self.update(prev, |record| record.next = next);
        } else {
            self.bins[bank][class] = next;
            if next == NO_PAGE {
                self.filled[bank][class / 64] &= !(1 << (class % 64));
            }
        }
    }

    fn update(&mut self, page: u32, change: impl FnOnce(&mut PageRecord)) {
        let mut record = self.table.get(page);
        change(&mut record);
        self.table.set(page, record);
    }
}

/// Reports whether a neighbour in `other` merges with an extent that is freed into `state`.
fn merges(state: State, other: State) -> bool {
    other == state || (state == State::Dirty && other == State::Clean)
}

fn bank(state: State) -> usize {
    debug_assert!(state != State::Live, "live extents are in no bin");
    (state as usize).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ANY: Alignment = Alignment {
        modulus: 1,
        remainder: 0,
    };

    #[derive(Default, Debug)]
    struct Pages(Vec<PageRecord>);

    /// The program can write to the table: an invalid state never makes memory free.
    #[test]
    fn a_tag_that_is_no_state_means_live() {
        let states = [State::Live, State::Dirty, State::Clean, State::Unmapped];
        for tag in (0..64).chain([u32::MAX, 1 << 31]) {
            let record = PageRecord {
                tag,
                ..PageRecord::default()
            };
            let expected = states.get(tag as usize).copied().unwrap_or(State::Live);
            assert_eq!(record.state(), expected, "{tag}");
        }
    }

    impl Records for Pages {
        fn get(&self, page: u32) -> PageRecord {
            self.0[page as usize]
        }
        fn set(&mut self, page: u32, record: PageRecord) {
            if self.0.len() <= page as usize {
                self.0.resize(page as usize + 1, PageRecord::default());
            }
            self.0[page as usize] = record;
        }
        fn forget(&mut self, pages: Range<u32>, within: Range<u32>) {
            assert!(within.start <= pages.start && pages.end <= within.end);
            // Poisons the records, so that a read of one fails.
            let nonsense = PageRecord {
                pages: NO_PAGE,
                tag: State::Dirty as u32,
                next: 1,
                prev: 1,
            };
            self.0[within.start as usize..within.end as usize].fill(nonsense);
        }
    }

    /// Checks the tiling against the bins.
    fn check(extents: &Extents<Pages>) -> Vec<(u32, u32, State)> {
        let mut tiles = Vec::new();
        let mut page = 0;
        while page < extents.end {
            let record = extents.table.get(page);
            assert!(
                record.pages > 0 && page + record.pages <= extents.end,
                "gap at {page}"
            );
            let last = extents.table.get(page + record.pages - 1);
            assert_eq!(
                (record.pages, record.state()),
                (last.pages, last.state()),
                "tags at {page}"
            );
            if let Some((_, _, before)) = tiles.last() {
                assert!(
                    *before == State::Live || *before != record.state(),
                    "unmerged at {page}"
                );
            }
            tiles.push((page, record.pages, record.state()));
            page += record.pages;
        }
        let mut binned = Vec::new();
        for state in [State::Dirty, State::Clean, State::Unmapped] {
            for bin in 0..BINS {
                let filled = extents.filled[bank(state)][bin / 64] >> (bin % 64) & 1 == 1;
                assert_eq!(
                    filled,
                    extents.bins[bank(state)][bin] != NO_PAGE,
                    "bitmap of bin {bin}"
                );
                let mut at = extents.bins[bank(state)][bin];
                while at != NO_PAGE {
                    let record = extents.table.get(at);
                    assert_eq!((class(record.pages), record.state()), (bin, state));
                    binned.push((at, record.pages, state));
                    at = record.next;
                }
            }
        }
        binned.sort_by_key(|tile| tile.0);
        let free: Vec<_> = tiles
            .iter()
            .filter(|tile| tile.2 != State::Live)
            .copied()
            .collect();
        assert_eq!(free, binned);
        tiles
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take { free: State, pages: u32, align: u32 },
        Append(u32),
        Release { which: usize, free: State },
        Grow { which: usize, extra: u32 },
        Shrink { which: usize, keep: u32 },
        Largest,
    }

    fn free() -> impl Strategy<Value = State> {
        prop_oneof![
            Just(State::Dirty),
            Just(State::Clean),
            Just(State::Unmapped)
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (free(), 1u32..700, 0u32..10).prop_map(|(free, pages, align)| Step::Take {
                free,
                pages,
                align
            }),
            (1u32..700).prop_map(Step::Append),
            (any::<usize>(), free()).prop_map(|(which, free)| Step::Release { which, free }),
            (any::<usize>(), 1u32..200).prop_map(|(which, extra)| Step::Grow { which, extra }),
            (any::<usize>(), 1u32..200).prop_map(|(which, keep)| Step::Shrink { which, keep }),
            Just(Step::Largest),
        ]
    }

    proptest! {
        #[test]
        fn extents_tile_and_live_ones_never_overlap(
            steps in proptest::collection::vec(step(), 1..200)
        ) {
            let mut extents = Extents::new(Pages::default());
            let mut live: Vec<(u32, u32)> = Vec::new();
            for step in steps {
                match step {
                    Step::Take { free, pages, align } => {
                        let modulus = 1 << align;
                        let alignment = Alignment { modulus, remainder: modulus / 2 };
                        if let Some(start) = extents.take(free, pages, alignment) {
                            prop_assert_eq!(start % modulus, modulus / 2);
                            live.push((start, pages));
                        }
                    }
                    Step::Append(pages) => live.push((extents.append(pages, State::Live), pages)),
                    Step::Release { which, free } if !live.is_empty() => {
                        let (start, pages) = live.swap_remove(which % live.len());
                        let freed = extents.release(start, pages, free);
                        if free == State::Unmapped {
                            extents.forget(freed, start, pages);
                        }
                    }
                    Step::Grow { which, extra } if !live.is_empty() => {
                        let which = which % live.len();
                        let (start, pages) = live[which];
                        if start + pages == extents.end() {
                            extents.append(extra, State::Live);
                            extents.join(start, pages, extra);
                            live[which].1 += extra;
                        } else if extents.grow(start, extra, State::Dirty)
                            || extents.grow(start, extra, State::Unmapped)
                        {
                            live[which].1 += extra;
                        }
                    }
                    Step::Shrink { which, keep } if !live.is_empty() => {
                        let which = which % live.len();
                        let (start, pages) = live[which];
                        if keep < pages {
                            let tail = extents.split(start, pages, keep);
                            extents.release(tail, pages - keep, State::Dirty);
                            live[which].1 = keep;
                        }
                    }
                    Step::Largest => live.extend(extents.take_largest(State::Dirty)),
                    _ => {}
                }
                let tiles = check(&extents);
                let mut expected = live.clone();
                expected.sort_unstable();
                let found: Vec<_> = tiles.iter().filter(|tile| tile.2 == State::Live)
                    .map(|tile| (tile.0, tile.1)).collect();
                prop_assert_eq!(found, expected);
                for (start, pages) in &live {
                    prop_assert_eq!(extents.live(*start), Some(*pages));
                }
            }
        }
    }

    #[test]
    fn free_extents_of_the_right_size_are_found() {
        let mut extents = Extents::new(Pages::default());
        let starts: Vec<u32> = (0..20).map(|_| extents.append(100, State::Live)).collect();
        for start in starts.iter().step_by(2) {
            extents.release(*start, 100, State::Dirty);
        }
        for _ in 0..10 {
            assert!(extents.take(State::Dirty, 100, ANY).is_some());
        }
        assert!(extents.take(State::Dirty, 1, ANY).is_none());
        assert!(extents.live(50).is_none() && extents.live(u32::MAX).is_none());
    }
}
