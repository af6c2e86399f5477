//! Scan of [`RANGES`] on the thread of [`crate::watch`]: [`scan`].
//!
//! The scan collapses each block that is resident, except for the part that `--max-waste` allows.
//! After a hole was punched, the whole block must be resident: a collapse would fill the hole.
//!
//! No state is kept per block: each scan reads from the kernel which blocks are huge. Before
//! PAGEMAP_SCAN (Linux 6.7) only mincore(2) reports which pages are resident.
//!
//! A collapse of shared memory needs no privilege. The PMD size's `shmem_enabled` must be
//! `inherit`, `always`, `within_size` or `advise` (Linux 6.1;
//! Documentation/admin-guide/mm/transhuge.rst).

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;

use super::measure::resident;
use super::table::{MAX_BYTES, PAGE_BYTES, RangeSlot, Span};
use super::{
    HAS_RANGES, MIN_ROOM_BYTES, MISSING_BYTES, PMD_BYTES, Policy, RANGES, RangeNote, has_ranges,
    owners, record_reason,
};
use crate::headroom::has_room;
use crate::ledger::{Slot, shm_reason as reason, stats};
use crate::sandbox;
use crate::sync::{millis, now};
use crate::watch::{self, Job, MAX_WAIT, MIN_WAIT, Stop, Without, cpu_time};
use jumbo_sys::{self as sys, Pagemap, Pages};

/// Minimum age of a shared mapping that is scanned.
const MIN_SHARED_AGE: Duration = Duration::from_secs(1);
/// Maximum blocks per collapse call. Each call drains the page caches of all CPUs.
const MAX_BATCH_BLOCKS: usize = 8;
const MAX_SCAN_TIME: Duration = Duration::from_millis(50);
/// Maximum share of a CPU for the scans, as a divisor.
const CPU_SHARE_DIVISOR: u32 = 10;
/// Maximum wait after a scan with new findings.
const MAX_BUSY_WAIT: Duration = Duration::from_millis(500);
/// Maximum threads for a burst of forks, as of a server that starts its processes.
const BURST_THREADS: u64 = 16;

type ScanSlot = RangeSlot<'static, RangeNote>;

static JOB: Job = Job::new(1, scan, without_thread);
/// Wait between two scans without new findings.
static IDLE_MILLIS: AtomicU64 = AtomicU64::new(0);
static FOUND_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Index of the slot at which the last scan stopped.
static NEXT_SLOT: AtomicUsize = AtomicUsize::new(0);
/// Shared memory is scanned. Cleared when the program handles page faults itself.
static IS_SHARING: AtomicBool = AtomicBool::new(false);
/// The program handles page faults itself.
static HAS_LEFT: AtomicBool = AtomicBool::new(false);
/// Earliest time of the next thread for a fork: [`now`], in milliseconds.
static NEXT_THREAD_MILLIS: AtomicU64 = AtomicU64::new(0);

/// Requests a scan soon. If no thread can be made, calls [`without_thread`] before it returns.
pub(super) fn request_scan(wait: Duration) {
    IDLE_MILLIS.store(0, Ordering::Relaxed);
    watch::begin(&JOB, wait);
}

pub(crate) fn start_sharing() {
    if PMD_BYTES.load(Ordering::Relaxed) > PAGE_BYTES {
        IS_SHARING.store(true, Ordering::Release);
    }
}

fn is_sharing() -> bool {
    IS_SHARING.load(Ordering::Acquire) && !sandbox::is_entered()
}

/// Adds a shared mapping to the scan. `is_lax`: allows missing pages in a block that is collapsed.
/// `is_piece`: a piece of a file, which may continue another piece.
pub(crate) fn share(range: &Range<usize>, is_lax: bool, is_piece: bool) {
    if !IS_SHARING.load(Ordering::Acquire) || watch::is_foreign() {
        return;
    }
    // The program may never make the calls below.
    if sandbox::is_entered() {
        return record_reason(reason::FILTER);
    }
    let add = |start: usize| {
        let part = Span::new(&(start..range.end.min(start.saturating_add(MAX_BYTES))));
        let prepare = |note: &RangeNote| {
            note.begin(is_lax);
            note.owner.assign();
        };
        part.is_some_and(|part| RANGES.add(&part, prepare))
    };
    HAS_RANGES.store(true, Ordering::Release);
    let has_page = owners::has_page();
    if has_page && is_piece && extend(range) {
        return request_scan(MIN_SHARED_AGE);
    }
    if !has_page || !range.clone().step_by(MAX_BYTES).all(add) {
        return record_reason(reason::TOO_MANY);
    }
    request_scan(MIN_SHARED_AGE);
}

