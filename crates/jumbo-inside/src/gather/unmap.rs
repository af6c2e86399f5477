//! Large frees of unmodified programs: [`unmap`], [`discard`], [`PendingFree`].

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::batch::{Batch, FreeRange, Operation};
use super::handover::Executor;
use super::memory::{self, Kernel};
use super::queue::{Id, JobOutcome, Terms};
use super::{
    BACKGROUND, HANDOVER, HAS_MERGED_PAGES, MAX_THREADS, SMALL_PAGES, is_large, is_own, staging,
    workers,
};
use crate::headroom::{self, Needed};
use crate::ledger::{Slot, stats};
use crate::sandbox;
use crate::sync::{Linux, Platform};
use jumbo_sys::{self as sys, Blocked, has_one_thread};

/// Bounds of a piece, a fraction of the batch, so that threads finish together: at most about 5 ms
/// of base pages, at least enough to hide the cost of a claim.
const PIECE_BYTES: Range<usize> = 512 << 10..64 << 20;
const PIECES_PER_THREAD: usize = 8;

/// Memory that the program may still allocate while memory is pending.
static BUDGET_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Factor on [`super::GatherSettings::min_bytes`] for ranges that may be huge-mapped: the
/// examination costs about 50 us, unmapping 2 GiB of huge pages 5 ms.
const HUGE_FACTOR: usize = 16;

/// Returns the maximum threads for a range; `None` if the kernel frees it.
fn threads(length: usize) -> Option<u32> {
    let ours = is_large(length) && !sandbox::is_entered();
    let is_examined = ours && (are_pages_small() || is_large(length / HUGE_FACTOR));
    (is_examined && is_own()).then(|| MAX_THREADS.load(Ordering::Relaxed))
}

/// Prepares workers for a new block of `bytes` that will be freed in the background. Making a
/// thread during the free would take longer than all other steps.
pub fn prepare(bytes: usize) {
    if is_later(bytes) {
        let _blocked = Blocked::new();
        workers::make(HANDOVER.count_workers(beside_caller()));
        touch_stack();
    }
}

/// Returns the threads that free beside a running caller, who keeps a CPU.
fn beside_caller() -> u32 {
    MAX_THREADS.load(Ordering::Relaxed).saturating_sub(1).max(1)
}

/// Touches the stack that a free needs: page faults during it are slow.
#[inline(never)]
fn touch_stack() {
    core::hint::black_box([0u8; 8 << 10]);
}

/// Returns the best alignment of a block: page tables of the second highest level move whole.
pub(crate) fn alignment(bytes: usize) -> usize {
    if bytes >= staging::ALIGN_BYTES && is_later(bytes) {
        staging::ALIGN_BYTES
    } else {
        1
    }
}

/// Predicts whether a block of `bytes` will be freed in the background.
fn is_later(bytes: usize) -> bool {
    let later = is_large(bytes) && BACKGROUND.load(Ordering::Relaxed) && !sandbox::is_entered();
    later && are_pages_small() && is_own()
}

/// Reports whether memory has base pages only: THP are off for the host or the process.
pub(super) fn are_pages_small() -> bool {
    SMALL_PAGES.load(Ordering::Relaxed) || sys::is_without_thp()
}

/// Returns the piece size for `bytes` on `threads` threads.
fn piece_bytes(bytes: usize, threads: u32) -> usize {
    let threads = usize::try_from(threads).unwrap_or(1).max(1);
    (bytes / (threads * PIECES_PER_THREAD)).clamp(PIECE_BYTES.start, PIECE_BYTES.end)
}

/// Unmaps a large range; true if done. Otherwise nothing has changed, and the kernel is to unmap
/// it: it is small, unusual, or not faster with threads.
///
/// # Safety
/// The caller may unmap the range.
#[cold]
#[inline(never)]
#[expect(unsafe_code, reason = "unmaps memory that pointers may refer to")]
pub unsafe fn unmap(address: usize, length: usize) -> bool {
    let mut leaving = PendingFree::new();
    // SAFETY: the caller's promise.
    let is_taken = unsafe { leaving.take(address, length) };
    leaving.finish();
    is_taken
}

/// Ranges out of the program's reach that are not free yet. [`PendingFree::take`] may be called under a
/// contended lock; [`PendingFree::finish`], which takes long, only after it.
#[derive(Debug)]
#[must_use]
pub struct PendingFree {
    batch: Batch,
    /// Set while there are ranges, which no handler may abandon.
    blocked: Option<Blocked>,
}

impl Default for PendingFree {
    fn default() -> Self {
        Self::new()
    }
}

impl PendingFree {
    /// Returns an empty value.
    pub const fn new() -> Self {
        Self {
            batch: Batch::new(None),
            blocked: None,
        }
    }

