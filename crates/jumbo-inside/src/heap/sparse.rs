//! Memory that may be sparse begins on base pages: [`commit`].
//!
//! A program that reserves addresses, and makes memory of parts of them later (MAP_FIXED over PROT_NONE), often touches them
//! here and there: a database lays out the headers of a buffer pool, 2 MiB apart or more, long before it fills it. On huge pages each of
//! these touches is 2 MiB. So such memory begins without advice, and the thread of [`crate::watch`] looks at what of it is resident:
//!
//! - a block (what a PMD maps) of which all is resident, but for what `--max-waste` allows, is collapsed;
//! - once all blocks that were touched are so, and there are `ENOUGH`, the range is advised: from then on it is huge
//!   from its first touch, and so is what is committed next to it.
//!
//! What a forked child still shares is not collapsed: that would copy it. Where no thread can look, or the kernel does not tell
//! what is resident (PAGEMAP_SCAN, Linux 6.7), such memory is advised at once, as all other is.
//!
//! Nothing depends on a range being what it was: collapsing and advising change no byte, whatever is mapped there by now.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;

use super::{BASE_PAGE, LOCKED, PMD, maps, memory};
use crate::events::Mechanism;
use crate::headroom::{Enough, headroom};
use crate::sandbox;
use crate::sys::{Pagemap, Pages as Of};
use crate::watch::{self, Job, LONGEST, SHORTEST, Stop, Without, used};

/// So many blocks are looked at before it is said what they are; and a smaller mapping is not looked at.
const ENOUGH: usize = 8;
/// The most pages that a range has room for, and the first page that it has none for.
const MOST: usize = 1 << 28;
const END: usize = 1 << 35;
/// So many blocks are collapsed by one call, at most.
const BATCH: usize = 8;
/// Blocks are passed over so many at a time, where none is touched.
const STRIDE: usize = 64;
/// How much CPU time one look takes at most, and which part of a CPU the thread may use.
const LOOK: Duration = Duration::from_millis(50);
const SHARE: u32 = 20;
/// Memory that is left when blocks are collapsed: a huge page is taken before the base pages go back.
const ROOM: usize = 64 << 20;

/// Ranges, each one word: the number of its first base page in the upper 35 bits, how many there are in 28, and the last bit
/// where it is dense and was advised. 0: none.
static RANGES: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];
/// Whether there were any.
static SOME: AtomicBool = AtomicBool::new(false);
/// How much of a block may be missing, in bytes.
static MISSING: AtomicUsize = AtomicUsize::new(0);
/// How long the thread waits where it finds nothing new, in milliseconds; and how much was resident the last time.
static IDLE: AtomicU64 = AtomicU64::new(0);
static FOUND: AtomicUsize = AtomicUsize::new(0);
/// The address at which the last look was broken off, 0 where it was not; and what it had seen of that range before: blocks touched,
/// bytes resident.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static BEFORE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

static JOB: Job = Job::new(2, look, without);

/// A range of memory, in base pages: all of what the program made, so that advice leaves it one mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pages {
    range: Range<usize>,
    is_dense: bool,
}

impl Pages {
    fn of(word: u64) -> Option<Self> {
        let at = |bits: u64| usize::try_from(bits).unwrap_or(0);
        let (first, count) = (at(word >> 29), at(word >> 1) % MOST);
        (count != 0).then_some(Self {
            range: first..first + count,
            is_dense: word & 1 != 0,
        })
    }

    /// 0 where there are none of them; `None` where there are too many.
    fn word(&self) -> Option<u64> {
        if self.range.is_empty() {
            return Some(0);
        }
        let fits = self.range.len() < MOST && self.range.end <= END;
        let (first, count) = (self.range.start as u64, self.range.len() as u64);
        fits.then_some(first << 29 | count << 1 | u64::from(self.is_dense))
    }

    /// With `more`, where these lie side by side.
    fn joined(&self, more: &Range<usize>) -> Option<Self> {
        (more.start <= self.range.end && self.range.start <= more.end).then(|| Self {
            range: self.range.start.min(more.start)..self.range.end.max(more.end),
            is_dense: self.is_dense,
        })
    }

