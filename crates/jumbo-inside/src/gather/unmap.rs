//! Large frees of programs that know nothing of us: [`unmap`], [`discard`], [`Leaving`].

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::batch::{Batch, Entry, Operation};
use super::handover::Executor;
use super::memory::{self, Kernel};
use super::queue::{Id, Outcome, Terms};
use super::{BACKGROUND, HANDOVER, MERGED, MOST, SMALL_PAGES, is_large, is_own, staging, workers};
use crate::headroom::{self, Needed};
use crate::ledger::{Slot, stats};
use crate::sandbox;
use crate::sync::{Linux, Platform};
use crate::sys::{self, Blocked};

/// A piece is a fraction of the whole, so that threads finish together, within these bounds: about 5 ms'
/// worth of base pages at most, and never so little that claiming it shows.
const PIECES: Range<usize> = 512 << 10..64 << 20;
/// Pieces for each thread.
const SHARE: usize = 8;

/// What may still be allocated while memory is freed in the background.
static BUDGET: AtomicUsize = AtomicUsize::new(0);

/// How many times [`super::Settings::least`] a range has to be that may be huge-mapped: to look at it costs
/// about 50 us, and unmapping 2 GiB of huge pages 5 ms.
pub(super) const MAY_BE_HUGE: usize = 16;

/// How many threads may free a range of `length`; `None` where that is not ours.
fn threads(length: usize) -> Option<u32> {
    let ours = is_large(length) && !sandbox::is_entered();
    let looks = ours && (are_pages_small() || is_large(length / MAY_BE_HUGE));
    (looks && is_own()).then(|| MOST.load(Ordering::Relaxed))
}

/// The program was given a block of `bytes`, and has not touched it yet. Where such a block will be freed in the
/// background, workers are made ready for it: afterwards the caches are cold, fresh pages dear, and a thread takes
/// longer to make than all else takes together.
pub fn prepare(bytes: usize) {
    if is_later(bytes) {
        let _blocked = Blocked::new();
        workers::prepare(beside_caller());
        deepen();
    }
}

/// How many threads free while the caller goes on, and keeps a CPU to do so.
fn beside_caller() -> u32 {
    MOST.load(Ordering::Relaxed).saturating_sub(1).max(1)
}

/// Touches as much of the stack as a free takes: fresh pages are dear when one is under way.
#[inline(never)]
fn deepen() {
    core::hint::black_box([0u8; 8 << 10]);
}

/// To what a block of `bytes` is best aligned: page tables of the second highest level are moved whole.
pub(crate) fn alignment(bytes: usize) -> usize {
    if bytes >= staging::ALIKE && is_later(bytes) {
        staging::ALIKE
    } else {
        1
    }
}

/// Whether a block of `bytes` will be freed in the background, as far as can be known beforehand.
fn is_later(bytes: usize) -> bool {
    let later = is_large(bytes) && BACKGROUND.load(Ordering::Relaxed) && !sandbox::is_entered();
    later && are_pages_small() && is_own()
}

/// Memory comes in base pages: the host's THP are off, or this process was told not to use them.
pub(super) fn are_pages_small() -> bool {
    SMALL_PAGES.load(Ordering::Relaxed) || sys::is_without_thp()
}

/// A size of pieces for `bytes` that `threads` share.
pub(super) fn piece(bytes: usize, threads: u32) -> usize {
    let threads = usize::try_from(threads).unwrap_or(1).max(1);
    (bytes / (threads * SHARE)).clamp(PIECES.start, PIECES.end)
}

/// munmap(2) of a large range: true if it was done. Otherwise nothing has changed, and the kernel is to do
/// it: it is small, or would not gain, or is in any way out of the ordinary.
///
/// # Safety
/// The caller may unmap the range.
#[cold]
#[inline(never)]
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn unmap(address: usize, length: usize) -> bool {
    let mut leaving = Leaving::new();
    // SAFETY: the caller's promise.
    unsafe { leaving.take(address, length) && leaving.finish() }
}

/// Ranges that have left the program's reach and are not free yet. [`Leaving::take`] may be called under a
/// lock that others need; [`Leaving::finish`], which takes its time, after it.
#[derive(Debug)]
#[must_use]
pub struct Leaving {
    batch: Batch,
    /// While there is something in it: it must not be forgotten.
    blocked: Option<Blocked>,
}

impl Default for Leaving {
    fn default() -> Self {
        Self::new()
    }
}

impl Leaving {
    /// None so far.
    pub const fn new() -> Self {
        Self {
            batch: Batch::new(None),
            blocked: None,
        }
    }

    /// Takes a range: a thread that touches it from now on faults, and it can be mapped again. False where
    /// nothing was done, and the kernel has to unmap it.
    ///
    /// # Safety
    /// The caller may unmap the range.
    #[expect(unsafe_code, reason = "takes memory away from under its pointers")]
    pub unsafe fn take(&mut self, address: usize, length: usize) -> bool {
        let page = rustix::param::page_size();
        if threads(length).is_none() {
            return false;
        }
        let aligned = address.is_multiple_of(page) && address.checked_add(length).is_some();
        let Some(length) = length.checked_next_multiple_of(page).filter(|_| aligned) else {
            return false;
        };
        let blocked = self.blocked.take().unwrap_or_default();
        let looked = if self.batch.is_full() || MERGED.load(Ordering::Relaxed) {
            None
        } else {
            // SAFETY: the caller's promise.
            unsafe { staging::take(address, length) }
        };
        let was_looked_at = looked.is_some();
        let place = looked.flatten();
        if place.is_some() || self.batch.bytes() > 0 {
            self.blocked = Some(blocked);
        }
        let Some(place) = place else {
            if was_looked_at {
                Slot::add(&stats::slot().free_inline, length as u64);
            }
            return false;
        };
        if !place.is_empty() {
            let entry = Entry::new(place.start, place.len(), Operation::Unmap);
            // SAFETY: the range was the caller's to unmap, and is where only this module knows of it.
            if unsafe { self.batch.push(entry) }.is_err() {
                // It was not full: this cannot be.
                // SAFETY: as above.
                let _ = unsafe { memory::unmap(place.start, place.len()) };
            }
        }
        true
    }

