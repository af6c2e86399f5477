//! Decides whether memory may have huge pages now: `decide`. Requests them: `advise`, `collapse`.
//!
//! All MADV_HUGEPAGE and MADV_COLLAPSE calls inside the program go through this module, with a
//! `Policy`. Unless `--max-waste=unbounded`, private memory earns huge pages:
//! - `credit` bounds the huge and untouched memory of the process;
//! - `blocks` has a state for each block of private memory: waiting on base pages, or huge;
//! - `tracked` has the table of all blocks, and changes their charges and advice;
//! - `measure` finds the touched part of a block;
//! - `fill` advises blocks within the credit;
//! - `filling` advises blocks that a call populates;
//! - `ahead` advises blocks before the program fills them, on a thread;
//! - `dense` collapses the full ones there;
//! - `pace` bounds the CPU time of both;
//! - `touch` measures whether huge pages cost more than base pages at this time;
//! - `missing` makes untouched pages missing again, before the program handles their faults;
//! - [`program_break`] follows the C library's own heap.
//!
//! Shared memory has the folio sizes of the kernel's controls. Its ranges are in a `table`, which
//! the thread of [`crate::watch`] scans (`scan`). One of the sharing processes scans it (`owners`).
//!
//! Invariant: correctness never depends on the present content of a range. Advice and collapse
//! change no byte of any mapping, and `forget` removes unmapped memory from all ranges.

mod ahead;
mod blocks;
mod credit;
mod dense;
mod fill;
mod filling;
mod measure;
mod missing;
mod owners;
mod pace;
pub mod program_break;
mod scan;
pub(crate) mod table;
mod touch;
mod tracked;

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use crate::events::Mechanism;
use crate::ledger::{Slot, stats};
use crate::orders::MaxWaste;
use crate::sync::{millis, now};
use crate::{sandbox, watch};
use jumbo_sys as sys;
use owners::Owner;
use table::{PAGE_BYTES, RangeSlot, RangeTable, Span};

pub(crate) use credit::floor;
pub(crate) use fill::{
    block_bytes, dropped, dropped_by_sparse, forget as forget_private, grown, is_cut, moved,
    moving, opened, resident_memory,
};
pub(crate) use filling::{begin_filling, end_filling};
pub(crate) use measure::{hash, is_filled, is_resident};
pub use missing::make_missing;
pub use scan::leave;
pub(crate) use scan::{has_left, share, start_sharing};

/// Kind of memory, for the decision on huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The heap. The partial block at the start of a range belongs to the heap too.
    Heap,
    /// Private mapping or step of the break, from its first whole block.
    Mapping,
    /// Reserved addresses, not charged. Blocks wait until the program makes them accessible.
    Reservation,
    /// Reserved addresses that become memory. Without a bound, large ranges that can be scanned
    /// start on base pages until they are dense.
    Committed,
    /// Pool pages; the user has set the size of the pool.
    Pool,
    /// Shared memory; the kernel's controls decide.
    Shared,
    /// Text that the program maps from a file, from its first whole block.
    Text,
    /// Text, data and bss loaded with the program, in place and copied.
    Segment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Huge pages from the first touch.
    Advise,
    /// Base pages first; the thread collapses dense blocks.
    BaseForNow,
    /// Never: a seccomp filter, or no whole block.
    Never,
}

#[derive(Debug)]
struct RangeNote {
    /// Allows missing pages in a block that is collapsed.
    is_lax: AtomicBool,
    owner: Owner,
    /// Time of addition: [`millis`] of [`now`].
    born_millis: AtomicU64,
    /// End of the counted blocks, where the kernel does not report which are huge.
    counted: AtomicUsize,
    /// Address at which the last scan stopped, 0 after a complete one.
    next: AtomicUsize,
    /// Bytes collapsed by the current scan.
    found_bytes: AtomicUsize,
}

impl RangeNote {
    const fn new() -> Self {
        Self {
            is_lax: AtomicBool::new(false),
            owner: Owner::none(),
            born_millis: AtomicU64::new(0),
            counted: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            found_bytes: AtomicUsize::new(0),
        }
    }