    /// What is left of it without those of `gone`: the larger end.
    fn without(&self, gone: &Range<usize>) -> Self {
        let before = self.range.start..gone.start.clamp(self.range.start, self.range.end);
        let after = gone.end.clamp(self.range.start, self.range.end)..self.range.end;
        Self {
            range: if before.len() >= after.len() {
                before
            } else {
                after
            },
            is_dense: self.is_dense,
        }
    }

    /// The addresses of the whole blocks in it.
    fn blocks(&self, pmd: usize) -> Range<usize> {
        let start = (self.range.start * BASE_PAGE).next_multiple_of(pmd);
        let end = (self.range.end * BASE_PAGE) & !(pmd - 1);
        start..end.max(start)
    }
}

pub(super) fn place(pmd: usize, max_waste: usize) {
    let missing = (pmd / 100).saturating_mul(max_waste).min(pmd);
    MISSING.store(missing, Ordering::Relaxed);
}

/// The program has made memory of a part of what it had reserved. True where it is left without advice, and looked at;
/// else it is to be advised as any other.
pub fn commit(address: usize, length: usize) -> bool {
    let pmd = PMD.load(Ordering::Relaxed);
    let is_locked = LOCKED.load(Ordering::Relaxed);
    if pmd == 0 || is_locked || watch::is_anothers() || sandbox::is_entered() {
        return false;
    }
    let new = Pages {
        range: address / BASE_PAGE..address.saturating_add(length).div_ceil(BASE_PAGE),
        is_dense: false,
    };
    for place in &RANGES {
        let join = |word| Pages::of(word)?.joined(&new.range)?.word();
        let joined = place.fetch_update(Ordering::AcqRel, Ordering::Relaxed, join);
        if let Ok(before) = joined {
            let is_dense = before & 1 != 0;
            if !is_dense {
                begin();
            }
            return !is_dense;
        }
    }
    let word = new.word().filter(|_| new.blocks(pmd).len() >= ENOUGH * pmd);
    let is_added = word.is_some_and(|word| {
        RANGES.iter().any(|place| {
            let free = place.compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed);
            free.is_ok()
        })
    });
    if is_added {
        SOME.store(true, Ordering::Release);
        begin();
    }
    is_added
}

/// Has the thread look soon. Where there can be none, [`without`] has been called by the end of it.
fn begin() {
    IDLE.store(0, Ordering::Relaxed);
    watch::begin(&JOB, SHORTEST);
}

/// The program unmaps a range, maps something else there, or wants it on base pages.
#[inline(always)]
pub fn forget(address: usize, length: usize) {
    if SOME.load(Ordering::Relaxed) {
        cut(address, length);
    }
}

#[cold]
fn cut(address: usize, length: usize) {
    let gone = address / BASE_PAGE..address.saturating_add(length).div_ceil(BASE_PAGE);
    for place in &RANGES {
        let _ = place.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
            let pages = Pages::of(word)?;
            let left = pages.without(&gone);
            (left != pages).then(|| left.word()).flatten()
        });
    }
}

/// In the child of a fork: it shares all of it with its parent, and has no thread.
pub(super) fn forked() {
    RANGES
        .iter()
        .for_each(|place| place.store(0, Ordering::Relaxed));
}

/// No thread can look: all is advised, as it would have been at first.
fn without(_why: Without) {
    RANGES.iter().for_each(advise);
}

fn advise(place: &AtomicU64) {
    let word = place.load(Ordering::Acquire);
    let Some(pages) = Pages::of(word).filter(|pages| !pages.is_dense) else {
        return;
    };
    let range = &pages.range;
    maps::advise_mapping(range.start * BASE_PAGE, range.len() * BASE_PAGE, true);
    // Where it has changed meanwhile, it is looked at again.
    let _ = place.compare_exchange(word, word | 1, Ordering::AcqRel, Ordering::Relaxed);
}

/// What one look found of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Blocks of which something is resident.
    touched: usize,
    /// Bytes of them that are.
    resident: usize,
}

