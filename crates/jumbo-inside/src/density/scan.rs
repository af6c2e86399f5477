//! The scan of [`RANGES`], by the thread of [`crate::watch`]: [`scan`].
//!
//! - A block (what a PMD maps) of which all is resident, but for what `--max-waste` allows, is
//!   collapsed. Of memory in which the program has punched a hole every page has to be there: a
//!   collapse would fill the hole.
//!
//! Nothing is kept about a block: whether it is huge is asked of the kernel, each time. A kernel
//! without PAGEMAP_SCAN (before Linux 6.7) does not say it: there mincore(2) says what is there.
//! Shared memory needs no privilege, and
//! the PMD size's `shmem_enabled` at `inherit`, `always`, `within_size` or `advise` (Linux 6.1;
//! Documentation/admin-guide/mm/transhuge.rst).

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;
use rustix::mm::{self, Advice};

use super::table::{self, MAX_BYTES, PAGE_BYTES, Span};
use super::{
    IS_ANY, MISSING_BYTES, Note, PMD_BYTES, Policy, RANGES, is_any, owners, record_reason,
};
use crate::headroom::has_room;
use crate::ledger::{Slot as Counts, shm_reason as reason, stats};
use crate::sandbox;
use crate::sync::{millis, now};
use crate::sys::{self, Pagemap, Pages};
use crate::watch::{self, Job, LONGEST, SHORTEST, Stop, Without, used};

/// The age from which on a shared mapping is scanned.
const MIN_SHARED_AGE: Duration = Duration::from_secs(1);
/// The most blocks that one call collapses: for each call the kernel asks all CPUs for the pages
/// that they keep apart.
const BATCH_BLOCKS: usize = 8;
/// The CPU time of one scan.
const MAX_SCAN: Duration = Duration::from_millis(50);
/// The thread may use one part in so many of a CPU.
const CPU_PARTS: u32 = 10;
/// The longest wait after a scan that found something new.
const MAX_BUSY_WAIT: Duration = Duration::from_millis(500);
/// Memory that is left when blocks are collapsed: a huge page is taken before the base pages go
/// back.
const MIN_ROOM_BYTES: usize = 64 << 20;
/// The most base pages in a shared block: a page of mincore(2)'s answer.
const MAX_BLOCK_PAGES: usize = 4096;
/// The threads for as many forks at once: a server starts its processes in a burst, and then waits
/// for years.
const BURST_THREADS: u64 = 16;

type Slot = table::Slot<'static, Note>;

static JOB: Job = Job::new(1, scan, without_thread);
/// The time between two scans where they find nothing new.
static IDLE_MILLIS: AtomicU64 = AtomicU64::new(0);
/// The findings of the last scan.
static FOUND_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The number of the slot at which the last scan was broken off.
static NEXT_SLOT: AtomicUsize = AtomicUsize::new(0);
/// Shared memory is scanned, until the program answers page faults itself.
static IS_SHARING: AtomicBool = AtomicBool::new(false);
/// The program answers page faults itself.
static HAS_LEFT: AtomicBool = AtomicBool::new(false);
/// When the next thread may be made for a fork: [`now`], in milliseconds.
static NEXT_THREAD_MILLIS: AtomicU64 = AtomicU64::new(0);

/// Has the thread scan soon. Where there can be none, [`without_thread`] has been called by the end
/// of it.
pub(super) fn begin(wait: Duration) {
    IDLE_MILLIS.store(0, Ordering::Relaxed);
    watch::begin(&JOB, wait);
}

/// Starts scanning shared mappings.
pub(crate) fn start_sharing() {
    let pages = PMD_BYTES.load(Ordering::Relaxed) / PAGE_BYTES;
    if (2..=MAX_BLOCK_PAGES).contains(&pages) {
        IS_SHARING.store(true, Ordering::Release);
    }
}

fn is_sharing() -> bool {
    IS_SHARING.load(Ordering::Acquire) && !sandbox::is_entered()
}

/// Has a shared mapping scanned. `is_lax`: some pages may be missing from a block that is
/// collapsed.
pub(crate) fn share(range: &Range<usize>, is_lax: bool) {
    if !IS_SHARING.load(Ordering::Acquire) || watch::is_anothers() {
        return;
    }
    // From here on calls are made that the program may never make.
    if sandbox::is_entered() {
        return record_reason(reason::FILTER);
    }
    let add = |start: usize| {
        let part = Span::new(&(start..range.end.min(start.saturating_add(MAX_BYTES))));
        let prepare = |note: &Note| {
            note.begin(is_lax);
            note.owner.assign();
        };
        part.is_some_and(|part| RANGES.add(&part, prepare))
    };
    IS_ANY.store(true, Ordering::Release);
    if !owners::are_known() || !range.clone().step_by(MAX_BYTES).all(add) {
        return record_reason(reason::TOO_MANY);
    }
    begin(MIN_SHARED_AGE);
}