    fn begin(&self, is_lax: bool) {
        self.is_lax.store(is_lax, Ordering::Relaxed);
        self.owner.clear();
        self.born_millis.store(millis(now()), Ordering::Relaxed);
        self.counted.store(0, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.found_bytes.store(0, Ordering::Relaxed);
    }
}

impl table::Note for RangeNote {
    fn copy(&self, from: &Self) {
        self.begin(from.is_lax.load(Ordering::Relaxed));
        self.owner.copy(&from.owner);
    }
}

crate::one_page::table! {
    /// Shared ranges that are scanned.
    static RANGES: RangeTable<RangeNote, 512> = RangeTable::new([const { RangeNote::new() }; 512]);
}
crate::one_page! {
    /// Set with the first shared range.
    static HAS_RANGES: AtomicBool = AtomicBool::new(false);
}
/// Minimum of available memory for a collapse, which takes a huge page before it frees base pages.
const MIN_ROOM_BYTES: usize = 64 << 20;
/// Block size: the span of one PMD. 0 before the start.
static PMD_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Private memory earns its huge pages.
static IS_BOUNDED: AtomicBool = AtomicBool::new(false);
/// Maximum missing part of a block that is collapsed.
static MISSING_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Starts with blocks of `pmd` bytes. `huge_at_once`: without a measurement of first touches.
pub(crate) fn start(pmd: usize, max_waste: MaxWaste, huge_at_once: bool) {
    IS_BOUNDED.store(max_waste != MaxWaste::Unbounded, Ordering::Relaxed);
    let percent = max_waste.percent();
    let missing = (pmd / PAGE_BYTES).saturating_mul(percent) / 100;
    let missing = missing.saturating_mul(PAGE_BYTES).min(pmd);
    MISSING_BYTES.store(missing, Ordering::Relaxed);
    credit::start(percent);
    touch::start(huge_at_once);
    PMD_BYTES.store(pmd, Ordering::Release);
}

/// Returns the maximum memory, in bytes, that the heap may hold beyond its live blocks: the limit
/// on huge and untouched memory, at least that of a small program. `usize::MAX`: no limit.
pub fn allowance() -> usize {
    match IS_BOUNDED.load(Ordering::Relaxed) {
        true => credit::limit().max(floor()),
        false => usize::MAX,
    }
}

pub(crate) fn is_bounded() -> bool {
    IS_BOUNDED.load(Ordering::Relaxed)
}

#[inline(always)]
fn has_ranges() -> bool {
    HAS_RANGES.load(Ordering::Relaxed)
}

/// Decides whether a range may have huge pages now, and starts to track the rest of it on base
/// pages. Also returns the part to advise.
pub(crate) fn decide(range: &Range<usize>, policy: Policy) -> (Decision, Range<usize>) {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    let nothing = range.start..range.start;
    let is_bounded = IS_BOUNDED.load(Ordering::Relaxed);
    let has_block = || {
        let first = range.start.next_multiple_of(pmd.max(1));
        pmd != 0 && first.saturating_add(pmd) <= range.end
    };
    match policy {
        _ if !sandbox::allows_advice() => (Decision::Never, nothing),
        Policy::Mapping | Policy::Committed | Policy::Reservation | Policy::Text
            if !has_block() =>
        {
            (Decision::Never, nothing)
        }
        Policy::Committed if !is_bounded && may_wait(range, pmd) => {
            fill::begin_on_base_pages(range);
            (Decision::BaseForNow, nothing)
        }
        Policy::Heap | Policy::Mapping | Policy::Committed | Policy::Reservation if !is_bounded => {
            (Decision::Advise, range.clone())
        }
        Policy::Reservation => {
            if range.len() <= MAX_RESERVATION_BYTES {
                fill::begin_on_base_pages(range);
            }
            (Decision::BaseForNow, nothing)
        }
        Policy::Heap | Policy::Mapping | Policy::Committed => {
            let advised = fill::claim(range, policy == Policy::Heap);
            match advised.is_empty() {
                true => (Decision::BaseForNow, advised),
                false => (Decision::Advise, advised),
            }
        }
        Policy::Pool | Policy::Shared | Policy::Text | Policy::Segment => {
            (Decision::Advise, range.clone())
        }
    }
}

/// Reports whether a range that may stay sparse is large enough and can be scanned.
fn may_wait(range: &Range<usize>, pmd: usize) -> bool {
    range.len() >= MIN_COMMITTED_BLOCKS * pmd
        && !watch::is_foreign()
        && !sandbox::is_entered()
        && !fill::is_behind_huge(range.start)
}

/// Minimum size of a committed range that starts on base pages. A database initializes the headers
/// of a buffer pool long before it fills the pool; smaller ranges are advised at once.
const MIN_COMMITTED_BLOCKS: usize = 8;

/// Maximum size of a reservation whose blocks are tracked.
const MAX_RESERVATION_BYTES: usize = 1 << 40;

/// Forgets a range that the program unmaps, maps over or wants on base pages. `length` is at most 1
/// for a shared mapping of which only the first address is known: the whole mapping goes.
#[inline(always)]
fn forget(address: usize, length: usize) {
    if has_ranges() {
        cut(address, length);
    }
    let range = address..address.saturating_add(length);
    if length >= PMD_BYTES.load(Ordering::Relaxed) {
        fill::forget(&range);
    }
    fill::forget_parts(&range);
}

/// Keeps private memory on base pages until it is dense.
pub(crate) fn begin_on_base_pages(range: &Range<usize>) {
    if sandbox::allows_advice() && PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::begin_on_base_pages(range);
    }
}

