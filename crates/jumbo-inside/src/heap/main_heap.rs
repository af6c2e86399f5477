//! Large blocks that are left to glibc's main heap: [`part`].
//!
//! glibc maps a block of [`LARGE_BLOCK_BYTES`] bytes or more by itself at first. Once the program has freed one,
//! glibc serves blocks of up to that size from its main heap, which takes the best fit and keeps what
//! is free between live blocks. A program whose blocks have many sizes reuses resident memory so. The
//! holes of another layout fit other blocks: memory would go back and fault in anew, or stay beside
//! what plain has. So these blocks are glibc's, and the window serves those that glibc would map.
//! `density` advises the heap as it grows.
//!
//! glibc gives the end of its heap back, and a program that works in rounds faults it in anew each
//! round. Where that is a half of all it asks for, the heap is not to grow for large blocks any more: the
//! window serves those that find no free memory there, and what is freed stays by demand.
//!
//! Other threads have arenas of 64 MiB, whose ends glibc gives back too: the window serves them.
//!
//! Rules of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), with their defaults.

use core::sync::atomic::{AtomicUsize, Ordering};

use super::{BASE_PAGE, LARGE_BLOCK_BYTES};
use crate::sync::thread_pointer;

/// DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64 bits: a block of that size or more is always mapped.
const MAX_BLOCK_BYTES: usize = 32 << 20;
/// The main heap is large with so much.
const MIN_HEAP_BYTES: usize = 16 << 20;
/// The heap regained so much after it was given back, before that counts.
const MIN_REGAINED_BYTES: usize = 64 << 20;
/// After so many bytes of blocks, those before count half.
const DECAY_BYTES: usize = 1 << 30;

/// Sizes that found no free memory are tried once in so many times, until the heap has served a block.
const TRY_INTERVAL: usize = 8;
/// The header that glibc adds to a block, before it rounds up to 16 bytes.
const HEADER_BYTES: usize = 8;

/// The rule that says which blocks are in the main heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Rule {
    /// The window has all blocks.
    Nothing,
    /// glibc's defaults.
    Defaults,
    /// As before, but the heap is not to grow: the program works in rounds.
    Rounds,
    /// The program: it has set a threshold by mallopt(3).
    Program,
}

static RULE: AtomicUsize = AtomicUsize::new(Rule::Nothing as usize);
/// The thread whose large blocks may be glibc's; 0: none.
static FIRST_THREAD: AtomicUsize = AtomicUsize::new(0);
/// The largest block below [`MAX_BLOCK_BYTES`] that the window freed; less than [`LARGE_BLOCK_BYTES`]: none.
static LARGEST_FREED: AtomicUsize = AtomicUsize::new(0);

/// Changed by the first thread alone: the end of the heap, at first and now; 0: no block was left to glibc.
static HEAP_START: AtomicUsize = AtomicUsize::new(0);
static HEAP_END: AtomicUsize = AtomicUsize::new(0);
static SERVED: AtomicUsize = AtomicUsize::new(0);
static RETURNED: AtomicUsize = AtomicUsize::new(0);
static REGAINED: AtomicUsize = AtomicUsize::new(0);
/// The least size that found no free memory, and the blocks of such sizes since.
static MIN_MISSED: AtomicUsize = AtomicUsize::new(usize::MAX);
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

fn is_rule(rule: Rule) -> bool {
    RULE.load(Ordering::Relaxed) == rule as usize
}

/// glibc's malloc is the program's, with its own defaults. In the first thread.
pub fn start() {
    let (nothing, defaults) = (Rule::Nothing as usize, Rule::Defaults as usize);
    // A constructor of the program's may have set thresholds before.
    let relaxed = Ordering::Relaxed;
    let _ = RULE.compare_exchange(nothing, defaults, relaxed, relaxed);
    FIRST_THREAD.store(thread_pointer(), Ordering::Relaxed);
}

/// The program sets thresholds of its own by mallopt(3).
pub fn is_tuned() {
    RULE.store(Rule::Program as usize, Ordering::Relaxed);
}

/// The part of the main heap that a block may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// None: the window serves it.
    None,
    /// Memory that is free there: glibc would map the block where none fits.
    Free,
    /// Any: the heap grows where no free memory fits.
    All,
}

/// The part of the main heap that the calling thread's block of `size` bytes may come from.
pub fn part(size: usize) -> Part {
    if FIRST_THREAD.load(Ordering::Relaxed) != thread_pointer() {
        return Part::None;
    }
    let with_header = size.saturating_add(HEADER_BYTES).saturating_add(15) & !15;
    if is_rule(Rule::Defaults) && with_header < current_threshold() {
        return Part::All;
    }
    let has_heap = HEAP_END.load(Ordering::Relaxed) != 0 || is_rule(Rule::Program);
    match has_heap && should_try(size) {
        true => Part::Free,
        false => Part::None,
    }
}

fn should_try(size: usize) -> bool {
    if size < MIN_MISSED.load(Ordering::Relaxed) {
        return true;
    }
    let skipped = SKIPPED.load(Ordering::Relaxed).wrapping_add(1);
    SKIPPED.store(skipped, Ordering::Relaxed);
    skipped.is_multiple_of(TRY_INTERVAL)
}