/// Extends a range by a piece that continues it. A heap that grows in pieces (ZGC) would need more
/// ranges than there are.
fn extend(piece: &Range<usize>) -> bool {
    let is_whole = |at: usize| at.is_multiple_of(PMD_BYTES.load(Ordering::Relaxed));
    RANGES.each().any(|(slot, before)| {
        let Range { start, end } = before.range();
        let both = match (end == piece.start, piece.end == start) {
            (true, _) if is_whole(end) => start..piece.end,
            (_, true) if is_whole(start) => piece.start..end,
            _ => return false,
        };
        // A child of a fork may own the range, and does not have the piece.
        !slot.note.is_lax.load(Ordering::Relaxed)
            && slot.note.owner.claim()
            && Span::new(&both).is_some_and(|after| slot.replace(&before, &after))
    })
}

/// Ends scans and collapses, since the program handles page faults itself from now on
/// (userfaultfd(2)): a scan would cause a fault, or fill a page in its place.
pub fn leave() {
    HAS_LEFT.store(true, Ordering::Relaxed);
    IS_SHARING.store(false, Ordering::Release);
    watch::end();
}

/// Reports whether the program handles page faults itself.
pub(crate) fn has_left() -> bool {
    HAS_LEFT.load(Ordering::Relaxed)
}

/// Releases all ranges before fork(2), which ends the thread: another process may scan them.
pub(super) fn about_to_fork() {
    if is_sharing() {
        owners::release_all();
    }
}

/// Resumes the scan in the parent of a fork. The parent lives as long as the shared memory is
/// needed; a child may end before its first scan.
pub(super) fn has_forked() {
    let is_wanted = || RANGES.each().next().is_some();
    if has_ranges() && is_sharing() && !watch::is_foreign() && is_wanted() {
        // The new process may touch more pages.
        IDLE_MILLIS.store(0, Ordering::Relaxed);
        if is_affordable() {
            request_scan(MIN_SHARED_AGE);
        }
    }
}

