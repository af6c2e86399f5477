//! Explicit frees: [`Gather`].

use core::ops::Range;

use rustix::io::Errno;

use super::batch::{Batch, BlockReserve, FreeError, FreeRange, Operation};
use super::memory::Kernel;
use super::queue::{Id, JobOutcome};
use super::unmap::{free_here, hand_over};
use super::{HANDOVER, MIN_BYTES, default_threads, staging};
use crate::sandbox;
use jumbo_sys::units::Pages;

static RESERVE: BlockReserve = BlockReserve::new();
const MAX_JOBS: usize = 4;

/// Time at which a free returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// After the memory is free.
    #[default]
    Sync,
    /// At once; the memory is freed in the background.
    Background,
}

/// Configuration of a [`Gather`].
#[derive(Clone, Copy, Debug)]
pub struct Tunables {
    /// Maximum threads, with the caller in [`Mode::Sync`]. 0: the CPUs of this process, at most 4.
    pub max_active: u32,
    /// Base pages to collect before a hand-over.
    pub flush_pages: Pages,
    /// Time at which [`Gather::finish`] returns.
    pub mode: Mode,
}

impl Default for Tunables {
    fn default() -> Self {
        Self {
            max_active: 0,
            flush_pages: Pages(256 << 10),
            mode: Mode::Sync,
        }
    }
}

/// Result of a [`Gather`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Freed {
    /// Bytes freed, or in [`Mode::Background`] handed over.
    pub bytes: u64,
    /// Peak of the threads on one batch; 1 if the caller freed all of it.
    pub threads: u32,
}

/// Ranges to free: collected, merged with their neighbours, handed over in batches.
#[derive(Debug)]
pub struct Gather {
    batch: Batch,
    tunables: Tunables,
    under_way: [Option<Id>; MAX_JOBS],
    freed: Freed,
    error: Option<FreeError>,
}

impl Gather {
    /// Returns an empty gather. The first one of a process makes 64 KiB for ranges resident, so
    /// that later none is needed.
    pub fn new(tunables: Tunables) -> Self {
        RESERVE.prepare();
        let max_active = match tunables.max_active {
            0 => default_threads(),
            some => some,
        };
        Self {
            batch: Batch::new(Some(&RESERVE)),
            tunables: Tunables {
                max_active,
                ..tunables
            },
            under_way: [None; MAX_JOBS],
            freed: Freed::default(),
            error: None,
        }
    }

    /// Adds an address range, and hands over full batches.
    ///
    /// # Errors
    /// EINVAL if the range is not page-aligned. [`Gather::finish`] returns errors of the kernel.
    ///
    /// # Safety
    /// The caller gives up the content of the range. No thread touches it until [`Gather::finish`]
    /// has returned, in [`Mode::Background`] until [`super::drain`] has.
    #[expect(unsafe_code, reason = "unmaps memory that pointers may refer to")]
    pub unsafe fn add(
        &mut self,
        range: Range<usize>,
        operation: Operation,
    ) -> Result<(), FreeError> {
        let page = rustix::param::page_size();
        let length = range.end.saturating_sub(range.start);
        if !range.start.is_multiple_of(page) || !range.end.is_multiple_of(page) || range.is_empty()
        {
            return Err(FreeError {
                address: range.start,
                length,
                operation,
                errno: Errno::INVAL,
            });
        }
        let entry = FreeRange::new(range.start, length, operation);
        // SAFETY: the caller's promise.
        if unsafe { self.batch.push(entry) }.is_err() {
            self.flush();
            // SAFETY: as above. An empty batch has room.
            let _ = unsafe { self.batch.push(entry) };
        }
        let pages = self.batch.bytes() / page;
        if pages as u64 >= self.tunables.flush_pages.0 {
            self.flush();
        }
        Ok(())
    }

    /// Frees all ranges, and in [`Mode::Sync`] waits for it.
    ///
    /// # Errors
    /// First error of the kernel; the other ranges are free. None in [`Mode::Background`].
    pub fn finish(mut self) -> Result<Freed, FreeError> {
        self.finish_all();
        self.error.map_or(Ok(self.freed), Err)
    }

    fn finish_all(&mut self) {
        self.flush();
        for job in core::mem::take(&mut self.under_way).into_iter().flatten() {
            let outcome = HANDOVER.finish(job, &Kernel);
            self.record(outcome);
        }
    }

    fn flush(&mut self) {
        let batch = core::mem::replace(&mut self.batch, Batch::new(Some(&RESERVE)));
        if batch.count() == 0 {
            return;
        }
        self.freed.bytes += batch.bytes() as u64;
        let max_threads = self.tunables.max_active;
        let later = self.tunables.mode == Mode::Background;
        let shared = !sandbox::is_entered() && (later || max_threads > 1) && is_worthwhile(&batch);
        if !shared {
            return self.record(free_here(batch));
        }
        let slot = match self.under_way.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                // Wait for the oldest job.
                self.under_way.rotate_left(1);
                if let Some(oldest) = self.under_way[MAX_JOBS - 1].take() {
                    let outcome = HANDOVER.finish(oldest, &Kernel);
                    self.record(outcome);
                }
                MAX_JOBS - 1
            }
        };
        match hand_over(batch, max_threads, later) {
            Ok(_) if later => self.freed.threads = self.freed.threads.max(max_threads),
            Ok(job) => self.under_way[slot] = Some(job),
            Err(outcome) => self.record(outcome),
        }
    }

    fn record(&mut self, outcome: JobOutcome) {
        self.freed.threads = self.freed.threads.max(outcome.threads);
        self.error = self.error.or(outcome.error);
    }
}

impl Drop for Gather {
    /// Frees the added ranges, and waits, as [`Gather::finish`] does.
    fn drop(&mut self) {
        self.finish_all();
    }
}

/// Reports whether several threads are faster than one, by the largest range.
fn is_worthwhile(batch: &Batch) -> bool {
    let Some(largest) = batch.entries().max_by_key(|entry| entry.length()) else {
        return false;
    };
    if let Operation::Punch { .. } = largest.operation() {
        // One thread per file.
        return batch
            .entries()
            .any(|entry| entry.operation() != largest.operation());
    }
    let anonymous = largest.operation() != Operation::Drop;
    let (start, length) = (largest.start(), largest.length());
    let is_faster =
        staging::STAGING.with(|staging| staging::is_worthwhile(staging, start, length, anonymous));
    batch.bytes() >= MIN_BYTES && is_faster == Some(true)
}
