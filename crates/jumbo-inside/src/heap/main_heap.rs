//! Large blocks that are left to glibc's main heap: [`part`].
//!
//! glibc maps a block of [`LARGE`] bytes or more by itself at first. Once the program has freed one,
//! glibc serves blocks of up to that size from its main heap, which takes the best fit and keeps what
//! is free between live blocks. A program whose blocks have many sizes reuses resident memory so. The
//! holes of another layout fit other blocks: memory would go back and fault in anew, or stay beside
//! what plain has. So these blocks are glibc's, and the window serves those that glibc would map.
//! `density` advises the heap as it grows.
//!
//! glibc gives the end of its heap back, and a program that works in rounds faults it in anew each
//! round. Where that is a half of all it asks for, the window serves all blocks again: what is freed
//! there stays by demand.
//!
//! Other threads have arenas of 64 MiB, whose ends glibc gives back too: the window serves them.
//!
//! Rules of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), with their defaults.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{BASE_PAGE, LARGE};
use crate::sync::thread_pointer;

/// DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64 bits: a block of that size or more is always mapped.
const MAX_BLOCK_BYTES: usize = 32 << 20;
/// The main heap is large with so much.
const MIN_LARGE_BYTES: usize = 16 << 20;
/// The heap regained so much after it was given back, before that counts.
const MIN_REGAINED_BYTES: usize = 64 << 20;
/// After so many bytes of blocks, those before count half.
const FORGET_BYTES: usize = 1 << 30;

/// The thread whose large blocks may be glibc's; 0: none.
static FIRST: AtomicUsize = AtomicUsize::new(0);
/// The largest block below [`MAX_BLOCK_BYTES`] that the window freed; less than [`LARGE`]: none.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// The main heap has become large.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// What the first thread alone changes. The end of the heap, at first and now; 0: no block was left to glibc.
static BEGAN: AtomicUsize = AtomicUsize::new(0);
static BREAK: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicUsize = AtomicUsize::new(0);
static RETURNED: AtomicUsize = AtomicUsize::new(0);
static REGAINED: AtomicUsize = AtomicUsize::new(0);

/// glibc's malloc is the program's, with its own defaults. In the first thread.
pub fn start() {
    FIRST.store(thread_pointer(), Ordering::Relaxed);
}

/// Leaves no more blocks to glibc: the program sets thresholds of its own (mallopt(3)), or the window is better.
pub fn end() {
    FIRST.store(0, Ordering::Relaxed);
    IS_USED.store(false, Ordering::Relaxed);
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
    match size <= LARGEST.load(Ordering::Relaxed) {
        _ if FIRST.load(Ordering::Relaxed) != thread_pointer() => Part::None,
        true => Part::All,
        false if BREAK.load(Ordering::Relaxed) != 0 => Part::Free,
        false => Part::None,
    }
}

/// The size from which on glibc would map a block by now.
pub fn threshold() -> usize {
    LARGEST.load(Ordering::Relaxed) + BASE_PAGE
}

/// Whether the program has most of its free memory in a main heap that became large.
pub(super) fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// The largest block that glibc would keep at the end of its heap, in bytes.
pub(super) fn largest() -> usize {
    LARGEST.load(Ordering::Relaxed)
}

/// A block of `bytes`, whole pages, was freed that glibc would have mapped.
pub(super) fn freed(bytes: usize) {
    if bytes < MAX_BLOCK_BYTES {
        LARGEST.fetch_max(bytes, Ordering::Relaxed);
    }
}

/// glibc has served a block of `size` bytes that was left to it, and its heap ends at `end` now.
pub fn took(size: usize, end: usize) {
    let add = |count: &AtomicUsize, bytes: usize| {
        let sum = count.load(Ordering::Relaxed).saturating_add(bytes);
        count.store(sum, Ordering::Relaxed);
        sum
    };
    let before = BREAK.swap(end, Ordering::Relaxed);
    if before == 0 {
        BEGAN.store(end, Ordering::Relaxed);
    }
    if end.saturating_sub(BEGAN.load(Ordering::Relaxed)) >= MIN_LARGE_BYTES {
        IS_USED.store(true, Ordering::Relaxed);
    }
    let asked = add(&ASKED, size);
    let returned = add(&RETURNED, before.saturating_sub(end));
    let again = end.saturating_sub(before).min(returned);
    RETURNED.store(returned - again, Ordering::Relaxed);
    let regained = add(&REGAINED, if before == 0 { 0 } else { again });
    if regained > MIN_REGAINED_BYTES && regained > asked / 2 {
        self::end();
    }
    if asked > FORGET_BYTES {
        ASKED.store(asked / 2, Ordering::Relaxed);
        REGAINED.store(regained / 2, Ordering::Relaxed);
    }
}

const _: () = assert!(LARGE < MAX_BLOCK_BYTES);

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
        assert_eq!(part(MIB + 1), Part::None, "no heap is there");
        assert_eq!(threshold(), MIB + BASE_PAGE);
        assert_eq!(
            std::thread::spawn(|| part(MIB)).join().ok(),
            Some(Part::None)
        );
        // It grows by all that the program asks for, and is large then.
        for round in 0..100 {
            took(MIB, (100 + round) * MIB);
            assert_eq!(is_used(), round * MIB >= MIN_LARGE_BYTES);
        }
        assert_eq!(part(MIB + 1), Part::Free);
        // The end goes back each round, and comes again.
        for round in 0..10 {
            took(MIB, 100 * MIB);
            assert_eq!(
                part(MIB),
                if round <= 2 { Part::All } else { Part::None },
                "{round}"
            );
            for block in 1..50 {
                took(MIB, (100 + block) * MIB);
            }
        }
        assert!(!is_used());
    }
}
