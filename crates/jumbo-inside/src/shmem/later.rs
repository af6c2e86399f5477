//! *Touch and collapse*: shared memory that the program has touched is collapsed onto huge pages, block by block: [`look`].
//!
//! A block is collapsed when all of it is resident, but for what `--max-waste` allows; and where the program has punched a hole, not
//! even for that: a collapse would fill the hole. It needs no privilege, and the PMD size's `shmem_enabled` at `inherit`,
//! `always`, `within_size` or `advise` (Linux 6.1; Documentation/admin-guide/mm/transhuge.rst).
//!
//! Nothing is kept about a block: whether it is huge is asked of the kernel, each time.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;
use rustix::mm::{self, Advice};

use super::because;
use super::regions::{self, REGIONS, Region, SELDOM};
use crate::headroom::{Enough, headroom};
use crate::ledger::{Slot, shm_reason as reason, stats};
use crate::sandbox;
use crate::sync::now;
use crate::sys::{self, Pagemap, Pages};
use crate::watch::{self, Job, Stop, Without, used};

/// What a mapping lives, at least, before it is looked at.
const LIVED: Duration = Duration::from_secs(1);
/// How much CPU time one look takes at most.
const LOOK: Duration = Duration::from_millis(50);
/// The thread may use one part in so many of a CPU.
const SHARE: u32 = 10;
/// So many blocks are collapsed by one call, at most: for each call the kernel asks all CPUs for the pages that they keep apart.
const BATCH: usize = 8;
/// Memory that is left when a block is collapsed: a huge page is taken before the base pages go back.
const ROOM: usize = 64 << 20;
/// The base page that this is written for: [`crate::heap`] has it too.
const BASE_PAGE: usize = 4096;
/// The most base pages in a block: as many as 4 KiB of mincore(2)'s answer.
const MOST: usize = 4096;

static JOB: Job = Job::new(1, look, without);
static PMD: AtomicUsize = AtomicUsize::new(0);
/// How many base pages of a block may be missing.
static MISSING: AtomicUsize = AtomicUsize::new(0);
/// Nothing is collapsed any more.
static OVER: AtomicBool = AtomicBool::new(false);
/// How long it waits when there is nothing to do, in milliseconds.
static IDLE: AtomicU64 = AtomicU64::new(0);
/// When the next thread may be made for a fork: [`now`], in milliseconds.
static NEXT: AtomicU64 = AtomicU64::new(0);
/// So many threads for as many forks at once: a server starts its processes in a burst, and then waits for years.
const BURST: u64 = 16;

pub(super) fn start(pmd: usize, max_waste: usize) {
    let pages = pmd / BASE_PAGE;
    if rustix::param::page_size() == BASE_PAGE && (2..=MOST).contains(&pages) {
        MISSING.store(pages.saturating_mul(max_waste) / 100, Ordering::Relaxed);
        PMD.store(pmd, Ordering::Release);
    }
}

/// Has a mapping looked after.
pub(super) fn register(address: usize, length: usize, lax: bool) {
    if PMD.load(Ordering::Acquire) == 0 || OVER.load(Ordering::Relaxed) || watch::is_anothers() {
        return;
    }
    // From here on calls are made that the program may never make.
    if sandbox::is_entered() {
        return because(reason::FILTER);
    }
    if !regions::add(address, length, lax) {
        return because(reason::TOO_MANY);
    }
    IDLE.store(0, Ordering::Relaxed);
    watch::begin(&JOB, LIVED);
}

/// The program answers page faults itself from now on (userfaultfd(2)): a look of ours would be a fault to answer, or fill what it
/// wants to. Nothing is collapsed any more, and no range is ours.
pub fn leave() {
    OVER.store(true, Ordering::Relaxed);
    watch::end();
}

/// Whether the program does.
pub(super) fn has_left() -> bool {
    OVER.load(Ordering::Relaxed)
}

/// Before fork(2), for which the thread is gone: another process may look after what this one did.
pub fn about_to_fork() {
    if PMD.load(Ordering::Relaxed) != 0 && !sandbox::is_entered() {
        regions::release_all();
    }
}

/// After fork(2), in the process that forked: it goes on. A child may end before it has seen anything, and the process that forks it
/// is there as long as what they share is needed.
pub fn has_forked() {
    let over = OVER.load(Ordering::Relaxed) || PMD.load(Ordering::Relaxed) == 0;
    if over || !regions::is_any() || sandbox::is_entered() || watch::is_anothers() {
        return;
    }
    // The new process may touch what was not.
    IDLE.store(0, Ordering::Relaxed);
    if is_affordable() {
        watch::begin(&JOB, LIVED);
    }
}

