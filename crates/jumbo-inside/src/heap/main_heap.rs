//! Selection of the large blocks that glibc's main heap serves: [`part`].
//!
//! At first glibc maps a block of [`LARGE_BLOCK_BYTES`] or more separately. Once the program has
//! freed one, glibc serves blocks of up to that size from its main heap, by best fit, and keeps
//! free memory between live blocks. So a program whose blocks have many sizes reuses resident
//! memory. With another layout, holes fit other blocks: memory would return to the kernel and fault
//! in again, or add to the peak. So these blocks are glibc's, and the window serves those that
//! glibc would map. `density` advises the heap as it grows.
//!
//! glibc trims the end of its heap, which a program that works in rounds faults in again. If that
//! is half of the requested memory, the heap stops growing for large blocks. The window serves
//! those that find no free memory there, and retains their memory by demand.
//!
//! Other threads have arenas of 64 MiB, which glibc trims too: the window serves their blocks.
//!
//! Rules of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), with their defaults.

use core::sync::atomic::{AtomicUsize, Ordering};

use super::{BASE_PAGE, LARGE_BLOCK_BYTES};
use crate::sync::thread_pointer;

/// glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits: glibc always maps larger blocks.
const MAX_BLOCK_BYTES: usize = 32 << 20;
/// Size from which the main heap counts as large.
const MIN_HEAP_BYTES: usize = 16 << 20;
/// Growth after trims from which the program may be one that works in rounds.
const MIN_REGAINED_BYTES: usize = 64 << 20;
/// Bytes of served blocks after which the sums are halved.
const DECAY_BYTES: usize = 1 << 30;

/// Interval, in blocks, at which sizes that found no free memory are tried again.
const TRY_INTERVAL: usize = 8;
/// Header that glibc adds to a block, before rounding up to 16 bytes.
const HEADER_BYTES: usize = 8;

/// Rule that selects blocks for the main heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Rule {
    /// The window has all blocks.
    Nothing,
    /// glibc's defaults.
    Defaults,
    /// glibc's defaults, but the heap does not grow: the program works in rounds.
    Rounds,
    /// The program's own threshold, set by mallopt(3).
    Program,
}

static RULE: AtomicUsize = AtomicUsize::new(Rule::Nothing as usize);
/// Thread whose large blocks may be glibc's; 0: none.
static FIRST_THREAD: AtomicUsize = AtomicUsize::new(0);
/// Largest block below [`MAX_BLOCK_BYTES`] that was freed to the window; 0: none.
static LARGEST_FREED: AtomicUsize = AtomicUsize::new(0);

/// Start and present end of the heap, written by the first thread only; 0: glibc served no block.
static HEAP_START: AtomicUsize = AtomicUsize::new(0);
static HEAP_END: AtomicUsize = AtomicUsize::new(0);
static SERVED: AtomicUsize = AtomicUsize::new(0);
static RETURNED: AtomicUsize = AtomicUsize::new(0);
static REGAINED: AtomicUsize = AtomicUsize::new(0);
/// Smallest size that found no free memory, and the number of such blocks since.
static MIN_MISSED: AtomicUsize = AtomicUsize::new(usize::MAX);
static SKIPPED: AtomicUsize = AtomicUsize::new(0);

fn is_rule(rule: Rule) -> bool {
    RULE.load(Ordering::Relaxed) == rule as usize
}

/// Starts the selection: malloc is glibc's, with its defaults. Called in the first thread.
pub fn start() {
    let (nothing, defaults) = (Rule::Nothing as usize, Rule::Defaults as usize);
    // A constructor of the program may have set thresholds before.
    let relaxed = Ordering::Relaxed;
    let _ = RULE.compare_exchange(nothing, defaults, relaxed, relaxed);
    FIRST_THREAD.store(thread_pointer(), Ordering::Relaxed);
}

/// Notes that the program sets its own thresholds by mallopt(3).
pub fn set_tuned() {
    RULE.store(Rule::Program as usize, Ordering::Relaxed);
}

/// Part of the main heap that may serve a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Nothing: the window serves the block.
    None,
    /// Free memory only: glibc would map a block that does not fit.
    Free,
    /// The whole heap, which grows if no free memory fits.
    All,
}

