//! Collapses of the blocks that are full on base pages, on the thread: [`request`].
//!
//! A collapse delays page faults and mappings of the program. So one run of the job collapses one
//! block, and the next run comes after a multiple of its time: a page fault waits for one block at
//! most. While the program fills memory there are few.

use core::fmt::Write as _;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::Errno;

use super::blocks::{self, BlockState};
use super::table::PAGE_BYTES;
use super::tracked::{
    BLOCKS, RUN_COUNT, advise_blocks, bytes, charge, is_crowded, is_huge, may_measure, pmd, update,
    withdraw_advice,
};
use super::{MIN_ROOM_BYTES, Policy, collapse, credit, pace, touch};
use crate::debug;
use crate::headroom;
use crate::sync::{millis, now};
use crate::watch::{self, Job, Stop, cpu_time};
use jumbo_sys::{Collapsed, Destination, Pagemap};

/// Minimum wait between two runs.
const MIN_WAIT: Duration = Duration::from_millis(1);
/// Time without filling after which collapses follow each other.
const MIN_QUIET_TIME: Duration = Duration::from_millis(20);
/// Time between two collapses while memory fills, and while huge pages are scarce.
const FILL_INTERVAL: Duration = Duration::from_millis(25);
const SCARCE_FILL_INTERVAL: Duration = Duration::from_secs(2);
/// Pause after a collapse, in multiples of its CPU time. With scarce huge pages the kernel migrates
/// memory for each.
const BUSY_RATIO: u32 = 3;
const SCARCE_RATIO: u32 = 20;
/// Maximum CPU time of a run that finds no block to collapse.
const MAX_SEARCH_TIME: Duration = Duration::from_millis(4);
const MIN_RETRY_MILLIS: u64 = 100;
const MAX_RETRY_MILLIS: u64 = 60_000;
/// Passes that found no huge page before the wait doubles. After a failure the kernel refuses to
/// compact memory for up to 64 requests, at no cost (mm/compaction.c, COMPACT_MAX_DEFER_SHIFT).
const QUICK_RETRIES: u64 = 64;

static JOB: Job = Job::new(5, run, |_| ());
/// First block that this pass has not tried, and whether the pass collapsed any.
static CURSOR: AtomicUsize = AtomicUsize::new(0);
static HAS_OBTAINED: AtomicBool = AtomicBool::new(false);
/// Times of the last filling, of the last collapse, and of the next one at the earliest.
static FILLED_MILLIS: AtomicU64 = AtomicU64::new(0);
static LAST_MILLIS: AtomicU64 = AtomicU64::new(0);
static NEXT_MILLIS: AtomicU64 = AtomicU64::new(0);
/// Wait before the pass after one without success. It doubles until another block is full.
static RETRY_WAIT_MILLIS: AtomicU64 = AtomicU64::new(0);
static DESTINATION: Destination = Destination::new();
/// Passes that found no huge page, since the last success.
static SHORT_PASSES: AtomicU64 = AtomicU64::new(0);

/// Records that the program fills memory at this time.
pub(super) fn record_filling() {
    FILLED_MILLIS.store(millis(now()), Ordering::Relaxed);
}

/// Requests a collapse when it is due, on the thread. `is_new`: another block is full.
pub(super) fn request(is_new: bool) {
    // The first collapse of a program waits for a pause, too.
    let (relaxed, now_millis) = (Ordering::Relaxed, millis(now()));
    let _ = LAST_MILLIS.compare_exchange(0, now_millis, relaxed, relaxed);
    if is_new && RETRY_WAIT_MILLIS.swap(0, relaxed) != 0 {
        NEXT_MILLIS.store(now_millis, relaxed);
    }
    watch::begin_on_thread(&JOB, wait());
}

/// Returns the time until the next collapse.
fn wait() -> Duration {
    let of = |millis: &AtomicU64| Duration::from_millis(millis.load(Ordering::Relaxed));
    let interval = match credit::is_scarce() {
        true => SCARCE_FILL_INTERVAL,
        false => FILL_INTERVAL,
    };
    let quiet = of(&FILLED_MILLIS) + MIN_QUIET_TIME;
    let due = quiet.min(of(&LAST_MILLIS) + interval).max(of(&NEXT_MILLIS));
    due.saturating_sub(now()).max(pace::wait())
}