/// Whether one more thread may be made for a fork: one in [`LIVED`], and as many as were saved up, at most [`BURST`].
fn is_affordable() -> bool {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (now, each) = (millis(now()), millis(LIVED));
    let before = NEXT.load(Ordering::Relaxed);
    let next = before.max(now.saturating_sub(BURST * each)) + each;
    before <= now
        && NEXT
            .compare_exchange(before, next, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
}

/// In the child of a fork: it looks after what it shares with its parent, if no process does.
///
/// # Safety
/// This is the child, with one thread, and [`watch::forked`] was called.
#[expect(unsafe_code, reason = "its caller's promise")]
pub unsafe fn forked() {
    // A filter may end who asks.
    let over = OVER.load(Ordering::Relaxed);
    let looks = PMD.load(Ordering::Relaxed) != 0 && !over && !sandbox::is_entered();
    if looks && regions::is_neglected() {
        IDLE.store(0, Ordering::Relaxed);
        watch::begin(&JOB, LIVED);
    }
}

fn without(why: Without) {
    because(match why {
        Without::Filter => reason::FILTER,
        Without::Room | Without::Kernel => reason::NO_MEMORY,
        Without::Ended => reason::ENDED,
    });
}

/// What came of one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// All was seen.
    Whole,
    /// There is more to do.
    More,
    /// No memory is to be had now.
    Short,
}

/// The thread's look at all mappings that this process looks after.
fn look(stop: &Stop) -> Option<Duration> {
    let began = used();
    let mut outcome = None;
    let before = stats::slot().shm_collapsed.load(Ordering::Relaxed);
    if sandbox::is_entered() {
        regions::release_all();
        return None;
    }
    let pagemap = asked();
    let (mut soonest, mut is_anothers) = (SELDOM, false);
    for region in REGIONS.iter().filter(|region| region.range().is_some()) {
        if region.age() < LIVED {
            soonest = LIVED;
            continue;
        }
        if !region.claim() {
            is_anothers = true;
            continue;
        }
        let seen = visit(region, pagemap.as_ref(), began, stop);
        outcome = Some(seen);
        if seen != Look::Whole {
            break;
        }
    }
    let took = used().saturating_sub(began);
    let rest = took.saturating_mul(SHARE);
    let worked = stats::slot().shm_collapsed.load(Ordering::Relaxed) != before;
    let next = match outcome {
        Some(Look::More) => rest,
        Some(Look::Whole) if worked => rest.max(LIVED / 2),
        Some(_) => rest.max(idle()),
        // That process may end.
        None if is_anothers => idle(),
        None => SELDOM,
    };
    Some(next.min(soonest.max(rest)))
}

/// The kernel's word on which pages are huge, where it has one: PAGEMAP_SCAN is Linux 6.7, and /proc may not be there, or not be
/// for a process that is not dumpable.
fn asked() -> Option<Pagemap> {
    let at = core::ptr::from_ref(&PMD).addr() & !(BASE_PAGE - 1);
    Pagemap::open()
        .ok()
        .filter(|map| map.count(at..at + BASE_PAGE, Pages::Present).is_ok())
}

/// Ever longer, until something is to be done again.
fn idle() -> Duration {
    let before = Duration::from_millis(IDLE.load(Ordering::Relaxed));
    let next = (before * 2).clamp(LIVED, SELDOM);
    IDLE.store(
        u64::try_from(next.as_millis()).unwrap_or(u64::MAX),
        Ordering::Relaxed,
    );
    next
}

