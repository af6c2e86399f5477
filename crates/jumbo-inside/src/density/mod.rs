//! The one place that decides whether memory may have huge pages now: `decide`; and the calls
//! that give them: `advise`, `collapse`.
//!
//! Every MADV_HUGEPAGE and MADV_COLLAPSE inside the program comes through here, with a `Policy`
//! that names the memory. Private memory earns its huge pages, but with `--max-waste=unbounded`:
//! - `credit` bounds the memory that is huge and untouched, over all of the process;
//! - `blocks` has a state for each block of private memory: it waits on base pages, or is huge;
//! - `look` finds out how much of a block was touched;
//! - `fill` advises blocks as far as the credit goes;
//! - `ahead` has a thread advise those ahead of what fills up, and collapse what filled up;
//! - [`program_break`] has glibc's own heap do so.
//!
//! Shared memory has the folios that the kernel's controls give it. It stands in one `table`, which
//! the thread of [`crate::watch`] scans (`scan`). Of processes that share a mapping one scans it
//! (`owners`).
//!
//! Invariant: nothing here depends on a range being what it was. Advice and a collapse change no
//! byte, whatever is mapped there by now; and what was unmapped is in no range from `forget` on.

mod ahead;
mod blocks;
mod credit;
mod fill;
mod look;
mod owners;
pub mod program_break;
mod scan;
pub(crate) mod table;

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use crate::events::Mechanism;
use crate::ledger::{Slot, stats};
use crate::orders::MaxWaste;
use crate::sync::{millis, now};
use crate::{sandbox, sys, watch};
use owners::Owner;
use table::{PAGE_BYTES, Span, Table};

pub(crate) use fill::resident_memory;
pub use scan::leave;
pub(crate) use scan::{has_left, share, start_sharing};

/// The memory that a range is, as far as huge pages for it are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The heap and arenas. The block that the start of a range is in is the heap's as well.
    Heap,
    /// A private mapping, or a step of the break, from a whole block on.
    Mapping,
    /// Addresses that the program has reserved: no memory, and not counted. They wait until the
    /// program makes memory of them.
    Reservation,
    /// Memory that the program makes of reserved addresses: without a bound it is on base pages until
    /// it is dense, if it is large and can be scanned.
    Committed,
    /// Pages of the pool, whose size the user has set.
    Pool,
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

/// A shared range that is scanned.
#[derive(Debug)]
struct Note {
    /// Some of its pages may be missing from a block that is collapsed.
    is_lax: AtomicBool,
    owner: Owner,
    /// When it was added: [`millis`] of [`now`].
    born_millis: AtomicU64,
    /// The address up to which blocks were counted, where the kernel does not say which are huge.
    counted: AtomicUsize,
    /// The address at which the last scan was broken off, 0 where it was not.
    next: AtomicUsize,
    /// The bytes that this scan collapsed.
    found_bytes: AtomicUsize,
}

impl Note {
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

crate::one_page::table! {
    /// All shared ranges that are scanned.
    static RANGES: Table<Note, 128> = Table::new([const { Note::new() }; 128]);
}
crate::one_page! {
    /// Whether there were any.
    static IS_ANY: AtomicBool = AtomicBool::new(false);
}
/// The size of a block: what one PMD maps. 0: not started.
static PMD_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Whether memory has to earn its huge pages.
static IS_BOUNDED: AtomicBool = AtomicBool::new(false);
/// How much of a block may be missing when it is collapsed.
static MISSING_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Blocks of `pmd` bytes.
pub(crate) fn start(pmd: usize, max_waste: MaxWaste) {
    IS_BOUNDED.store(max_waste != MaxWaste::Unbounded, Ordering::Relaxed);
    let percent = max_waste.percent();
    let missing = (pmd / PAGE_BYTES).saturating_mul(percent) / 100;
    let missing = missing.saturating_mul(PAGE_BYTES).min(pmd);
    MISSING_BYTES.store(missing, Ordering::Relaxed);
    credit::start(percent);
    fill::start();
    PMD_BYTES.store(pmd, Ordering::Release);
    if max_waste != MaxWaste::Unbounded {
        program_break::start();
    }
}

/// The memory that the heap may hold beyond what is live in it, in bytes: as much as may be huge and
/// untouched, and 16 MiB in any case. `usize::MAX`: no limit.
pub fn allowance() -> usize {
    match IS_BOUNDED.load(Ordering::Relaxed) {
        true => credit::limit().max(credit::FLOOR_BYTES),
        false => usize::MAX,
    }
}

/// Whether memory has to earn its huge pages.
pub(crate) fn is_bounded() -> bool {
    IS_BOUNDED.load(Ordering::Relaxed)
}

#[inline(always)]
fn is_any() -> bool {
    IS_ANY.load(Ordering::Relaxed)
}

/// Whether a range may have huge pages now. What is to begin on base pages is scanned from here on.
/// The second value is what may be advised: less than the range where huge pages are earned.
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

/// Whether a range that may stay sparse can be scanned, and is large enough.
fn may_wait(range: &Range<usize>, pmd: usize) -> bool {
    range.len() >= MIN_COMMITTED_BLOCKS * pmd
        && !watch::is_anothers()
        && !sandbox::is_entered()
        && !fill::is_behind_huge(range.start)
}

/// A database lays out the headers of a buffer pool long before it fills it. What is smaller is advised at once.
const MIN_COMMITTED_BLOCKS: usize = 8;

/// The largest reservation of which parts may be huge later.
const MAX_RESERVATION_BYTES: usize = 1 << 40;

/// The program unmaps a range, maps something else there, or wants it on base pages. Of a shared
/// mapping of which only the first address is known `length` is 1 at most: all of it goes.
#[inline(always)]
fn forget(address: usize, length: usize) {
    if is_any() {
        cut(address, length);
    }
    let range = address..address.saturating_add(length);
    if length >= PMD_BYTES.load(Ordering::Relaxed) {
        forget_private(&range);
    }
    if PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::forget_parts(&range);
    }
}