/// The program answers page faults itself from now on (userfaultfd(2)): a scan would be a fault to
/// answer, or fill what it wants to. Nothing is collapsed any more, and no range is ours.
pub fn leave() {
    HAS_LEFT.store(true, Ordering::Relaxed);
    IS_SHARING.store(false, Ordering::Release);
    watch::end();
}

/// Whether the program does.
pub(crate) fn has_left() -> bool {
    HAS_LEFT.load(Ordering::Relaxed)
}

/// Before fork(2), for which the thread is gone: another process may scan what this one did.
pub(super) fn about_to_fork() {
    if is_sharing() {
        owners::release_all();
    }
}

/// After fork(2), in the process that forked: it goes on. A child may end before it has seen
/// anything, and the process that forks it is there as long as what they share is needed.
pub(super) fn has_forked() {
    let is_wanted = || RANGES.each().next().is_some();
    if is_any() && is_sharing() && !watch::is_anothers() && is_wanted() {
        // The new process may touch what was not.
        IDLE_MILLIS.store(0, Ordering::Relaxed);
        if is_affordable() {
            begin(MIN_SHARED_AGE);
        }
    }
}

/// Whether one more thread may be made for a fork: one in [`MIN_SHARED_AGE`], and as many as were
/// saved up, at most [`BURST_THREADS`].
fn is_affordable() -> bool {
    let (now, each) = (millis(now()), millis(MIN_SHARED_AGE));
    let before = NEXT_THREAD_MILLIS.load(Ordering::Relaxed);
    let next = before.max(now.saturating_sub(BURST_THREADS * each)) + each;
    before <= now
        && NEXT_THREAD_MILLIS
            .compare_exchange(before, next, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

/// In the child of a fork, which has no thread: it scans what it shares, if no process does.
///
/// # Safety
/// This is the child, with one thread, and [`watch`] has heard of it.
#[expect(unsafe_code, reason = "its caller's promise")]
pub(super) unsafe fn forked() {
    if is_any() {
        RANGES.forked();
    }
    // A filter may end a program that asks.
    if is_sharing() && owners::is_neglected() {
        begin(MIN_SHARED_AGE);
    }
}

/// No thread can scan.
fn without_thread(why: Without) {
    if RANGES.each().next().is_some() {
        record_reason(match why {
            Without::Filter => reason::FILTER,
            Without::Room | Without::Kernel => reason::NO_MEMORY,
            Without::Ended => reason::ENDED,
        });
    }
}

/// The thread's scan of all ranges, from where the last one was broken off.
fn scan(stop: &Stop) -> Option<Duration> {
    if sandbox::is_entered() {
        owners::release_all();
        return None;
    }
    let mut scan = Scan::new(stop);
    let (mut soonest, mut is_broken_off) = (LONGEST, false);
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
    let rest = scan.took().saturating_mul(CPU_PARTS);
    let next = match is_broken_off {
        true => rest,
        false => rest.max(idle()),
    };
    let is_any = RANGES.each().next().is_some();
    is_any.then(|| next.min(soonest.max(rest)))
}

/// The time until the next scan: ever longer while nothing is new.
fn idle() -> Duration {
    let found = |(slot, _): (Slot, Span)| slot.note.found_bytes.load(Ordering::Relaxed);
    let found = RANGES.each().map(found).fold(0, usize::wrapping_add);
    let is_new = FOUND_BYTES.swap(found, Ordering::Relaxed) != found;
    let before = Duration::from_millis(IDLE_MILLIS.load(Ordering::Relaxed));
    let next = match is_new {
        true => (before / 2).min(MAX_BUSY_WAIT),
        false => before * 2,
    };
    let next = next.clamp(SHORTEST, LONGEST);
    IDLE_MILLIS.store(millis(next), Ordering::Relaxed);
    next
}

/// A scan that is under way.
struct Scan<'s> {
    stop: &'s Stop,
    pagemap: Option<Pagemap>,
    began: Duration,
    has_room: bool,
    /// A collapse of the range that is visited found no huge page.
    is_short: bool,
    pmd: usize,
    missing: usize,
}

impl<'s> Scan<'s> {
    fn new(stop: &'s Stop) -> Self {
        let here = core::ptr::from_ref(&PMD_BYTES).addr() & !(PAGE_BYTES - 1);
        let is_told = |map: &Pagemap| map.count(here..here + PAGE_BYTES, Pages::Resident).is_ok();
        Self {
            stop,
            began: used(),
            // It may not be there, or not be for a process that is not dumpable.
            pagemap: Pagemap::open().ok().filter(is_told),
            has_room: has_room(MIN_ROOM_BYTES),
            is_short: false,
            pmd: PMD_BYTES.load(Ordering::Relaxed),
            missing: MISSING_BYTES.load(Ordering::Relaxed),
        }
    }

    fn took(&self) -> Duration {
        used().saturating_sub(self.began)
    }

    /// Scans a range, collapses its blocks that are dense and not huge, and advises it where it is
    /// dense. True where it was broken off.
    fn visit(&mut self, slot: &Slot, span: &Span) -> bool {
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
            if self.stop.check_before_wait().is_err() || self.took() > MAX_SCAN {
                note.next.store(at, Ordering::Relaxed);
                return true;
            }
            // The program may have unmapped it meanwhile, which changes nothing for what is mapped
            // there now.
            if !slot.span().is_some_and(|now| now.range().contains(&at)) {
                return false;
            }
            let mut run = at..at;
            while at < blocks.end.min(run.start + BATCH_BLOCKS * pmd) {
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
        if is_refused {
            record_reason(reason::NOT_ALLOWED);
            if found == 0 && self.count(&blocks, Pages::Huge) == 0 {
                slot.end(span, |note| note.owner.release());
            }
        }
        false
    }

    /// The bytes of such pages in a range; 0 where the kernel does not say it.
    fn count(&self, range: &Range<usize>, pages: Pages) -> usize {
        let count = |map: &Pagemap| map.count(range.clone(), pages).unwrap_or(0);
        self.pagemap.as_ref().map_or(0, count)
    }

    fn is_huge(&self, range: &Range<usize>) -> bool {
        self.count(range, Pages::Huge) == range.len()
    }

    /// Whether a block is there, and not huge.
    fn is_wanted(&self, block: &Range<usize>, note: &Note) -> bool {
        // Without its last page it may reach beyond the end of a file, where a touch has to be a
        // SIGBUS. And memory of which little was touched is soon scanned.
        let last = block.end - PAGE_BYTES..block.end;
        if resident(&last) != Some(PAGE_BYTES) || self.is_huge(block) {
            return false;
        }
        let is_lax = note.is_lax.load(Ordering::Relaxed) && !note.owner.has_holes();
        let missing = if is_lax { self.missing } else { 0 };
        if resident(block).is_none_or(|there| there + missing < block.len()) {
            record_reason(reason::IN_PART);
            return false;
        }
        // Another process may have collapsed it, and this one not yet have mapped it.
        read(block.start);
        !self.is_huge(block)
    }

    /// Collapses blocks: at once, or one after the other where that is refused, for one of them may
    /// be another mapping by now, or locked for a moment. Gives the error of the last that could
    /// not be.
    fn collapse(&self, run: &Range<usize>, note: &Note) -> Result<(), Errno> {
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

    fn count_collapsed(&self, run: &Range<usize>, note: &Note, answer: Result<(), Errno>) {
        let slot = stats::slot();
        let became = match self.pagemap {
            Some(_) => self.count(run, Pages::Huge),
            // Counted once, whatever the kernel says each time.
            None if answer.is_ok() && note.counted.load(Ordering::Relaxed) < run.end => {
                note.counted.store(run.end, Ordering::Relaxed);
                run.len()
            }
            None => 0,
        };
        note.found_bytes.fetch_add(became, Ordering::Relaxed);
        Counts::add(&slot.shm_collapsed, became as u64);
        if let Err(error) = answer
            && run.len() == self.pmd
            && self.pagemap.is_some()
        {
            let count = match error {
                Errno::BUSY => &slot.shm_fallback_charge,
                _ => &slot.shm_fallback,
            };
            Counts::add(count, 1);
        }
    }
}

/// The bytes of a range that are in memory, by whatever process they were mapped. mincore(2).
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn resident(range: &Range<usize>) -> Option<usize> {
    let mut pages = [0u8; MAX_BLOCK_PAGES];
    let answer = (&raw mut pages).expose_provenance();
    let arguments = [range.start, range.len(), answer, 0, 0, 0];
    // SAFETY: the kernel writes a byte for each page of the block, of which there are at most as
    // many as `pages` has.
    unsafe { sys::request(libc::SYS_mincore, arguments) }.ok()?;
    Some(pages.iter().filter(|page| **page & 1 != 0).count() * PAGE_BYTES)
}

/// Maps the page at an address, which is in memory, as a read would, but without a signal where it
/// is not. MADV_POPULATE_READ, Linux 5.14.
#[expect(unsafe_code, reason = "advises memory")]
fn read(address: usize) {
    let at = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: it makes a page resident, and changes nothing.
    let _ = unsafe { mm::madvise(at, PAGE_BYTES, Advice::LinuxPopulateRead) };
}