#[cold]
fn cut(address: usize, length: usize) {
    let holds = |(_, span): (RangeSlot<'_, RangeNote>, Span)| {
        span.range().contains(&address).then_some(span)
    };
    let whole = match length {
        0 | 1 => RANGES.each().find_map(holds),
        _ => None,
    };
    if let Some(gone) = whole.or_else(|| Span::new(&(address..address.saturating_add(length)))) {
        RANGES.cut(&gone, |note| note.owner.release());
    }
}

/// Calls MADV_HUGEPAGE on the part that [`decide`] allows; counts by policy.
///
/// # Errors
/// EAGAIN: starts on base pages. EINVAL: no whole block. EPERM: a filter. Else the kernel's error.
pub(crate) fn advise(range: &Range<usize>, policy: Policy) -> Result<()> {
    let (decision, advised) = decide(range, policy);
    let (answer, is_tried) = match decision {
        Decision::Advise => (tracked::advise_huge(&advised), true),
        Decision::BaseForNow => (Err(Errno::AGAIN), false),
        Decision::Never if sandbox::allows_advice() => (Err(Errno::INVAL), false),
        Decision::Never => (Err(Errno::PERM), true),
    };
    if policy == Policy::Heap && decision != Decision::Never && is_bounded() {
        touch::measure(range, &advised);
    }
    if is_tried && matches!(policy, Policy::Heap | Policy::Mapping | Policy::Text) {
        stats::advised(advised.len(), answer.err());
    }
    if policy == Policy::Mapping {
        let slot = stats::slot();
        let is_ours = answer.is_ok() || answer == Err(Errno::AGAIN);
        let count = match is_ours {
            true => &slot.maps_advised,
            false => &slot.maps_left,
        };
        Slot::add(count, range.len() as u64);
    }
    answer
}

/// Calls MADV_COLLAPSE, which changes no byte of any mapping.
///
/// # Errors
/// As [`sys::collapse`]; EPERM: a filter.
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

pub(crate) fn record_reason(why: u32) {
    let reasons = &stats::slot().shm_reasons;
    reasons.fetch_or(why, Ordering::Relaxed);
}

/// Events for memory that is scanned.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        forget(address, length);
    }

    fn moving(address: usize, old: usize, new: usize) {
        if has_ranges() {
            cut(address, old.max(1));
        }
        let range = address..address.saturating_add(old);
        match old > new {
            true => forget(range.start.saturating_add(new), old - new),
            false => moving(&range),
        }
    }

    fn moved(address: usize, old: usize, to: usize, new: usize) {
        moved(address, to, old.min(new));
        if new > old {
            grown(&(to.saturating_add(old)..to.saturating_add(new)));
        }
    }

    #[inline(always)]
    fn protected(address: usize, length: usize, protection: i32) {
        if protection & libc::PROT_WRITE != 0 {
            opened(&(address..address.saturating_add(length)));
        }
    }

    fn advising(address: usize, length: usize, advice: i32) {
        match advice {
            libc::MADV_NOHUGEPAGE => forget(address, length),
            libc::MADV_HUGEPAGE => {
                fill::advised_by_program(&(address..address.saturating_add(length)))
            }
            libc::MADV_DONTNEED | libc::MADV_FREE => {
                dropped(&(address..address.saturating_add(length)));
            }
            libc::MADV_REMOVE => owners::punched(),
            _ => {}
        }
    }

    fn punching() {
        owners::punched();
    }

    // Now no other thread can count on the lowest free descriptor.
    fn before_thread() {
        if !fill::has_read_room() {
            Self::before_confinement();
        }
    }

    fn before_confinement() {
        if is_bounded() && PMD_BYTES.load(Ordering::Relaxed) != 0 {
            fill::read_room_now();
        }
    }

    fn about_to_fork() {
        scan::about_to_fork();
    }

    fn has_forked() {
        scan::has_forked();
    }

    #[expect(unsafe_code, reason = "passes on the caller's promise")]
    unsafe fn is_forked(_pid: u32) {
        fill::forked();
        pace::forked();
        // SAFETY: the caller's promise: `watch` hears the event first.
        unsafe { scan::forked() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_a_whole_block_is_not_advised() {
        let pmd = 2 << 20;
        start(pmd, MaxWaste::Percent(5), false);
        // Another test may be about to install a filter.
        let is_advised = |range: Range<usize>, policy| {
            (0..1000).any(|_| decide(&range, policy).0 == Decision::Advise)
        };
        assert!(!is_advised(0..pmd - 1, Policy::Heap));
        assert!(is_advised(0..pmd, Policy::Mapping));
        assert!(!is_advised(1..2 * pmd - 1, Policy::Mapping));
    }
}