fn run(stop: &Stop) -> Option<Duration> {
    if !may_measure() {
        return None;
    }
    if !wait().is_zero() {
        return Some(wait().max(MIN_WAIT));
    }
    let began = cpu_time();
    let pagemap = Pagemap::open().ok()?;
    let is_filled = |state: BlockState| state == BlockState::Filled;
    let (mut at, mut collapsed) = (CURSOR.load(Ordering::Relaxed), None);
    let mut is_late = false;
    let mut is_over = !headroom::has_room(MIN_ROOM_BYTES);
    while collapsed.is_none() && !is_over && !is_late && stop.check_before_wait().is_ok() {
        let Some(block) = BLOCKS.next(at..blocks::ALL.end, is_filled) else {
            is_over = true;
            break;
        };
        at = block + 1;
        collapsed = collapse_block(&pagemap, block);
        is_late = cpu_time().saturating_sub(began) > MAX_SEARCH_TIME;
    }
    CURSOR.store(at, Ordering::Relaxed);
    let end = millis(now());
    let answer = collapsed.as_ref().map(|collapsed| collapsed.answer);
    if let Some(answer) = answer {
        LAST_MILLIS.store(end, Ordering::Relaxed);
        HAS_OBTAINED.fetch_or(answer.is_ok(), Ordering::Relaxed);
        // No huge page, or no room in the memory cgroup.
        is_over = matches!(answer, Err(Errno::NOMEM | Errno::BUSY));
    }
    let ratio = match credit::is_scarce() {
        true => SCARCE_RATIO,
        false => BUSY_RATIO,
    };
    let spent = cpu_time().saturating_sub(began);
    pace::spend(spent);
    let preparing = collapsed.and_then(|collapsed| collapsed.preparing);
    // The program waits for no lock then, unless the kernel compacts memory.
    let preparing = preparing
        .filter(|_| !credit::is_scarce())
        .unwrap_or_default();
    let pause = spent
        .saturating_sub(preparing)
        .saturating_mul(ratio)
        .saturating_add(preparing);
    let has_more = BLOCKS.next(blocks::ALL, is_filled).is_some();
    is_over |= !has_more;
    let is_short = answer == Some(Err(Errno::NOMEM));
    let retry = if is_over { end_pass(is_short) } else { 0 };
    NEXT_MILLIS.store(end + millis(pause).max(retry), Ordering::Relaxed);
    has_more.then(|| wait().max(MIN_WAIT))
}

/// Ends a pass over all full blocks; returns the wait before the next, in milliseconds. `is_short`:
/// the kernel had no huge page.
fn end_pass(is_short: bool) -> u64 {
    CURSOR.store(0, Ordering::Relaxed);
    let has_obtained = HAS_OBTAINED.swap(false, Ordering::Relaxed);
    if has_obtained || is_crowded() {
        advise_dense();
    }
    let is_quick = is_short && SHORT_PASSES.fetch_add(1, Ordering::Relaxed) < QUICK_RETRIES;
    let wait = match has_obtained {
        true => 0,
        false if is_quick => MIN_RETRY_MILLIS,
        false => (RETRY_WAIT_MILLIS.load(Ordering::Relaxed) * 2)
            .clamp(MIN_RETRY_MILLIS, MAX_RETRY_MILLIS),
    };
    if has_obtained {
        SHORT_PASSES.store(0, Ordering::Relaxed);
    }
    RETRY_WAIT_MILLIS.store(wait, Ordering::Relaxed);
    wait
}

/// Advises runs of huge blocks, so that the kernel merges their mappings.
fn advise_dense() {
    let (mut at, mut runs) = (0, 0);
    while let Some(first) = BLOCKS.next(at..blocks::ALL.end, is_huge) {
        let is_huge = |block: &usize| is_huge(BLOCKS.seen(*block).state());
        at = (first..).take_while(is_huge).last().unwrap_or(first) + 1;
        let _ = advise_blocks(&(first..at));
        runs += 1;
    }
    RUN_COUNT.store(runs, Ordering::Relaxed);
}

/// Collapses a full block; `None` if it is left for later.
fn collapse_block(pagemap: &Pagemap, block: usize) -> Option<Collapsed<()>> {
    let seen = BLOCKS.seen(block);
    let range = block * pmd()..(block + 1) * pmd();
    // Shared with another process, or dropped in part: retried later.
    let there = pagemap.exclusive(range.clone(), PAGE_BYTES).ok()?;
    let missing = (pmd() - there.min(pmd())).div_ceil(bytes(1));
    let empty = u8::try_from(missing).ok().filter(|missing| *missing <= 1)?;
    let state = BlockState::Huge { empty };
    if seen.state() != BlockState::Filled || !credit::charge(charge(state), pmd()) {
        return None;
    }
    if !BLOCKS.replace(block, seen, state) {
        credit::remove_block(charge(state), pmd());
        return None;
    }
    let collapsed = DESTINATION.collapse(pmd(), || match collapse(&range, Policy::Mapping) {
        // The advice had been withdrawn.
        Err(Errno::INVAL) if advise_blocks(&(block..block + 1)).is_ok() => {
            let answer = collapse(&range, Policy::Mapping);
            // An uncharged block must not become huge at a touch.
            if answer.is_err() {
                let _ = withdraw_advice(&range);
            }
            answer
        }
        answer => answer,
    });
    if let Some(time) = collapsed.preparing {
        touch::huge_took(time);
    }
    let answer = collapsed.answer;
    let seen = BLOCKS.seen(block);
    if let (Err(error), BlockState::Huge { .. }) = (answer, seen.state()) {
        let now = match error {
            // For example a block in two mappings.
            Errno::INVAL => BlockState::Untracked,
            // A pinned page, or no huge page.
            _ => BlockState::Filled,
        };
        update(block, seen, now);
    }
    let error = answer
        .err()
        .map_or(0, |error| error.raw_os_error().unsigned_abs() as usize);
    debug::note(
        [range.start, error, 0],
        |line, [at, error, _]| match error {
            0 => write!(line, "collapsed the block at {at:#x}"),
            _ => write!(line, "cannot collapse the block at {at:#x}: errno {error}"),
        },
    );
    Some(collapsed)
}
