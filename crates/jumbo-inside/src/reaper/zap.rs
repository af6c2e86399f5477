//! Emptying private anonymous memory with several threads: [`Round`].
//!
//! Ranges are collected until there are [`Round::RANGES`] of them, and then worked off: a process has up
//! to 65530 mappings and more, and no memory can be had for a longer list. All threads take pieces from
//! one cursor, so that they finish together. `MADV_DONTNEED` takes the lock of the address space shared,
//! so they do not wait for each other, where two munmap(2) would.
#![expect(unsafe_code, reason = "starts threads, and shares the round with them")]

use core::sync::atomic::{AtomicUsize, Ordering};

use super::control::{CONTROL, MAX_WORKERS, Stack};
use super::filter::{COUNTED_THREAD, MADV_DONTNEED_LOCKED, THREAD};
use super::raw;
use crate::sys::Thread;

/// What a thread takes at once, and how its ends are aligned: whole huge pages, of any size but 1 GiB.
const PIECE: usize = 64 << 20;

/// Ranges to empty, and how far that has come.
pub(super) struct Round {
    ranges: [Range; Self::RANGES],
    count: usize,
    workers: usize,
    cursor: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Range {
    start: usize,
    end: usize,
    /// The number of its first piece.
    first: usize,
}

crate::one_page::table! {
    /// The threads that help. Where the kernel counts them each is made once, and later rounds do without.
    static HELPERS: [(Thread, Stack<{ 16 << 10 }>); MAX_WORKERS - 1] =
        [const { (Thread::none(), Stack::new()) }; MAX_WORKERS - 1];
}

impl Range {
    fn pieces(&self) -> usize {
        self.end.div_ceil(PIECE) - self.start / PIECE
    }
}

impl Round {
    /// How many ranges are worked off at once.
    const RANGES: usize = 2048;

    /// An empty round for so many threads, the caller among them.
    pub(super) fn new(workers: usize) -> Self {
        let nothing = Range {
            start: 0,
            end: 0,
            first: 0,
        };
        Self {
            ranges: [nothing; Self::RANGES],
            count: 0,
            workers: workers.clamp(1, MAX_WORKERS),
            cursor: AtomicUsize::new(0),
        }
    }

    /// Adds a range of whole pages; empties all of them where that fills the table.
    ///
    /// # Safety
    /// Nothing uses what the range holds, from now on until [`Round::run`] has emptied it.
    pub(super) unsafe fn add(&mut self, start: usize, end: usize) {
        if start >= end {
            return;
        }
        if self.count == Self::RANGES {
            self.run();
        }
        let first = self.pieces();
        if let Some(place) = self.ranges.get_mut(self.count) {
            *place = Range { start, end, first };
            self.count += 1;
        }
    }

    /// Empties the ranges, and forgets them.
    pub(super) fn run(&mut self) {
        let pieces = self.pieces();
        self.cursor = AtomicUsize::new(0);
        let round: &Self = self;
        // A thread for what is quickly done would cost more than it saves.
        let helpers = &HELPERS[..(self.workers - 1).min(pieces / 2)];
        let counted = CONTROL.counts_threads.load(Ordering::Relaxed);
        let flags = if counted { COUNTED_THREAD } else { THREAD };
        let work = || round.work();
        for (thread, stack) in helpers {
            // SAFETY: the sibling has all signals blocked, and so has a test. The stack is this helper's; `work` and the
            // round outlive the thread, which is joined below. Where none can be made, the others do its part.
            unsafe { thread.start(flags, stack.place(), &work) };
        }
        work();
        for (thread, _) in helpers {
            thread.join();
        }
        self.count = 0;
    }

    fn pieces(&self) -> usize {
        let last = self
            .count
            .checked_sub(1)
            .and_then(|last| self.ranges.get(last));
        last.map_or(0, |range| range.first + range.pieces())
    }

    /// Takes pieces until none is left.
    fn work(&self) {
        let mut ranges = self.ranges.iter().take(self.count);
        let mut range = ranges.next();
        loop {
            let piece = self.cursor.fetch_add(1, Ordering::Relaxed);
            // The cursor only ever goes up, and so do the first pieces.
            while let Some(now) = range
                && piece >= now.first + now.pieces()
            {
                range = ranges.next();
            }
            let Some(now) = range else {
                return;
            };
            let from = (now.start / PIECE + piece - now.first) * PIECE;
            let (start, end) = (from.max(now.start), (from + PIECE).min(now.end));
            // SAFETY: the promise of the caller of `add`.
            unsafe { empty(start, end - start) };
        }
    }
}

/// Gives the memory of a range back. Where that is refused (a secret, a device's) the end of the process
/// does it.
///
/// # Safety
/// Nothing uses what the range holds.
unsafe fn empty(start: usize, length: usize) {
    const EINVAL: isize = -(libc::EINVAL as isize);
    // SAFETY: the caller's promise.
    let advise = |advice| unsafe { raw::advise(start, length, advice) };
    // Locked memory has a call of its own.
    if advise(libc::MADV_DONTNEED) == EINVAL {
        advise(MADV_DONTNEED_LOCKED);
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU32;

    use super::*;

    /// What is emptied, in this process: real memory, real threads.
    #[test]
    fn all_ranges_are_emptied_and_nothing_else_is() {
        let length = 3 * PIECE + 12 * 4096;
        let flags = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE;
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes replaces none.
        let memory = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags).unwrap()
        };
        let page = |at: usize| {
            // SAFETY: within the mapping, which only this thread looks at.
            unsafe { AtomicU32::from_ptr(memory.cast::<u8>().add(at * 4096).cast()) }
        };
        let pages = length / 4096;
        for at in 0..pages {
            page(at).store(7, Ordering::Relaxed);
        }
        let mut round = Round::new(3);
        let base = memory.expose_provenance();
        // Every range but the gaps: more of them than a table holds, then one of many pieces.
        for at in 0..5000 {
            // SAFETY: within the mapping, whose words are all atomic.
            unsafe { round.add(base + 4 * at * 4096, base + (4 * at + 3) * 4096) };
        }
        // SAFETY: as above.
        unsafe { round.add(base + 20_000 * 4096, base + length - 4096) };
        round.run();
        for at in 0..pages {
            let kept = (at < 20_000 && at % 4 == 3) || at == pages - 1;
            assert_eq!(
                page(at).load(Ordering::Relaxed),
                if kept { 7 } else { 0 },
                "{at}"
            );
        }
        // SAFETY: no pointer into it is left.
        unsafe { rustix::mm::munmap(memory, length).unwrap() };
    }
}
