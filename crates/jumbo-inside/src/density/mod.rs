//! The one place that decides whether memory may have huge pages now: `decide`; and the calls
//! that give them: `advise`, `collapse`.
//!
//! Every MADV_HUGEPAGE and MADV_COLLAPSE inside the program comes through here, with a `Policy`
//! that names the memory. Memory that may stay sparse begins on base pages, and shared memory has
//! the folios that the kernel's controls give it: both stand in one `table`, which the thread of
//! [`crate::watch`] scans (`scan`). A range that has turned out dense stays there, so that the
//! table tells of each whether it is known to be dense.
//!
//! Of processes that share a mapping one scans it (`owners`).
//!
//! Invariant: nothing here depends on a range being what it was. Advice and a collapse change no
//! byte, whatever is mapped there by now; and what was unmapped is in no range from `forget` on.

mod owners;
mod scan;
pub(crate) mod table;

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

use crate::events::Mechanism;
use crate::ledger::{Slot, stats};
use crate::sync::{millis, now};
use crate::watch::{self, SHORTEST};
use crate::{sandbox, sys};
use owners::Owner;
use table::{PAGE_BYTES, Span, Table};

pub use scan::leave;
pub(crate) use scan::{has_left, share, start_sharing};

/// The memory that a range is, as far as huge pages for it are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The heap, arenas and the pool: filled from their start on. A part of a block is advised too,
    /// to be one mapping with the rest.
    Heap,
    /// A private mapping, or a step of the break, from a whole block on.
    Mapping,
    /// Addresses that the program has reserved: no memory, and not counted. What is refused here is
    /// refused again when the program makes memory of it.
    Reservation,
    /// Memory that the program makes of reserved addresses: on base pages until it is dense, if it
    /// can be scanned.
    Committed,
    /// Memory that processes share: the kernel's controls have the last word.
    Shared,
    /// Text that the program maps from a file, from a whole block on.
    Text,
    /// Text, data and bss that were loaded with the program, in place and as copies.
    Segment,
}

/// The answer to [`decide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It may have them from its first touch on.
    Advise,
    /// It begins on base pages. The thread collapses what turns out dense.
    BaseForNow,
    /// It may not have them: a seccomp filter, or no whole block fits.
    Never,
}

/// A range that is scanned.
#[derive(Debug)]
struct Note {
    is_shared: AtomicBool,
    /// Some of its pages may be missing from a block that is collapsed.
    is_lax: AtomicBool,
    owner: Owner,
    /// When it was added: [`millis`] of [`now`].
    born_millis: AtomicU64,
    /// The address up to which blocks were counted, where the kernel does not say which are huge.
    counted: AtomicUsize,
    /// The address at which the last scan was broken off, 0 where it was not.
    next: AtomicUsize,
    /// The findings of that scan: of private memory the blocks of which something is resident, and what
    /// is; of shared memory what it collapsed.
    touched_blocks: AtomicUsize,
    found_bytes: AtomicUsize,
}

impl Note {
    const fn new() -> Self {
        Self {
            is_shared: AtomicBool::new(false),
            is_lax: AtomicBool::new(false),
            owner: Owner::none(),
            born_millis: AtomicU64::new(0),
            counted: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            touched_blocks: AtomicUsize::new(0),
            found_bytes: AtomicUsize::new(0),
        }
    }

    fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    fn begin(&self, is_shared: bool, is_lax: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
        self.is_lax.store(is_lax, Ordering::Relaxed);
        self.owner.clear();
        self.born_millis.store(millis(now()), Ordering::Relaxed);
        self.counted.store(0, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.found_bytes.store(0, Ordering::Relaxed);
    }
}

/// All ranges that are scanned, or were found dense.
static RANGES: Table<Note, 128> = Table::new([const { Note::new() }; 128]);
/// Whether there were any.
static IS_ANY: AtomicBool = AtomicBool::new(false);
/// The size of a block: what one PMD maps. 0: not started.
static PMD_BYTES: AtomicUsize = AtomicUsize::new(0);
/// How much of a block may be missing when it is collapsed.
static MISSING_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Blocks of `pmd` bytes, of which so many percent may be missing.
pub(crate) fn start(pmd: usize, max_waste: usize) {
    let missing = (pmd / PAGE_BYTES).saturating_mul(max_waste) / 100;
    let missing = missing.saturating_mul(PAGE_BYTES).min(pmd);
    MISSING_BYTES.store(missing, Ordering::Relaxed);
    PMD_BYTES.store(pmd, Ordering::Release);
}

#[inline(always)]
fn is_any() -> bool {
    IS_ANY.load(Ordering::Relaxed)
}

/// Whether a range may have huge pages now. What is to begin on base pages is scanned from here on.
pub(crate) fn decide(range: &Range<usize>, policy: Policy) -> Decision {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    let has_block = || {
        let first = range.start.next_multiple_of(pmd.max(1));
        pmd != 0 && first.saturating_add(pmd) <= range.end
    };
    match policy {
        _ if !sandbox::allows_advice() => Decision::Never,
        Policy::Mapping | Policy::Reservation | Policy::Text if !has_block() => Decision::Never,
        Policy::Committed if begin_on_base_pages(range, pmd) => Decision::BaseForNow,
        _ => Decision::Advise,
    }
}

/// Has a range scanned that may stay sparse; false where it cannot be, or is the rest of one that
/// is dense.
fn begin_on_base_pages(range: &Range<usize>, pmd: usize) -> bool {
    if pmd == 0 || watch::is_anothers() || sandbox::is_entered() {
        return false;
    }
    let Some(new) = Span::new(range) else {
        return false;
    };
    let is_scanned = match RANGES.join(&new, |note| !note.is_shared()) {
        Some(before) => !before.is_dense(),
        None => {
            new.blocks(pmd).len() >= scan::MIN_TOUCHED_BLOCKS * pmd
                && RANGES.add(&new, |note| note.begin(false, true))
        }
    };
    if is_scanned {
        IS_ANY.store(true, Ordering::Release);
        scan::begin(SHORTEST);
    }
    is_scanned
}

/// The program unmaps a range, maps something else there, or wants it on base pages. Of a shared
/// mapping of which only the first address is known `length` is 1 at most: all of it goes.
#[inline(always)]
fn forget(address: usize, length: usize) {
    if is_any() {
        cut(address, length);
    }
}

#[cold]
fn cut(address: usize, length: usize) {
    let holds = |(slot, span): (table::Slot<'_, Note>, Span)| {
        (slot.note.is_shared() && span.range().contains(&address)).then_some(span)
    };
    let whole = match length {
        0 | 1 => RANGES.each().find_map(holds),
        _ => None,
    };
    if let Some(gone) = whole.or_else(|| Span::new(&(address..address.saturating_add(length)))) {
        RANGES.cut(&gone, |note| note.owner.release());
    }
}

/// MADV_HUGEPAGE, where [`decide`] is for it; counted as the policy says.
///
/// # Errors
/// EAGAIN: it begins on base pages; EINVAL: no whole block; EPERM: a filter; else the kernel's.
pub(crate) fn advise(range: &Range<usize>, policy: Policy) -> Result<()> {
    let at = with_exposed_provenance_mut(range.start);
    let (answer, is_tried) = match decide(range, policy) {
        Decision::Advise => {
            #[expect(unsafe_code, reason = "advises memory")]
            // SAFETY: MADV_HUGEPAGE changes how memory is backed, never what it holds.
            let answer = unsafe { mm::madvise(at, range.len(), Advice::LinuxHugepage) };
            (answer, true)
        }
        Decision::BaseForNow => (Err(Errno::AGAIN), false),
        Decision::Never if sandbox::allows_advice() => (Err(Errno::INVAL), false),
        Decision::Never => (Err(Errno::PERM), true),
    };
    let slot = stats::slot();
    if is_tried && matches!(policy, Policy::Heap | Policy::Mapping | Policy::Text) {
        stats::advised(range.len(), answer.err());
    }
    if policy == Policy::Mapping {
        let count = match answer {
            Ok(()) => &slot.maps_advised,
            Err(_) => &slot.maps_left,
        };
        Slot::add(count, range.len() as u64);
    }
    answer
}

/// MADV_COLLAPSE. Harmless whatever is mapped there by now: no byte changes.
///
/// # Errors
/// Those of [`sys::collapse`]; EPERM: a filter.
pub(crate) fn collapse(range: &Range<usize>, policy: Policy) -> Result<()> {
    if !sandbox::allows_advice() {
        return Err(Errno::PERM);
    }
    let answer = sys::collapse(range.start, range.len());
    if answer.is_ok() && !matches!(policy, Policy::Shared | Policy::Segment) {
        stats::collapsed(range.len());
    }
    answer
}

/// Writes down why shared memory has not more.
pub(crate) fn record_reason(why: u32) {
    let reasons = &stats::slot().shm_reasons;
    reasons.fetch_or(why, Ordering::Relaxed);
}

/// The events that concern memory which is scanned.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        forget(address, length);
    }

    fn advising(address: usize, length: usize, advice: i32) {
        match advice {
            libc::MADV_NOHUGEPAGE => forget(address, length),
            libc::MADV_REMOVE => owners::punched(),
            _ => {}
        }
    }

    fn punching() {
        owners::punched();
    }

    fn about_to_fork() {
        scan::about_to_fork();
    }

    fn has_forked() {
        scan::has_forked();
    }

    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn is_forked(_pid: u32) {
        // SAFETY: the caller's promise: the watching thread is heard before.
        unsafe { scan::forked() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_a_whole_block_is_advised_of_the_heap_alone() {
        let pmd = 2 << 20;
        start(pmd, 5);
        // Another test may be about to install a filter.
        let is_advised = |range: Range<usize>, policy| {
            (0..1000).any(|_| decide(&range, policy) == Decision::Advise)
        };
        assert!(is_advised(0..pmd - 1, Policy::Heap));
        assert!(is_advised(0..pmd, Policy::Mapping));
        assert!(is_advised(0..pmd, Policy::Committed), "small");
        assert!(!is_advised(1..2 * pmd - 1, Policy::Reservation));
    }
}