/// Collapses what can be of a mapping, from where the last visit ended.
fn visit(region: &Region, pagemap: Option<&Pagemap>, began: Duration, stop: &Stop) -> Look {
    let pmd = PMD.load(Ordering::Relaxed);
    let Some((start, length)) = region.range() else {
        return Look::Whole;
    };
    let has_room = headroom(Enough::for_touching(ROOM)).is_some_and(|room| room.least() >= ROOM);
    if !has_room {
        because(reason::NO_MEMORY);
        return Look::Short;
    }
    let first = start.next_multiple_of(pmd);
    let (end, lax) = (start + length, region.is_lax());
    let mut block = first.max(region.next.load(Ordering::Relaxed));
    let (mut refused, mut done) = (None, 0);
    while block + pmd <= end {
        if stop.check_before_wait().is_err() || used().saturating_sub(began) > LOOK {
            region.next.store(block, Ordering::Relaxed);
            return Look::More;
        }
        // The program may have unmapped it meanwhile, which changes nothing for what is mapped there now: see `collapse`.
        if region.range() != Some((start, length)) {
            return Look::Whole;
        }
        let most = end.min(block + BATCH * pmd);
        let mut run = block..block;
        while run.end + pmd <= most && is_wanted(run.end..run.end + pmd, pagemap, lax) {
            run.end += pmd;
        }
        block = run.end.max(block + pmd);
        if run.is_empty() {
            continue;
        }
        let mut answer = collapse(run.clone(), region, pagemap, &mut done);
        if answer.is_err() && run.len() > pmd {
            // One of them may be another mapping by now, or locked for a moment.
            for at in run.step_by(pmd) {
                answer = collapse(at..at + pmd, region, pagemap, &mut done);
                if matches!(answer, Err(Errno::BUSY | Errno::NOMEM)) {
                    break;
                }
            }
        }
        match answer {
            Ok(()) | Err(Errno::AGAIN) => {}
            Err(Errno::INVAL) => refused = Some(()),
            Err(error) => {
                because(match error {
                    Errno::BUSY => reason::NO_MEMORY,
                    _ => reason::NO_HUGE,
                });
                region.next.store(block, Ordering::Relaxed);
                return Look::Short;
            }
        }
    }
    region.next.store(0, Ordering::Relaxed);
    if refused.is_some() {
        because(reason::NOT_ALLOWED);
        if done == 0 && huge(&(first..end), pagemap) == 0 {
            region.forget();
        }
    }
    Look::Whole
}

fn is_huge(range: &Range<usize>, pagemap: Option<&Pagemap>) -> bool {
    huge(range, pagemap) == range.len()
}

fn huge(range: &Range<usize>, pagemap: Option<&Pagemap>) -> usize {
    pagemap.map_or(0, |map| map.count(range.clone(), Pages::Huge).unwrap_or(0))
}

/// Whether a block is there, and not huge.
fn is_wanted(block: Range<usize>, pagemap: Option<&Pagemap>, lax: bool) -> bool {
    // Without its last page it may reach beyond the end of a file, where a touch has to be a SIGBUS. And memory of which little was
    // touched is soon looked at.
    let last = block.end - BASE_PAGE..block.end;
    if resident(last) != Some(1) || is_huge(&block, pagemap) {
        return false;
    }
    let pages = block.len() / BASE_PAGE;
    let missing = if lax {
        MISSING.load(Ordering::Relaxed)
    } else {
        0
    };
    if resident(block.clone()).is_none_or(|there| there + missing < pages) {
        because(reason::IN_PART);
        return false;
    }
    // Another process may have collapsed it, and this one not yet have mapped it.
    read(block.start);
    !is_huge(&block, pagemap)
}

/// Collapses blocks; the error of the last that could not be. What became huge is added to `done`.
///
/// Harmless whatever is mapped there by now: no byte changes, and what is wholly resident stays as large.
fn collapse(
    run: Range<usize>,
    region: &Region,
    pagemap: Option<&Pagemap>,
    done: &mut usize,
) -> Result<(), Errno> {
    let slot = stats::slot();
    let answer = sys::collapse(run.start, run.len());
    let became = match pagemap {
        Some(_) => huge(&run, pagemap),
        // Counted once, whatever the kernel says each time.
        None if answer.is_ok() && region.counted.load(Ordering::Relaxed) < run.end => {
            region.counted.store(run.end, Ordering::Relaxed);
            run.len()
        }
        None => 0,
    };
    *done += became;
    Slot::add(&slot.shm_collapsed, became as u64);
    let single = run.len() == PMD.load(Ordering::Relaxed);
    if answer.is_err() && single && pagemap.is_some() {
        let count = match answer {
            Err(Errno::BUSY) => &slot.shm_fallback_charge,
            _ => &slot.shm_fallback,
        };
        Slot::add(count, 1);
    }
    answer
}

/// How many base pages of a block are in memory, by whatever process they were mapped. mincore(2).
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn resident(block: Range<usize>) -> Option<usize> {
    let mut pages = [0u8; MOST];
    let answer = (&raw mut pages).expose_provenance();
    let arguments = [block.start, block.len(), answer, 0, 0, 0];
    // SAFETY: the kernel writes a byte for each page of the block, of which there are at most as many as `pages` has.
    unsafe { sys::request(libc::SYS_mincore, arguments) }.ok()?;
    Some(pages.iter().filter(|page| **page & 1 != 0).count())
}

/// Maps the page at an address, which is in memory, as a read would, but without a signal where it is not. MADV_POPULATE_READ,
/// Linux 5.14.
#[expect(unsafe_code, reason = "advises memory")]
fn read(address: usize) {
    let at = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: it makes a page resident, and changes nothing.
    let _ = unsafe { mm::madvise(at, BASE_PAGE, Advice::LinuxPopulateRead) };
}