impl Seen {
    /// Whether what was touched was filled. The last one may be being filled.
    fn is_dense(self, pmd: usize, missing: usize) -> bool {
        let filled = self.resident.saturating_add(pmd);
        self.touched >= ENOUGH && filled >= self.touched.saturating_mul(pmd - missing)
    }
}

/// The thread's look at all ranges.
fn look(stop: &Stop) -> Option<Duration> {
    let began = used();
    let is_told = |map: &Pagemap| {
        let here = core::ptr::from_ref(&PMD).addr() & !(BASE_PAGE - 1);
        map.count(here..here + BASE_PAGE, Of::Resident).is_ok()
    };
    let Some(map) = Pagemap::open().ok().filter(is_told) else {
        RANGES.iter().for_each(advise);
        return None;
    };
    let (pmd, missing) = (PMD.load(Ordering::Relaxed), MISSING.load(Ordering::Relaxed));
    let ranges = || {
        RANGES.iter().filter_map(|place| {
            let pages = Pages::of(place.load(Ordering::Acquire));
            let pages = pages.filter(|pages| !pages.is_dense)?;
            Some((place, pages.blocks(pmd)))
        })
    };
    // From where the last look was broken off, if that is looked at still.
    let next = NEXT.swap(0, Ordering::Relaxed);
    let mut resumed = (ranges().any(|(_, blocks)| blocks.contains(&next))).then_some(next);
    let (mut found, mut is_any) = (0usize, false);
    for (place, blocks) in ranges() {
        is_any = true;
        if resumed.is_some_and(|next| !blocks.contains(&next)) {
            continue;
        }
        let (from, before) = match resumed.take() {
            Some(next) => (
                next,
                BEFORE.each_ref().map(|seen| seen.load(Ordering::Relaxed)),
            ),
            None => (blocks.start, [0; 2]),
        };
        let (rest, is_over) = visit(from..blocks.end, &map, began, stop);
        let seen = Seen {
            touched: before[0].saturating_add(rest.touched),
            resident: before[1].saturating_add(rest.resident),
        };
        found = found.saturating_add(seen.resident);
        if !is_over {
            for (place, seen) in BEFORE.iter().zip([seen.touched, seen.resident]) {
                place.store(seen, Ordering::Relaxed);
            }
            break;
        }
        if seen.is_dense(pmd, missing) {
            advise(place);
        }
    }
    let rest = used().saturating_sub(began).saturating_mul(SHARE);
    let is_new = FOUND.swap(found, Ordering::Relaxed) != found;
    is_any.then(|| rest.max(idle(is_new)))
}

/// Ever longer while nothing is new, and sooner again where something is.
fn idle(is_new: bool) -> Duration {
    let before = Duration::from_millis(IDLE.load(Ordering::Relaxed));
    let next = if is_new { before / 2 } else { before * 2 };
    let next = next.clamp(SHORTEST, LONGEST);
    let millis = u64::try_from(next.as_millis()).unwrap_or(u64::MAX);
    IDLE.store(millis, Ordering::Relaxed);
    next
}

/// Looks at blocks, collapses those that are dense and not huge, and says whether it has come to the end.
fn visit(blocks: Range<usize>, map: &Pagemap, began: Duration, stop: &Stop) -> (Seen, bool) {
    let (pmd, missing) = (PMD.load(Ordering::Relaxed), MISSING.load(Ordering::Relaxed));
    let count = |range: &Range<usize>, of| map.count(range.clone(), of).unwrap_or(0);
    let has_room = headroom(Enough::for_touching(ROOM)).is_some_and(|room| room.least() >= ROOM);
    let mut at = blocks.start;
    let mut seen = Seen::default();
    let (mut may_collapse, mut run) = (has_room, at..at);
    while at < blocks.end {
        if stop.check_before_wait().is_err() || used().saturating_sub(began) > LOOK {
            // The blocks of the run are seen again, and counted twice: they are full, and few.
            NEXT.store(run.start.min(at), Ordering::Relaxed);
            return (seen, false);
        }
        let stride = at..blocks.end.min(at + STRIDE * pmd);
        let is_first = (at - blocks.start).is_multiple_of(STRIDE * pmd);
        if is_first && count(&stride, Of::Resident) == 0 {
            may_collapse &= collapse(&run);
            at = stride.end;
            run = at..at;
            continue;
        }
        let block = at..at + pmd;
        let resident = count(&block, Of::Resident);
        seen.touched += usize::from(resident > 0);
        seen.resident += resident;
        let is_full = |resident: usize| resident > 0 && resident + missing >= pmd;
        // What a child shares with this process would be copied.
        let is_wanted = may_collapse
            && is_full(resident)
            && count(&block, Of::Huge) < pmd
            && map.exclusive(block.clone(), BASE_PAGE).is_ok_and(is_full);
        at = block.end;
        if is_wanted {
            run.end = at;
        }
        if !is_wanted || run.len() == BATCH * pmd {
            may_collapse &= collapse(&run);
            run = at..at;
        }
    }
    collapse(&run);
    (seen, true)
}