    /// Has what was taken freed: now, or in background mode later. Always true.
    pub fn finish(self) -> bool {
        let Self { batch, blocked } = self;
        let bytes = batch.bytes();
        if bytes > 0 {
            let later = BACKGROUND.load(Ordering::Relaxed) && allows_later(bytes);
            let most = if later {
                beside_caller()
            } else {
                MOST.load(Ordering::Relaxed)
            };
            let outcome = run(batch, most, later);
            count(bytes, outcome, later);
        }
        drop(blocked);
        true
    }
}

/// Hands a batch to the workers and, unless it is to be done `later`, waits. `None` where it is done later.
fn run(batch: Batch, most: u32, later: bool) -> Option<Outcome> {
    match hand_over(batch, most, later) {
        Ok(_) if later => None,
        Ok(job) => Some(HANDOVER.finish(job, &Kernel)),
        Err(outcome) => Some(outcome),
    }
}

/// Hands a batch to the workers, who are made where there are too few.
///
/// # Errors
/// It was done at once, on this thread.
pub(super) fn hand_over(mut batch: Batch, most: u32, later: bool) -> Result<Id, Outcome> {
    let terms = Terms {
        most,
        piece: piece(batch.bytes(), most),
        owner: (!later).then(Linux::me),
    };
    let Some(call) = HANDOVER.submit(&mut batch, terms) else {
        return Err(alone(batch));
    };
    workers::make(call.make);
    if later && !HANDOVER.has_workers() {
        // No other thread would do it.
        HANDOVER.help(&Kernel);
    }
    Ok(call.job)
}

/// Frees a batch on this thread.
pub(super) fn alone(batch: Batch) -> Outcome {
    let mut error = None;
    for entry in batch.entries() {
        #[expect(unsafe_code, reason = "frees by address")]
        // SAFETY: the batch is done when this returns, and not before.
        let refused = unsafe { memory::free(entry) }.err();
        error = error.or(refused);
    }
    Kernel.close(batch);
    Outcome { threads: 1, error }
}

fn count(bytes: usize, outcome: Option<Outcome>, later: bool) {
    let (slot, bytes) = (stats::slot(), bytes as u64);
    if later {
        Slot::add(&slot.free_background, bytes);
    }
    if later || outcome.is_some_and(|outcome| outcome.threads > 1) {
        Slot::add(&slot.free_gathered, bytes);
    } else {
        Slot::add(&slot.free_inline, bytes);
    }
}

/// Whether `bytes` more could be had, beside what is still pending. Then the program may allocate the
/// rest until all of it is free.
fn allows_later(bytes: usize) -> bool {
    let pending = HANDOVER.pending();
    let all = bytes.saturating_add(pending);
    let room = staging::STAGING
        .with(|_| headroom::headroom(Needed::to_hold(all)))
        .flatten();
    BUDGET.store(room.map_or(0, |room| room.min()), Ordering::Relaxed);
    room.is_some_and(|room| room.holds(all))
}

/// The program allocates while memory is pending.
#[cold]
#[inline(never)]
pub(super) fn spend(bytes: usize) {
    let spent = |left: usize| left.checked_sub(bytes);
    if BUDGET
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spent)
        .is_err()
    {
        super::drain();
    }
}

/// MADV_DONTNEED of a large range of the program's, in place: the kernel's answer, or `None` where nothing
/// was done and the kernel is to do it. Never later: the program may write there as soon as this returns.
///
/// # Safety
/// The caller may drop what the range holds.
#[cold]
#[inline(never)]
#[expect(unsafe_code, reason = "drops what memory holds")]
pub unsafe fn discard(address: usize, length: usize) -> Option<Result<(), Errno>> {
    let page = rustix::param::page_size();
    let most = threads(length).filter(|most| *most > 1)?;
    let length = length.checked_next_multiple_of(page)?;
    if !address.is_multiple_of(page) || address.checked_add(length).is_none() {
        return None;
    }
    let _blocked = Blocked::new();
    // The kernel works from the start to the first mapping that it refuses; we could not stop there.
    let suits = staging::STAGING.with(|staging| {
        staging::pays(staging, address, length, true)
            && memory::is_whole_and_unlocked(address, length).is_ok()
            && staging::mappings(staging, address, length).is_ok()
    });
    if suits == Some(false) {
        Slot::add(&stats::slot().free_inline, length as u64);
    }
    suits.filter(|suits| *suits)?;
    let mut batch = Batch::new(None);
    // SAFETY: the caller's promise, which holds until the batch is done, below.
    unsafe { batch.push(Entry::new(address, length, Operation::Zap)) }.ok()?;
    let outcome = run(batch, most, false);
    count(length, outcome, false);
    let refused = outcome.and_then(|outcome| outcome.error);
    Some(refused.map_or(Ok(()), |refused| Err(refused.errno)))
}