/// A block of `size` bytes found no free memory of the heap, which ends at `end`; or some.
pub fn tried(size: usize, has_found: bool, end: usize) {
    let missed = match has_found {
        true => usize::MAX,
        false => MIN_MISSED.load(Ordering::Relaxed).min(size),
    };
    MIN_MISSED.store(missed, Ordering::Relaxed);
    if has_found || HEAP_END.load(Ordering::Relaxed) != 0 {
        reached(end);
    }
}

/// The size from which on glibc is to map a block by now; `None`: the program says it.
pub fn threshold() -> Option<usize> {
    match is_rule(Rule::Rounds) {
        true => Some(LARGE_BLOCK_BYTES),
        false => is_rule(Rule::Defaults).then(current_threshold),
    }
}

fn current_threshold() -> usize {
    LARGEST_FREED.load(Ordering::Relaxed) + BASE_PAGE
}

/// Whether the calling thread has its free memory in the main heap, and that is large.
pub(super) fn is_used() -> bool {
    let began = HEAP_START.load(Ordering::Relaxed);
    let grown = HEAP_END.load(Ordering::Relaxed).saturating_sub(began);
    began != 0
        && grown >= MIN_HEAP_BYTES
        && FIRST_THREAD.load(Ordering::Relaxed) == thread_pointer()
}

/// The largest block that glibc would keep at the end of its heap, in bytes.
pub(super) fn largest() -> usize {
    LARGEST_FREED.load(Ordering::Relaxed)
}

/// A block of `bytes`, whole pages, was freed that glibc would have mapped.
pub(super) fn freed(bytes: usize) {
    if bytes < MAX_BLOCK_BYTES {
        LARGEST_FREED.fetch_max(bytes, Ordering::Relaxed);
    }
}

/// The heap ends at `end`. Gives where it ended before, 0 where that is not known.
fn reached(end: usize) -> usize {
    let before = HEAP_END.swap(end, Ordering::Relaxed);
    if before == 0 {
        HEAP_START.store(end, Ordering::Relaxed);
    }
    before
}

/// glibc has served a block of `size` bytes that was left to it, and its heap ends at `end` now.
pub fn took(size: usize, end: usize) {
    let add = |count: &AtomicUsize, bytes: usize| {
        let sum = count.load(Ordering::Relaxed).saturating_add(bytes);
        count.store(sum, Ordering::Relaxed);
        sum
    };
    MIN_MISSED.store(usize::MAX, Ordering::Relaxed);
    let before = reached(end);
    let served = add(&SERVED, size);
    let returned = add(&RETURNED, before.saturating_sub(end));
    let again = end.saturating_sub(before).min(returned);
    RETURNED.store(returned - again, Ordering::Relaxed);
    let regained = add(&REGAINED, if before == 0 { 0 } else { again });
    if regained > MIN_REGAINED_BYTES && regained > served / 2 {
        RULE.store(Rule::Rounds as usize, Ordering::Relaxed);
    }
    if served > DECAY_BYTES {
        SERVED.store(served / 2, Ordering::Relaxed);
        REGAINED.store(regained / 2, Ordering::Relaxed);
    }
}

const _: () = assert!(LARGE_BLOCK_BYTES < MAX_BLOCK_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// The state is the process's: one test.
    #[test]
    fn blocks_are_glibcs_from_the_first_free_on_and_the_windows_again_in_rounds() {
        assert_eq!(part(MIB), Part::None);
        start();
        assert_eq!(part(MIB), Part::None, "none was freed");
        freed(MIB);
        freed(MAX_BLOCK_BYTES);
        assert_eq!(part(MIB), Part::All);
        assert_eq!(part(MIB + BASE_PAGE), Part::None, "no heap is there");
        assert_eq!(threshold(), Some(MIB + BASE_PAGE));
        assert_eq!(
            std::thread::spawn(|| part(MIB)).join().ok(),
            Some(Part::None)
        );
        // It grows by all that the program asks for, and is large then.
        for round in 0..100 {
            took(MIB, (100 + round) * MIB);
            assert_eq!(is_used(), round * MIB >= MIN_HEAP_BYTES);
        }
        assert_eq!(part(2 * MIB), Part::Free);
        tried(2 * MIB, false, 199 * MIB);
        assert_eq!((part(MIB), part(2 * MIB)), (Part::All, Part::None));
        let parts = (0..TRY_INTERVAL).map(|_| part(2 * MIB));
        assert_eq!(parts.filter(|part| *part == Part::Free).count(), 1);
        // The end goes back each round, and comes again.
        for round in 0..10 {
            took(MIB, 100 * MIB);
            assert_eq!(
                part(MIB),
                if round <= 2 { Part::All } else { Part::Free },
                "{round}"
            );
            for block in 1..50 {
                took(MIB, (100 + block) * MIB);
            }
        }
        assert_eq!(threshold(), Some(LARGE_BLOCK_BYTES));
        is_tuned();
        assert_eq!((part(MIB), threshold()), (Part::Free, None));
    }
}