/// Private memory is unmapped, by the program or by us.
pub(crate) fn forget_private(range: &Range<usize>) {
    if PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::forget(range);
    }
}

/// What private memory holds is dropped, by the program or by us. Before the call.
pub(crate) fn dropped(range: &Range<usize>) {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    if pmd != 0 && range.len() >= pmd {
        fill::dropped(range);
    }
}

/// Leaves private memory on base pages until it is dense.
pub(crate) fn begin_on_base_pages(range: &Range<usize>) {
    if sandbox::allows_advice() && PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::begin_on_base_pages(range);
    }
}

/// Reserved memory has become accessible.
pub(crate) fn opened(range: &Range<usize>) {
    if PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::opened(range);
    }
}

/// Whether advice may have cut the mapping that a private range is.
pub(crate) fn is_cut(range: &Range<usize>) -> bool {
    PMD_BYTES.load(Ordering::Relaxed) != 0 && fill::is_cut(range)
}

/// Before a private range moves or grows by mremap(2).
pub(crate) fn moving(range: &Range<usize>) {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    if pmd != 0 && range.len() >= pmd {
        fill::moving(range);
    }
}

/// A mapping has grown by a range: it has the advice of what is in front.
pub(crate) fn grown(range: &Range<usize>) {
    if PMD_BYTES.load(Ordering::Relaxed) != 0 {
        fill::grown(range);
    }
}

/// A private range has moved.
pub(crate) fn moved(from: usize, to: usize, length: usize) {
    let pmd = PMD_BYTES.load(Ordering::Relaxed);
    if pmd != 0 && length >= pmd {
        fill::moved(from, to, length);
    }
}

#[cold]
fn cut(address: usize, length: usize) {
    let holds =
        |(_, span): (table::Slot<'_, Note>, Span)| span.range().contains(&address).then_some(span);
    let whole = match length {
        0 | 1 => RANGES.each().find_map(holds),
        _ => None,
    };
    if let Some(gone) = whole.or_else(|| Span::new(&(address..address.saturating_add(length)))) {
        RANGES.cut(&gone, |note| note.owner.release());
    }
}

/// MADV_HUGEPAGE, as far as [`decide`] is for it; counted as the policy says.
///
/// # Errors
/// EAGAIN: it begins on base pages; EINVAL: no whole block; EPERM: a filter; else the kernel's.
pub(crate) fn advise(range: &Range<usize>, policy: Policy) -> Result<()> {
    let (decision, advised) = decide(range, policy);
    let (answer, is_tried) = match decision {
        Decision::Advise => (fill::ask(&advised), true),
        Decision::BaseForNow => (Err(Errno::AGAIN), false),
        Decision::Never if sandbox::allows_advice() => (Err(Errno::INVAL), false),
        Decision::Never => (Err(Errno::PERM), true),
    };
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

    fn moving(address: usize, old: usize, new: usize) {
        if is_any() {
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

    fn about_to_fork() {
        scan::about_to_fork();
    }

    fn has_forked() {
        scan::has_forked();
    }

    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn is_forked(_pid: u32) {
        fill::forked();
        // SAFETY: the caller's promise: the watching thread is heard before.
        unsafe { scan::forked() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_a_whole_block_is_left_alone() {
        let pmd = 2 << 20;
        start(pmd, MaxWaste::Percent(5));
        // Another test may be about to install a filter.
        let is_advised = |range: Range<usize>, policy| {
            (0..1000).any(|_| decide(&range, policy).0 == Decision::Advise)
        };
        assert!(!is_advised(0..pmd - 1, Policy::Heap));
        assert!(is_advised(0..pmd, Policy::Mapping));
        assert!(!is_advised(1..2 * pmd - 1, Policy::Mapping));
    }
}