    /// Takes a range: a touch faults from now on, and the addresses can be mapped again. False if
    /// nothing was done, and the kernel has to unmap it.
    ///
    /// # Safety
    /// The caller may unmap the range.
    #[expect(unsafe_code, reason = "unmaps memory that pointers may refer to")]
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
        let examined = if self.batch.is_full() || HAS_MERGED_PAGES.load(Ordering::Relaxed) {
            None
        } else {
            // SAFETY: the caller's promise.
            unsafe { staging::take(address, length) }
        };
        let was_examined = examined.is_some();
        let place = examined.flatten();
        if place.is_some() || self.batch.bytes() > 0 {
            self.blocked = Some(blocked);
        }
        let Some(place) = place else {
            if was_examined {
                Slot::add(&stats::slot().free_inline, length as u64);
            }
            return false;
        };
        if !place.is_empty() {
            let entry = FreeRange::new(place.start, place.len(), Operation::Unmap);
            // SAFETY: the caller's promise; only this module knows the new place.
            if unsafe { self.batch.push(entry) }.is_err() {
                // Impossible: the batch was not full.
                // SAFETY: as above.
                let _ = unsafe { memory::unmap(place.start, place.len()) };
            }
        }
        true
    }

    /// Frees the ranges, now or in background mode later.
    pub fn finish(self) {
        let Self { batch, blocked } = self;
        let bytes = batch.bytes();
        if bytes > 0 {
            let later = BACKGROUND.load(Ordering::Relaxed) && allows_later(bytes);
            let max_threads = if later {
                beside_caller()
            } else {
                MAX_THREADS.load(Ordering::Relaxed)
            };
            let outcome = run(batch, max_threads, later);
            count(bytes, outcome, later);
        }
        drop(blocked);
    }
}

/// Hands a batch to the workers, and waits unless it is `later`. `None`: done later.
fn run(batch: Batch, max_threads: u32, later: bool) -> Option<JobOutcome> {
    match hand_over(batch, max_threads, later) {
        Ok(_) if later => None,
        Ok(job) => {
            let outcome = HANDOVER.finish(job, &Kernel);
            // The program sees no thread that it did not make, once the call has returned.
            if has_one_thread() && !BACKGROUND.load(Ordering::Relaxed) {
                workers::end(false);
            }
            Some(outcome)
        }
        Err(outcome) => Some(outcome),
    }
}

/// Hands a batch to the workers, and makes missing ones.
///
/// # Errors
/// The result, if this thread freed the batch at once.
pub(super) fn hand_over(mut batch: Batch, max_threads: u32, later: bool) -> Result<Id, JobOutcome> {
    let terms = Terms {
        max_threads,
        piece_bytes: piece_bytes(batch.bytes(), max_threads),
        owner: (!later).then(Linux::me),
    };
    let Some(wakeup) = HANDOVER.submit(&mut batch, terms) else {
        return Err(free_here(batch));
    };
    workers::make(wakeup.make);
    if later && !HANDOVER.has_workers() {
        // No other thread will free it.
        HANDOVER.help(&Kernel);
    }
    Ok(wakeup.job)
}

pub(super) fn free_here(batch: Batch) -> JobOutcome {
    let mut error = None;
    for entry in batch.entries() {
        #[expect(unsafe_code, reason = "frees by address")]
        // SAFETY: the batch is not done before this function returns.
        let refused = unsafe { memory::free(entry) }.err();
        error = error.or(refused);
    }
    Kernel.close(batch);
    JobOutcome { threads: 1, error }
}

fn count(bytes: usize, outcome: Option<JobOutcome>, later: bool) {
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

/// Reports whether `bytes` are available beside the pending memory; sets the budget.
fn allows_later(bytes: usize) -> bool {
    let pending = HANDOVER.pending();
    let all = bytes.saturating_add(pending);
    let room = staging::STAGING
        .with(|_| headroom::headroom(Needed::to_hold(all)))
        .flatten();
    BUDGET_BYTES.store(room.map_or(0, |room| room.min()), Ordering::Relaxed);
    room.is_some_and(|room| room.holds(all))
}

/// Charges an allocation to the budget; without budget waits for the pending memory.
#[cold]
#[inline(never)]
pub(super) fn spend(bytes: usize) {
    let spent = |left: usize| left.checked_sub(bytes);
    if BUDGET_BYTES
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spent)
        .is_err()
    {
        super::drain();
    }
}

/// MADV_DONTNEED of a large range with several threads; `None` leaves it to the kernel. Never in
/// the background: the program may write there after the return.
///
/// # Safety
/// The caller may drop the content of the range.
#[cold]
#[inline(never)]
#[expect(unsafe_code, reason = "drops the content of memory")]
pub unsafe fn discard(address: usize, length: usize) -> Option<Result<(), Errno>> {
    let page = rustix::param::page_size();
    let max_threads = threads(length).filter(|max_threads| *max_threads > 1)?;
    let length = length.checked_next_multiple_of(page)?;
    if !address.is_multiple_of(page) || address.checked_add(length).is_none() {
        return None;
    }
    let _blocked = Blocked::new();
    // The kernel stops at the first mapping that it refuses; threads could not.
    let suits = staging::STAGING.with(|staging| {
        staging::is_worthwhile(staging, address, length, true)
            && memory::is_whole_and_unlocked(address, length).is_ok()
            && staging::mappings(staging, address, length).is_ok()
    });
    if suits == Some(false) {
        Slot::add(&stats::slot().free_inline, length as u64);
    }
    suits.filter(|suits| *suits)?;
    let mut batch = Batch::new(None);
    // SAFETY: the caller's promise, which holds until the batch is done below.
    unsafe { batch.push(FreeRange::new(address, length, Operation::Zap)) }.ok()?;
    let outcome = run(batch, max_threads, false);
    count(length, outcome, false);
    let refused = outcome.and_then(|outcome| outcome.error);
    Some(refused.map_or(Ok(()), |refused| Err(refused.errno)))
}
