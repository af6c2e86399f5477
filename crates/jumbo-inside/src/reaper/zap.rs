//! Zaps private anonymous memory with several threads: [`ZapBatch`].
//!
//! A batch has at most [`ZapBatch::MAX_RANGES`] ranges: a process may have 65530 mappings and more,
//! and a longer list would need an allocation. All threads take pieces by one cursor, so that they
//! finish together. `MADV_DONTNEED` takes the mmap lock for reading, so the threads run in
//! parallel, unlike munmap(2).
#![expect(unsafe_code, reason = "starts threads, and shares the round with them")]

use core::sync::atomic::{AtomicUsize, Ordering};

use super::control::{CONTROL, MAX_WORKERS, Stack};
use super::filter::{COUNTED_THREAD, MADV_DONTNEED_LOCKED, THREAD};
use super::raw;
use jumbo_sys::Thread;

/// Size and alignment of the pieces that threads take: whole huge pages of all sizes except 1 GiB.
const PIECE_BYTES: usize = 64 << 20;

/// Ranges to zap, and the progress.
pub(super) struct ZapBatch {
    ranges: [ZapRange; Self::MAX_RANGES],
    count: usize,
    workers: usize,
    cursor: AtomicUsize,
}

#[derive(Clone, Copy)]
struct ZapRange {
    start: usize,
    end: usize,
    /// Number of the first piece.
    first: usize,
}

crate::one_page::table! {
    /// Helper threads. If the kernel limits their number, each starts once, and later batches run
    /// without.
    static HELPERS: [(Thread, Stack<{ 16 << 10 }>); MAX_WORKERS - 1] =
        [const { (Thread::none(), Stack::new()) }; MAX_WORKERS - 1];
}

impl ZapRange {
    fn pieces(&self) -> usize {
        self.end.div_ceil(PIECE_BYTES) - self.start / PIECE_BYTES
    }
}

impl ZapBatch {
    /// Maximum number of ranges in a batch.
    const MAX_RANGES: usize = 2048;

    /// Returns an empty batch for `workers` threads, the caller included.
    pub(super) fn new(workers: usize) -> Self {
        let empty = ZapRange {
            start: 0,
            end: 0,
            first: 0,
        };
        Self {
            ranges: [empty; Self::MAX_RANGES],
            count: 0,
            workers: workers.clamp(1, MAX_WORKERS),
            cursor: AtomicUsize::new(0),
        }
    }

    /// Adds a range of whole pages; first zaps the ranges of a full batch.
    ///
    /// # Safety
    /// Nothing uses the memory of the range until [`ZapBatch::run`] has zapped it.
    pub(super) unsafe fn add(&mut self, start: usize, end: usize) {
        if start >= end {
            return;
        }
        if self.count == Self::MAX_RANGES {
            self.run();
        }
        let first = self.pieces();
        if let Some(place) = self.ranges.get_mut(self.count) {
            *place = ZapRange { start, end, first };
            self.count += 1;
        }
    }

    /// Zaps the ranges and removes them.
    pub(super) fn run(&mut self) {
        let pieces = self.pieces();
        self.cursor = AtomicUsize::new(0);
        let batch: &Self = self;
        // A thread for a single piece would cost more than it saves.
        let helpers = &HELPERS[..(self.workers - 1).min(pieces / 2)];
        let counted = CONTROL.counts_threads.load(Ordering::Relaxed);
        let flags = if counted { COUNTED_THREAD } else { THREAD };
        let work = || batch.work();
        for (thread, stack) in helpers {
            // SAFETY: the reaper has all signals blocked. The stack is this helper's; `work` and
            // the batch outlive the thread, which is joined below. If it does not start, the others
            // do its part.
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

    /// Zaps pieces until none is left.
    fn work(&self) {
        let mut ranges = self.ranges.iter().take(self.count);
        let mut range = ranges.next();
        loop {
            let piece = self.cursor.fetch_add(1, Ordering::Relaxed);
            // The cursor and the first pieces only increase.
            while let Some(now) = range
                && piece >= now.first + now.pieces()
            {
                range = ranges.next();
            }
            let Some(now) = range else {
                return;
            };
            let from = (now.start / PIECE_BYTES + piece - now.first) * PIECE_BYTES;
            let (start, end) = (from.max(now.start), (from + PIECE_BYTES).min(now.end));
            // SAFETY: the promise of the caller of `add`.
            unsafe { zap(start, end - start) };
        }
    }
}

/// Frees the memory of a range. Memory that the kernel refuses to zap (memfd_secret(2), a device's)
/// is freed at the end of the process.
///
/// # Safety
/// Nothing uses the memory of the range.
unsafe fn zap(start: usize, length: usize) {
    const EINVAL: isize = -(libc::EINVAL as isize);
    // SAFETY: the caller's promise.
    let advise = |advice| unsafe { raw::advise(start, length, advice) };
    // Locked memory needs another advice.
    if advise(libc::MADV_DONTNEED) == EINVAL {
        advise(MADV_DONTNEED_LOCKED);
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn exactly_the_ranges_are_zapped() {
        let length = 3 * PIECE_BYTES + 12 * 4096;
        let flags = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE;
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces none.
        let memory = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags).unwrap()
        };
        let page = |at: usize| {
            // SAFETY: within the mapping, which only this thread uses.
            unsafe { AtomicU32::from_ptr(memory.cast::<u8>().add(at * 4096).cast()) }
        };
        let pages = length / 4096;
        for at in 0..pages {
            page(at).store(7, Ordering::Relaxed);
        }
        let mut batch = ZapBatch::new(3);
        let base = memory.expose_provenance();
        // More small ranges with gaps than a batch holds, then one of many pieces.
        for at in 0..5000 {
            // SAFETY: within the mapping, whose words are all atomic.
            unsafe { batch.add(base + 4 * at * 4096, base + (4 * at + 3) * 4096) };
        }
        // SAFETY: as above.
        unsafe { batch.add(base + 20_000 * 4096, base + length - 4096) };
        batch.run();
        for at in 0..pages {
            let kept = (at < 20_000 && at % 4 == 3) || at == pages - 1;
            assert_eq!(
                page(at).load(Ordering::Relaxed),
                if kept { 7 } else { 0 },
                "{at}"
            );
        }
        // SAFETY: no pointer into the mapping is left.
        unsafe { rustix::mm::munmap(memory, length).unwrap() };
    }
}
