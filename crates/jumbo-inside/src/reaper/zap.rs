//! Emptying private anonymous memory with several threads: [`Round`].
//!
//! Ranges are collected until there are [`Round::RANGES`] of them, and then worked off: a process has up
//! to 65530 mappings and more, and no memory can be had for a longer list. All threads take pieces from
//! one cursor, so that they finish together. `MADV_DONTNEED` takes the lock of the address space shared,
//! so they do not wait for each other, where two munmap(2) would.
#![expect(unsafe_code, reason = "starts threads, and shares the round with them")]

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use core::time::Duration;

use super::control::{CONTROL, MAX_WORKERS, Stack};
use super::filter::{COUNTED_THREAD, MADV_DONTNEED_LOCKED, THREAD};
use super::raw::{self, Entry};

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

/// A thread that helps. Where the kernel counts them it is made once, and later rounds do without.
struct Helper {
    /// Zeroed by the kernel when the thread has ended.
    alive: AtomicU32,
    stack: Stack<{ 16 << 10 }>,
    /// Its descriptor, where it has one: of no use.
    descriptor: AtomicU32,
}

static HELPERS: [Helper; MAX_WORKERS - 1] = [const {
    Helper {
        alive: AtomicU32::new(0),
        stack: Stack::new(),
        descriptor: AtomicU32::new(0),
    }
}; MAX_WORKERS - 1];

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
        for helper in helpers {
            helper.start(round);
        }
        self.work();
        for helper in helpers {
            helper.join();
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

impl Helper {
    /// Starts the thread; where none can be made, the others do its part.
    fn start(&self, round: &Round) {
        self.alive.store(1, Ordering::Relaxed);
        let (stack, size) = self.stack.place();
        let alive = self.alive.as_ptr().expose_provenance();
        let descriptor = self.descriptor.as_ptr().expose_provenance();
        let counted = CONTROL.counts_threads.load(Ordering::Relaxed);
        let flags = if counted { COUNTED_THREAD } else { THREAD } as usize;
        // clone(2), whose flags a filter can check: flags, top of the stack, and where to tell descriptor and end.
        let arguments = if cfg!(target_arch = "aarch64") {
            [flags, stack + size, descriptor, 0, alive]
        } else {
            [flags, stack + size, descriptor, alive, 0]
        };
        let entry = Entry {
            function: help,
            argument: core::ptr::from_ref(round).expose_provenance(),
        };
        // SAFETY: the stack is this helper's, whose last thread was joined; the round outlives the
        // thread, since `run` joins it; the kernel writes to two atomics.
        if unsafe { raw::spawn(libc::SYS_clone, arguments, entry) } < 0 {
            self.alive.store(0, Ordering::Relaxed);
        }
    }

    fn join(&self) {
        loop {
            let alive = self.alive.load(Ordering::Acquire);
            if alive == 0 {
                return;
            }
            raw::wait(&self.alive, alive, Duration::from_secs(1));
        }
    }
}

/// # Safety
/// Called by [`Helper::start`] alone: `round` is the address of a [`Round`] that outlives the thread.
unsafe extern "C" fn help(round: usize) -> ! {
    // SAFETY: the caller's promise; the round is shared by its atomic cursor.
    let round = unsafe { &*core::ptr::with_exposed_provenance::<Round>(round) };
    round.work();
    raw::exit(0)
}

#[cfg(test)]
mod tests {
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