/// Reports whether a thread may be made for a fork: one per [`MIN_SHARED_AGE`], with at most
/// [`BURST_THREADS`] saved up.
fn is_affordable() -> bool {
    let (now, each) = (millis(now()), millis(MIN_SHARED_AGE));
    let before = NEXT_THREAD_MILLIS.load(Ordering::Relaxed);
    let next = before.max(now.saturating_sub(BURST_THREADS * each)) + each;
    before <= now
        && NEXT_THREAD_MILLIS
            .compare_exchange(before, next, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

/// Starts a scan in the child of a fork, which has no thread, for ranges without an owner.
///
/// # Safety
/// The process is the child, with one thread, and [`watch`] has heard of the fork.
#[expect(unsafe_code, reason = "passes on the caller's promise")]
pub(super) unsafe fn forked() {
    if has_ranges() {
        RANGES.forked();
    }
    // A filter may kill for the calls of this check.
    if is_sharing() && owners::is_neglected() {
        request_scan(MIN_SHARED_AGE);
    }
}

/// Records the reason why no thread can scan.
fn without_thread(why: Without) {
    if RANGES.each().next().is_some() {
        record_reason(match why {
            Without::Filter => reason::FILTER,
            Without::Room | Without::Kernel => reason::NO_MEMORY,
            Without::Ended => reason::ENDED,
        });
    }
}

/// Scans all ranges on the thread, from the slot at which the last scan stopped.
fn scan(stop: &Stop) -> Option<Duration> {
    if sandbox::is_entered() {
        owners::release_all();
        return None;
    }
    let mut scan = RangeScan::new(stop);
    let (mut soonest, mut is_broken_off) = (MAX_WAIT, false);
    let first = NEXT_SLOT.swap(0, Ordering::Relaxed);
    for (at, slot) in RANGES.slots().enumerate().skip(first) {
        let Some(span) = slot.span() else { continue };
        let born = Duration::from_millis(slot.note.born_millis.load(Ordering::Relaxed));
        if now().saturating_sub(born) < MIN_SHARED_AGE {
            soonest = MIN_SHARED_AGE;
            continue;
        }
        if !slot.note.owner.claim() {
            continue;
        }
        if scan.visit(&slot, &span) {
            NEXT_SLOT.store(at, Ordering::Relaxed);
            is_broken_off = true;
            break;
        }
    }
    let rest = scan.cpu_time().saturating_mul(CPU_SHARE_DIVISOR);
    let next = match is_broken_off {
        true => rest,
        false => rest.max(idle()),
    };
    let is_any = RANGES.each().next().is_some();
    is_any.then(|| next.min(soonest.max(rest)))
}

/// Returns the wait until the next scan: doubled while nothing is new.
fn idle() -> Duration {
    let found = |(slot, _): (ScanSlot, Span)| slot.note.found_bytes.load(Ordering::Relaxed);
    let found = RANGES.each().map(found).fold(0, usize::wrapping_add);
    let is_new = FOUND_BYTES.swap(found, Ordering::Relaxed) != found;
    let before = Duration::from_millis(IDLE_MILLIS.load(Ordering::Relaxed));
    let next = match is_new {
        true => (before / 2).min(MAX_BUSY_WAIT),
        false => before * 2,
    };
    let next = next.clamp(MIN_WAIT, MAX_WAIT);
    IDLE_MILLIS.store(millis(next), Ordering::Relaxed);
    next
}

struct RangeScan<'s> {
    stop: &'s Stop,
    pagemap: Option<Pagemap>,
    began: Duration,
    has_room: bool,
    /// A collapse of the current range found no huge page.
    is_short: bool,
    pmd: usize,
    missing: usize,
}

impl<'s> RangeScan<'s> {
    fn new(stop: &'s Stop) -> Self {
        let here = core::ptr::from_ref(&PMD_BYTES).addr() & !(PAGE_BYTES - 1);
        let is_told = |map: &Pagemap| map.count(here..here + PAGE_BYTES, Pages::Resident).is_ok();
        Self {
            stop,
            began: cpu_time(),
            // Pagemap may be missing, or closed to a process that is not dumpable.
            pagemap: Pagemap::open().ok().filter(is_told),
            has_room: has_room(MIN_ROOM_BYTES),
            is_short: false,
            pmd: PMD_BYTES.load(Ordering::Relaxed),
            missing: MISSING_BYTES.load(Ordering::Relaxed),
        }
    }

    fn cpu_time(&self) -> Duration {
        cpu_time().saturating_sub(self.began)
    }

    /// Collapses the dense blocks of a range that are not huge. Returns true if it stopped early.
    fn visit(&mut self, slot: &ScanSlot, span: &Span) -> bool {
        let (note, pmd, blocks) = (slot.note, self.pmd, span.blocks(self.pmd));
        if !self.has_room {
            record_reason(reason::NO_MEMORY);
            return false;
        }
        let mut at = note.next.swap(0, Ordering::Relaxed);
        if !blocks.contains(&at) {
            at = blocks.start;
            note.found_bytes.store(0, Ordering::Relaxed);
        }
        let mut is_refused = false;
        self.is_short = false;
        while at < blocks.end {
            if self.stop.check_before_wait().is_err() || self.cpu_time() > MAX_SCAN_TIME {
                note.next.store(at, Ordering::Relaxed);
                return true;
            }
            // The program may have unmapped it; a collapse of its successor is harmless.
            if !slot.span().is_some_and(|now| now.range().contains(&at)) {
                return false;
            }
            let mut run = at..at;
            while at < blocks.end.min(run.start + MAX_BATCH_BLOCKS * pmd) {
                at += pmd;
                if !self.is_wanted(&(at - pmd..at), note) {
                    break;
                }
                run.end = at;
            }
            match self.collapse(&run, note) {
                Err(Errno::INVAL) => is_refused = true,
                Err(error) if error != Errno::AGAIN => {
                    record_reason(match error {
                        Errno::BUSY => reason::NO_MEMORY,
                        _ => reason::NO_HUGE,
                    });
                    note.next.store(at, Ordering::Relaxed);
                    return false;
                }
                Err(Errno::NOMEM) => self.is_short = true,
                _ => {}
            }
        }
        let found = note.found_bytes.load(Ordering::Relaxed);
        // One of several blocks may be unmapped by now.
        if is_refused && found == 0 && self.count(&blocks, Pages::Huge) == 0 {
            record_reason(reason::NOT_ALLOWED);
            slot.end(span, |note| note.owner.release());
        }
        false
    }

    /// Returns the bytes of the pages of a kind in a range, 0 if the kernel does not report them.
    fn count(&self, range: &Range<usize>, pages: Pages) -> usize {
        let count = |map: &Pagemap| map.count(range.clone(), pages).unwrap_or(0);
        self.pagemap.as_ref().map_or(0, count)
    }

    fn is_huge(&self, range: &Range<usize>) -> bool {
        self.count(range, Pages::Huge) == range.len()
    }

    /// Reports whether a block is resident and not huge.
    fn is_wanted(&self, block: &Range<usize>, note: &RangeNote) -> bool {
        // A block without its last page may end beyond the file, where a touch must raise SIGBUS.
        // The check also makes sparse memory cheap to scan.
        let last = block.end - PAGE_BYTES;
        if resident(last, PAGE_BYTES) != Ok(Some(PAGE_BYTES)) || self.is_huge(block) {
            return false;
        }
        let is_lax = note.is_lax.load(Ordering::Relaxed) && !note.owner.has_holes();
        let missing = if is_lax { self.missing } else { 0 };
        let resident = resident(block.start, block.len()).ok().flatten();
        if resident.is_none_or(|resident| resident + missing < block.len()) {
            record_reason(reason::IN_PART);
            return false;
        }
        // Another process may have collapsed it; map it here.
        populate(block.start);
        !self.is_huge(block)
    }

    /// Collapses blocks in one call. If that fails, one by one: a block may be another mapping by
    /// now, or locked for a moment. Returns the last error.
    fn collapse(&self, run: &Range<usize>, note: &RangeNote) -> Result<(), Errno> {
        if run.is_empty() {
            return Ok(());
        }
        let mut answer = super::collapse(run, Policy::Shared);
        self.count_collapsed(run, note, answer);
        if answer.is_err() && run.len() > self.pmd {
            for at in run.clone().step_by(self.pmd) {
                answer = self.collapse(&(at..at + self.pmd), note);
                if matches!(answer, Err(Errno::BUSY | Errno::NOMEM)) {
                    break;
                }
            }
        }
        answer
    }

    fn count_collapsed(&self, run: &Range<usize>, note: &RangeNote, answer: Result<(), Errno>) {
        let slot = stats::slot();
        let became = match self.pagemap {
            Some(_) => self.count(run, Pages::Huge),
            // Counted once, since the kernel returns success each time.
            None if answer.is_ok() && note.counted.load(Ordering::Relaxed) < run.end => {
                note.counted.store(run.end, Ordering::Relaxed);
                run.len()
            }
            None => 0,
        };
        note.found_bytes.fetch_add(became, Ordering::Relaxed);
        Slot::add(&slot.shm_collapsed, became as u64);
        if let Err(error) = answer
            && run.len() == self.pmd
            && self.pagemap.is_some()
        {
            let count = match error {
                Errno::BUSY => &slot.shm_fallback_charge,
                _ => &slot.shm_fallback,
            };
            Slot::add(count, 1);
        }
    }
}

/// Maps a resident page as a read would, without SIGBUS. MADV_POPULATE_READ, Linux 5.14.
#[expect(unsafe_code, reason = "advises memory")]
fn populate(address: usize) {
    // SAFETY: makes a page resident, and changes nothing.
    let _ = unsafe { sys::advise(address, PAGE_BYTES, libc::MADV_POPULATE_READ) };
}
