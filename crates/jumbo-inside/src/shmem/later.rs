//! *Touch and collapse*: shared memory that the program has touched is collapsed onto huge pages, block by block: [`look`].
//!
//! A block is collapsed when all of it is resident, but for what `--max-waste` allows; and where the program has punched a hole, not
//! even for that: a collapse would fill the hole. It needs no privilege, and the PMD size's `shmem_enabled` at `inherit`,
//! `always`, `within_size` or `advise` (Linux 6.1; Documentation/admin-guide/mm/transhuge.rst).
//!
//! Nothing is kept about a block: whether it is huge is asked of the kernel, each time.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
use crate::watch::{self, Job, Stop, Without};

/// What a mapping lives, at least, before it is looked at.
const LIVED: Duration = Duration::from_secs(1);
/// How long one look takes at most.
const LOOK: Duration = Duration::from_millis(50);
/// The thread may use one part in so many of a CPU.
const SHARE: u32 = 20;
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
/// How long it waits when there is nothing to do, in milliseconds.
static IDLE: AtomicU64 = AtomicU64::new(0);

pub(super) fn start(pmd: usize, max_waste: usize) {
    let pages = pmd / BASE_PAGE;
    if rustix::param::page_size() == BASE_PAGE && (2..=MOST).contains(&pages) {
        MISSING.store(pages.saturating_mul(max_waste) / 100, Ordering::Relaxed);
        PMD.store(pmd, Ordering::Release);
    }
}

/// Has a mapping looked after.
pub(super) fn register(address: usize, length: usize) {
    if PMD.load(Ordering::Acquire) == 0 {
        return;
    }
    if !regions::add(address, length) {
        return because(reason::TOO_MANY);
    }
    IDLE.store(0, Ordering::Relaxed);
    watch::begin(&JOB, LIVED);
}

/// Before fork(2), for which the thread is gone: another process may look after what this one did.
pub fn about_to_fork() {
    if PMD.load(Ordering::Relaxed) != 0 && !sandbox::is_entered() {
        regions::release_all();
    }
}

/// In the child of a fork: it looks after what it shares with its parent, if no process does.
///
/// # Safety
/// This is the child, with one thread, and [`watch::forked`] was called.
#[expect(unsafe_code, reason = "its caller's promise")]
pub unsafe fn forked() {
    // A filter may end who asks.
    let looks = PMD.load(Ordering::Relaxed) != 0 && !sandbox::is_entered();
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
    let began = now();
    let mut outcome = None;
    let before = stats::slot().shm_collapsed.load(Ordering::Relaxed);
    if sandbox::is_entered() {
        regions::release_all();
        return None;
    }
    let pagemap = Pagemap::open().ok();
    for region in REGIONS.iter().filter(|region| region.range().is_some()) {
        if !region.claim() {
            continue;
        }
        let seen = visit(region, pagemap.as_ref(), began, stop);
        outcome = Some(seen);
        if seen != Look::Whole {
            break;
        }
    }
    let took = now().saturating_sub(began);
    let rest = took.saturating_mul(SHARE);
    let worked = stats::slot().shm_collapsed.load(Ordering::Relaxed) != before;
    Some(match outcome {
        Some(Look::More) => rest,
        Some(Look::Whole) if worked => rest.max(LIVED / 2),
        Some(_) => rest.max(idle()),
        None => SELDOM,
    })
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
    let mut block = first.max(region.next.load(Ordering::Relaxed));
    while block + pmd <= start + length {
        if stop.check_before_wait().is_err() || now().saturating_sub(began) > LOOK {
            region.next.store(block, Ordering::Relaxed);
            return Look::More;
        }
        // The program may have unmapped it meanwhile, which changes nothing for others that are mapped there: see `collapse`.
        if region.range() != Some((start, length)) {
            return Look::Whole;
        }
        match collapse(block..block + pmd, pagemap) {
            Ok(()) => {}
            // It is gone, by a way that was not seen.
            Err(Errno::FAULT) => {
                region.forget();
                return Look::Whole;
            }
            Err(Errno::INVAL) => {
                because(reason::NOT_ALLOWED);
                region.forget();
                return Look::Whole;
            }
            Err(Errno::AGAIN) => Slot::add(&stats::slot().shm_fallback, 1),
            Err(error) => {
                let slot = stats::slot();
                let (count, why) = match error {
                    Errno::BUSY => (&slot.shm_fallback_charge, reason::NO_MEMORY),
                    _ => (&slot.shm_fallback, reason::NO_HUGE),
                };
                Slot::add(count, 1);
                because(why);
                region.next.store(block + pmd, Ordering::Relaxed);
                return Look::Short;
            }
        }
        block += pmd;
    }
    region.next.store(0, Ordering::Relaxed);
    Look::Whole
}

/// Collapses a block that is there and not huge.
///
/// Harmless whatever is mapped there by now: no byte changes, and what is wholly resident stays as large.
fn collapse(block: Range<usize>, pagemap: Option<&Pagemap>) -> Result<(), Errno> {
    let huge =
        |pages| pagemap.is_some_and(|map| map.count(block.clone(), pages) == Ok(block.len()));
    if huge(Pages::Huge) {
        return Ok(());
    }
    let pages = block.len() / BASE_PAGE;
    let resident = resident(block.clone()).map_err(|_| Errno::FAULT)?;
    if resident == 0 {
        return Ok(());
    }
    let missing = match regions::has_holes() {
        true => 0,
        false => MISSING.load(Ordering::Relaxed),
    };
    if resident + missing < pages {
        because(reason::IN_PART);
        return Ok(());
    }
    // Another process may have collapsed it, and this one not yet have mapped it.
    read(block.start);
    if huge(Pages::Huge) {
        return Ok(());
    }
    sys::collapse(block.start, block.len())?;
    Slot::add(&stats::slot().shm_collapsed, block.len() as u64);
    Ok(())
}

/// How many base pages of a block are in memory, whoever has mapped them. mincore(2).
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
fn resident(block: Range<usize>) -> Result<usize, Errno> {
    let mut pages = [0u8; MOST];
    let answer = (&raw mut pages).expose_provenance();
    let arguments = [block.start, block.len(), answer, 0, 0, 0];
    // SAFETY: the kernel writes a byte for each page of the block, of which there are at most as many as `pages` has.
    unsafe { sys::request(libc::SYS_mincore, arguments) }?;
    Ok(pages.iter().filter(|page| **page & 1 != 0).count())
}

/// Maps the page at an address, which is in memory, as a read would, but without a signal where it is not. MADV_POPULATE_READ,
/// Linux 5.14.
#[expect(unsafe_code, reason = "advises memory")]
fn read(address: usize) {
    let at = core::ptr::with_exposed_provenance_mut(address);
    // SAFETY: it makes a page resident, and changes nothing.
    let _ = unsafe { mm::madvise(at, BASE_PAGE, Advice::LinuxPopulateRead) };
}