/// False where no huge page is to be had now. Whatever is mapped there by now, no byte changes.
fn collapse(run: &Range<usize>) -> bool {
    run.is_empty() || memory::try_collapse(run.start, run.len()) != Err(Errno::NOMEM)
}

/// The events that concern memory which may be sparse.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        forget(address, length);
    }

    fn advising(address: usize, length: usize, advice: i32) {
        if advice == libc::MADV_NOHUGEPAGE {
            forget(address, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pages(range: Range<usize>, is_dense: bool) -> Pages {
        Pages { range, is_dense }
    }

    proptest! {
        #[test]
        fn a_word_is_read_as_it_was_written(start in 0usize..END - MOST, length in 1usize..MOST, is_dense: bool) {
            let some = pages(start..start + length, is_dense);
            prop_assert_eq!(Pages::of(some.word().unwrap()), Some(some));
        }

        #[test]
        fn what_is_left_has_nothing_of_what_is_gone(start in 0usize..50, length in 1usize..50, from in 0usize..100, gone in 0usize..50) {
            let all = pages(start..start + length, false);
            let gone = from..from + gone;
            let left = all.without(&gone).range;
            prop_assert!(left.is_empty() || all.range.start <= left.start && left.end <= all.range.end);
            prop_assert!(gone.is_empty() || left.clone().all(|page| !gone.contains(&page)));
            let rest = all.range.clone().filter(|page| !gone.contains(page)).count();
            prop_assert!(left.len() * 2 >= rest, "the larger end of {all:?} without {gone:?}: {left:?}");
        }
    }

    #[test]
    fn what_does_not_fit_in_a_word_is_left_alone() {
        assert_eq!(pages(7..7 + MOST, false).word(), None);
        assert_eq!(pages(END - 1..END + 1, false).word(), None);
        assert_eq!(pages(7..7, true).word(), Some(0));
    }

    #[test]
    fn neighbours_are_joined_and_nothing_between_them_is() {
        let first = pages(10..20, true);
        assert_eq!(first.joined(&(20..25)), Some(pages(10..25, true)));
        assert_eq!(first.joined(&(5..10)), Some(pages(5..20, true)));
        assert_eq!(first.joined(&(12..14)), Some(first.clone()));
        assert_eq!(first.joined(&(21..25)), None);
        assert_eq!(first.joined(&(1..9)), None);
    }

    #[test]
    fn only_whole_blocks_are_looked_at() {
        let pmd = 2 << 20;
        assert_eq!(pages(511..1537, false).blocks(pmd), pmd..3 * pmd);
        assert!(pages(513..1023, false).blocks(pmd).is_empty());
    }

    #[test]
    fn headers_far_apart_are_sparse_and_a_heap_that_fills_is_dense() {
        let (pmd, missing) = (2 << 20, 100 << 10);
        let dense = |touched, resident| Seen { touched, resident }.is_dense(pmd, missing);
        assert!(dense(8, 8 * pmd), "all full");
        assert!(dense(20, 19 * pmd + 4096), "the last is being filled");
        assert!(!dense(7, 7 * pmd), "too few");
        assert!(!dense(64, 64 * 36 * 4096), "headers");
        assert!(!dense(20, 17 * pmd), "three of them empty");
    }
}
