//! Freeing for programs that know what they free: [`Gather`].

use core::ops::Range;

use rustix::io::Errno;

use super::batch::{Batch, Entry, FreeError, Operation, Reserve};
use super::memory::Kernel;
use super::queue::{Id, Outcome};
use super::unmap::{alone, hand_over};
use super::{HANDOVER, LEAST, default_threads, staging};
use crate::sandbox;
use crate::units::Pages;

/// Blocks of every [`Gather`] of the process.
static RESERVE: Reserve = Reserve::new();
/// Jobs of one gather that are under way while it goes on collecting.
const JOBS: usize = 4;

/// When a free returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// When all of it is free.
    #[default]
    Sync,
    /// At once; the memory follows.
    Background,
}

/// How a [`Gather`] works.
#[derive(Clone, Copy, Debug)]
pub struct Tunables {
    /// How many threads may free at once, the caller among them in [`Mode::Sync`]. 0: as many as this
    /// process has CPUs, at most 4.
    pub max_active: u32,
    /// How many base pages are collected before they are handed over.
    pub flush_pages: Pages,
    /// When [`Gather::finish`] returns.
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

/// What a [`Gather`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Freed {
    /// Bytes freed, or in [`Mode::Background`] handed over.
    pub bytes: u64,
    /// The most threads that worked on one batch at once; 1 where the caller did all of it.
    pub threads: u32,
}

/// Ranges to be freed: collected, merged with their neighbours, handed over in batches.
#[derive(Debug)]
pub struct Gather {
    batch: Batch,
    tunables: Tunables,
    under_way: [Option<Id>; JOBS],
    freed: Freed,
    error: Option<FreeError>,
}

impl Gather {
    /// An empty gather. The first one of a process makes the memory resident in which all of them keep
    /// their ranges, 64 KiB, so that later none is needed.
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
            under_way: [None; JOBS],
            freed: Freed::default(),
            error: None,
        }
    }

    /// Adds `range` (addresses), and hands over what has been collected when it is enough.
    ///
    /// # Errors
    /// EINVAL where the range does not begin and end at a page; nothing was added. What the kernel refuses
    /// is told by [`Gather::finish`].
    ///
    /// # Safety
    /// What the range holds is the caller's to lose. From now on, until [`Gather::finish`] has returned, and
    /// in [`Mode::Background`] until [`super::drain`] has, no thread touches it.
    #[expect(unsafe_code, reason = "takes memory away from under its pointers")]
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
        let entry = Entry::new(range.start, length, operation);
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

    /// Has all of it freed, and in [`Mode::Sync`] waits until it is.
    ///
    /// # Errors
    /// The first range that the kernel refused. The others are free all the same. In
    /// [`Mode::Background`] refusals are not seen.
    pub fn finish(mut self) -> Result<Freed, FreeError> {
        self.finish_all();
        self.error.map_or(Ok(self.freed), Err)
    }

    fn finish_all(&mut self) {
        self.flush();
        for job in core::mem::take(&mut self.under_way).into_iter().flatten() {
            let outcome = HANDOVER.finish(job, &Kernel);
            self.book(outcome);
        }
    }

    fn flush(&mut self) {
        let batch = core::mem::replace(&mut self.batch, Batch::new(Some(&RESERVE)));
        if batch.count() == 0 {
            return;
        }
        self.freed.bytes += batch.bytes() as u64;
        let most = self.tunables.max_active;
        let later = self.tunables.mode == Mode::Background;
        let shared = !sandbox::is_entered() && (later || most > 1) && pays(&batch);
        if !shared {
            return self.book(alone(batch));
        }
        let slot = match self.under_way.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                // The oldest first.
                self.under_way.rotate_left(1);
                if let Some(oldest) = self.under_way[JOBS - 1].take() {
                    let outcome = HANDOVER.finish(oldest, &Kernel);
                    self.book(outcome);
                }
                JOBS - 1
            }
        };
        match hand_over(batch, most, later) {
            Ok(_) if later => self.freed.threads = self.freed.threads.max(most),
            Ok(job) => self.under_way[slot] = Some(job),
            Err(outcome) => self.book(outcome),
        }
    }

    fn book(&mut self, outcome: Outcome) {
        self.freed.threads = self.freed.threads.max(outcome.threads);
        self.error = self.error.or(outcome.error);
    }
}

impl Drop for Gather {
    /// What was added is freed, and waited for, as if by [`Gather::finish`].
    fn drop(&mut self) {
        self.finish_all();
    }
}

/// Whether several threads are faster than one, judged by the largest range.
fn pays(batch: &Batch) -> bool {
    let Some(largest) = batch.entries().max_by_key(|entry| entry.length()) else {
        return false;
    };
    if let Operation::Punch { .. } = largest.operation() {
        // One thread for each file.
        return batch
            .entries()
            .any(|entry| entry.operation() != largest.operation());
    }
    let anonymous = largest.operation() != Operation::Drop;
    let (start, length) = (largest.start(), largest.length());
    let looked = staging::STAGING.with(|staging| staging::pays(staging, start, length, anonymous));
    batch.bytes() >= LEAST && looked == Some(true)
}