/// Returns the part of the main heap that may serve `size` bytes for the calling thread.
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

/// Records whether a block of `size` bytes found free memory in the heap, which ends at `end`.
pub fn record_attempt(size: usize, has_found: bool, end: usize) {
    let missed = match has_found {
        true => usize::MAX,
        false => MIN_MISSED.load(Ordering::Relaxed).min(size),
    };
    MIN_MISSED.store(missed, Ordering::Relaxed);
    if has_found || HEAP_END.load(Ordering::Relaxed) != 0 {
        set_end(end);
    }
}

/// Returns the size from which glibc should map a block now; `None`: the program decides.
pub fn threshold() -> Option<usize> {
    match is_rule(Rule::Rounds) {
        true => Some(LARGE_BLOCK_BYTES),
        false => is_rule(Rule::Defaults).then(current_threshold),
    }
}

fn current_threshold() -> usize {
    LARGEST_FREED.load(Ordering::Relaxed) + BASE_PAGE
}

/// Reports whether the calling thread uses the main heap, and that is large.
pub(super) fn is_used() -> bool {
    let began = HEAP_START.load(Ordering::Relaxed);
    let grown = HEAP_END.load(Ordering::Relaxed).saturating_sub(began);
    began != 0
        && grown >= MIN_HEAP_BYTES
        && FIRST_THREAD.load(Ordering::Relaxed) == thread_pointer()
}

/// Returns the largest block that glibc would keep at the end of its heap, in bytes.
pub(super) fn largest() -> usize {
    LARGEST_FREED.load(Ordering::Relaxed)
}

/// Records a freed block of `bytes`, whole pages, that glibc would have mapped.
pub(super) fn freed(bytes: usize) {
    if bytes < MAX_BLOCK_BYTES {
        LARGEST_FREED.fetch_max(bytes, Ordering::Relaxed);
    }
}

/// Records the end of the heap, and returns the previous one; 0 if unknown.
fn set_end(end: usize) -> usize {
    let before = HEAP_END.swap(end, Ordering::Relaxed);
    if before == 0 {
        HEAP_START.store(end, Ordering::Relaxed);
    }
    before
}

/// Records that glibc served a block of `size` bytes, and the new end of its heap. Returns whether
/// the heap has become large: the window keeps less beside it ([`super::give_back`]).
pub fn record_block(size: usize, end: usize) -> bool {
    let add = |count: &AtomicUsize, bytes: usize| {
        let sum = count.load(Ordering::Relaxed).saturating_add(bytes);
        count.store(sum, Ordering::Relaxed);
        sum
    };
    MIN_MISSED.store(usize::MAX, Ordering::Relaxed);
    let was_used = is_used();
    let before = set_end(end);
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
    !was_used && is_used()
}

const _: () = assert!(LARGE_BLOCK_BYTES < MAX_BLOCK_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// The state is global: one test.
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
        // The heap grows by each block, until it is large.
        for round in 0..100 {
            let became_large = record_block(MIB, (100 + round) * MIB);
            assert_eq!(is_used(), round * MIB >= MIN_HEAP_BYTES);
            assert_eq!(became_large, round * MIB == MIN_HEAP_BYTES);
        }
        assert_eq!(part(2 * MIB), Part::Free);
        record_attempt(2 * MIB, false, 199 * MIB);
        assert_eq!((part(MIB), part(2 * MIB)), (Part::All, Part::None));
        let parts = (0..TRY_INTERVAL).map(|_| part(2 * MIB));
        assert_eq!(parts.filter(|part| *part == Part::Free).count(), 1);
        // In each round the heap is trimmed and grows again.
        for round in 0..10 {
            record_block(MIB, 100 * MIB);
            assert_eq!(
                part(MIB),
                if round <= 2 { Part::All } else { Part::Free },
                "{round}"
            );
            for block in 1..50 {
                record_block(MIB, (100 + block) * MIB);
            }
        }
        assert_eq!(threshold(), Some(LARGE_BLOCK_BYTES));
        set_tuned();
        assert_eq!((part(MIB), threshold()), (Part::Free, None));
    }
}
