//! The thread's part of `fill`: [`hurry`] has it scan the blocks that wait or are charged.
//!
//! A scan advises the blocks ahead of those that fill up. Once nothing fills it collapses the blocks
//! that filled up on base pages.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::{Errno, Result};

use super::blocks::{self, State};
use super::fill::{
    BLOCKS, RUNS, ask, ask_for, ask_for_room, bytes, charge, count_run, find, is_crowded, is_huge,
    may_look, pmd, publish, resident_memory, settle_block, withdraw,
};
use super::look::{Touched, resident};
use super::table::PAGE_BYTES;
use super::{Policy, collapse, credit, program_break};
use crate::headroom;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::millis;
use crate::sys::Pagemap;
use crate::watch::{self, Job, Stop, Without, used};

/// The wait between two scans while memory fills: the shorter where the program was faster.
const TICK: Duration = Duration::from_millis(1);
const SHORT_TICK: Duration = Duration::from_micros(200);
/// The longest wait.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// The CPU time of one scan in which blocks are collapsed.
const MAX_COLLAPSE: Duration = Duration::from_millis(4);
/// A program fills memory until nothing was filled for so long. Until then nothing is collapsed,
/// since a collapse holds up the program's page faults, and the scans.
const FILL_PAUSE: Duration = Duration::from_millis(20);
/// But no longer than this, the second where huge pages are scarce.
const MAX_FILL: Duration = Duration::from_secs(1);
const MAX_SCARCE_FILL: Duration = Duration::from_secs(10);
/// The wait after a scan is so many times its CPU time, at least: where it found something to do,
/// and where it did not.
const BUSY_RATIO: u32 = 3;
const SCARCE_RATIO: u32 = 20;
const IDLE_RATIO: u32 = 50;
/// The most blocks that one call collapses: for each call the kernel asks all CPUs for the pages
/// that they keep apart.
const MAX_BATCH: usize = 8;
/// The blocks that the next call collapses: fewer where the last one took long.
static BATCH_BLOCKS: AtomicUsize = AtomicUsize::new(1);
/// Memory that is left when blocks are collapsed: a huge page is taken before the base pages go
/// back.
const MIN_ROOM_BYTES: usize = 64 << 20;

static JOB: Job = Job::new(2, scan, without_thread);
static WAIT_MICROS: AtomicU64 = AtomicU64::new(0);
/// The next scan is not before that, whatever the program does: [`crate::sync::now`].
static NEXT_SCAN_MILLIS: AtomicU64 = AtomicU64::new(0);
/// The wait after a scan in which nothing was about to be filled is so many times its CPU time, at least.
const REST_RATIO: u32 = 20;
/// The places where the last scan advised blocks ahead: they share the credit.
static FRONTS: AtomicUsize = AtomicUsize::new(0);
/// When blocks are tried again that the kernel refused to collapse, and the wait before that: doubled each time, until
/// another block is found filled.
static RETRY_MILLIS: AtomicU64 = AtomicU64::new(0);
static RETRY_WAIT_MILLIS: AtomicU64 = AtomicU64::new(0);
const MIN_RETRY_MILLIS: u64 = 100;
const MAX_RETRY_MILLIS: u64 = 60_000;
/// When blocks were found filled last, when collapses may go on, and when the last one ended.
static FILLED_MILLIS: AtomicU64 = AtomicU64::new(0);
static NEXT_COLLAPSE_MILLIS: AtomicU64 = AtomicU64::new(0);
static COLLAPSED_MILLIS: AtomicU64 = AtomicU64::new(0);

/// Has the thread scan soon.
pub(super) fn hurry() {
    if may_look() {
        WAIT_MICROS.store(0, Ordering::Relaxed);
        // However often that is: a scan looks at all that waits.
        let next = Duration::from_millis(NEXT_SCAN_MILLIS.load(Ordering::Relaxed));
        watch::begin(&JOB, next.saturating_sub(crate::sync::now()).max(TICK));
    } else {
        credit::without_room();
    }
}

/// No thread can scan: what waits stays on base pages, but without a bound, where it is advised as other memory is.
fn without_thread(_why: Without) {
    credit::without_room();
    if super::is_bounded() || !sandbox::allows_advice() {
        return;
    }
    let mut numbers = blocks::ALL;
    while let Some(block) = BLOCKS.next(numbers.clone(), |state| state == State::Waiting) {
        numbers.start = block + 1;
        let seen = BLOCKS.seen(block);
        if BLOCKS.replace(block, seen, State::Untracked) {
            let _ = ask(&(block * pmd()..(block + 1) * pmd()));
        }
    }
}

/// The thread's scan of all blocks that wait or are charged.
fn scan(stop: &Stop) -> Option<Duration> {
    if !may_look() {
        return None;
    }
    let began = used();
    let mut scan = Scan {
        stop,
        pagemap: Pagemap::open().ok(),
        has_changed: false,
        has_filled: false,
        has_obtained: false,
        is_filling: false,
        fronts: 0,
        left_blocks: 0,
        used_blocks: 0,
        is_waiting: false,
        waiting_end: 0,
    };
    let now = crate::sync::now();
    ask_for_room();
    program_break::check();
    if let Some(resident) = resident_memory() {
        credit::set_resident(resident);
    }
    scan.look_at_all();
    publish();
    FRONTS.store(scan.fronts, Ordering::Relaxed);
    let looked = used().saturating_sub(began);
    let mut wait = scan.wait(looked);
    let ratio = if scan.is_filling {
        BUSY_RATIO
    } else {
        REST_RATIO
    };
    let rest = crate::sync::now().saturating_add(looked.saturating_mul(ratio));
    NEXT_SCAN_MILLIS.store(millis(rest), Ordering::Relaxed);
    if scan.has_filled {
        RETRY_MILLIS.store(0, Ordering::Relaxed);
        RETRY_WAIT_MILLIS.store(0, Ordering::Relaxed);
    }
    if scan.is_filling || scan.used_blocks > 0 {
        FILLED_MILLIS.store(millis(now), Ordering::Relaxed);
    }
    if BLOCKS
        .next(blocks::ALL, |state| state == State::Filled)
        .is_some()
    {
        scan.is_waiting = true;
        // The first of a program waits for a pause as well.
        let relaxed = Ordering::Relaxed;
        let _ = COLLAPSED_MILLIS.compare_exchange(0, millis(now), relaxed, relaxed);
        let due = collapse_due();
        if due <= now {
            if scan.collapse_filled() || is_crowded() {
                advise_dense();
            }
            let took = used().saturating_sub(began + looked);
            let end = crate::sync::now();
            COLLAPSED_MILLIS.store(millis(end), Ordering::Relaxed);
            // Where huge pages are scarce the kernel moves memory for each, which others wait for.
            let ratio = match credit::is_scarce() {
                true => SCARCE_RATIO,
                false => BUSY_RATIO,
            };
            let next = end.saturating_add(took.saturating_mul(ratio));
            NEXT_COLLAPSE_MILLIS.store(millis(next), Ordering::Relaxed);
            if !scan.has_obtained {
                let wait = RETRY_WAIT_MILLIS.load(Ordering::Relaxed) * 2;
                let wait = wait.clamp(MIN_RETRY_MILLIS, MAX_RETRY_MILLIS);
                RETRY_WAIT_MILLIS.store(wait, Ordering::Relaxed);
                RETRY_MILLIS.store(millis(end) + wait, Ordering::Relaxed);
            }
        }
        let until = collapse_due().saturating_sub(crate::sync::now());
        wait = wait.min(until.max(TICK));
    }
    if !scan.is_waiting {
        return None;
    }
    let micros = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX);
    WAIT_MICROS.store(micros, Ordering::Relaxed);
    Some(wait)
}

/// When filled blocks may be collapsed: [`crate::sync::now`].
fn collapse_due() -> Duration {
    let of = |millis: &AtomicU64| Duration::from_millis(millis.load(Ordering::Relaxed));
    let is_calm = of(&FILLED_MILLIS) + FILL_PAUSE;
    let longest = match credit::is_scarce() {
        true => MAX_SCARCE_FILL,
        false => MAX_FILL,
    };
    let is_long = of(&COLLAPSED_MILLIS) + longest;
    let next = of(&NEXT_COLLAPSE_MILLIS).max(of(&RETRY_MILLIS));
    is_calm.min(is_long).max(next)
}

/// Advises blocks in a row that are huge: what is dropped of them is huge again from its touch, and
/// the kernel merges their mappings.
fn advise_dense() {
    let (mut at, mut runs) = (0, 0);
    while let Some(first) = BLOCKS.next(at..blocks::ALL.end, is_huge) {
        let is_huge = |block: &usize| is_huge(BLOCKS.seen(*block).state());
        at = (first..).take_while(is_huge).last().unwrap_or(first) + 1;
        let _ = ask_for(&(first..at));
        runs += 1;
    }
    RUNS.store(runs, Ordering::Relaxed);
}

/// A scan that is under way.
struct Scan<'s> {
    stop: &'s Stop,
    pagemap: Option<Pagemap>,
    /// Something was found that was not so before.
    has_changed: bool,
    /// A block was found filled on base pages; and one was collapsed.
    has_filled: bool,
    has_obtained: bool,
    /// Blocks were advised ahead of what the program fills.
    is_filling: bool,
    /// The places where blocks are advised ahead.
    fronts: usize,
    /// The blocks advised before of which nothing is touched yet, and those found touched now.
    left_blocks: usize,
    used_blocks: usize,
    /// A block waits.
    is_waiting: bool,
    /// The end of the blocks in a row that wait, where the scan is.
    waiting_end: usize,
}

impl Scan<'_> {
    /// The wait until the next scan, after one that took `looked` of CPU time.
    fn wait(&self, looked: Duration) -> Duration {
        let before = Duration::from_micros(WAIT_MICROS.load(Ordering::Relaxed));
        let (next, ratio) = match (self.is_filling, self.has_changed) {
            (true, _) if self.used_blocks >= self.left_blocks => (SHORT_TICK, 1),
            (true, _) => (TICK, 1),
            (false, true) => (TICK, BUSY_RATIO),
            (false, false) => ((before + before / 4).clamp(TICK, MAX_WAIT), IDLE_RATIO),
        };
        next.max(looked.saturating_mul(ratio))
    }

    /// Looks at all blocks that wait or are charged, and advises those ahead of what fills.
    fn look_at_all(&mut self) {
        let mut at = 0;
        let mut filled = None;
        let is_open = |state: State| state == State::Waiting || state.charge() > 0;
        while let Some(block) = BLOCKS.next(at..blocks::ALL.end, is_open) {
            if self.stop.check_before_wait().is_err() {
                break;
            }
            let front = block.saturating_sub(1);
            let is_ahead = filled == Some(front)
                || matches!(
                    BLOCKS.seen(front).state(),
                    State::Filled | State::Huge { empty: 0 }
                );
            at = self.visit(block, is_ahead, &mut filled);
        }
    }

    /// Visits a block, of which the one in front is filled where `is_ahead`. Gives the next.
    fn visit(&mut self, block: usize, is_ahead: bool, filled: &mut Option<usize>) -> usize {
        let seen = BLOCKS.seen(block);
        let address = block * pmd();
        if seen.state() != State::Waiting {
            let touched = settle_block(block);
            // Advised already, ahead of what fills.
            if touched == Some(Touched::Nothing) && is_ahead {
                *filled = Some(block);
            }
            self.has_changed |= BLOCKS.seen(block).state() != seen.state();
            match touched {
                Some(Touched::Nothing) => self.left_blocks += 1,
                Some(Touched::Some { empty: 0, .. }) => self.used_blocks += 1,
                _ => {}
            }
            if let Some(Touched::Some { empty, resident }) = touched
                && empty <= blocks::SIXTEENTHS / 2
                && resident >= pmd() / 2
            {
                *filled = Some(block);
            }
            return block + 1;
        }
        self.is_waiting = true;
        match resident(address, pmd()) {
            Ok(None) => {
                find(block, seen, State::Untracked);
                block + 1
            }
            Ok(Some(0)) if is_ahead => self.advance(block),
            Ok(Some(0)) => self.next_touched(block + 1),
            Ok(Some(resident)) => {
                // The program is in this block where it has filled the one in front.
                if is_ahead || resident >= pmd() / 2 {
                    *filled = Some(block);
                }
                if resident >= pmd() - bytes(1) {
                    self.has_filled |= find(block, seen, State::Filled);
                    self.has_changed |= self.has_filled;
                }
                block + 1
            }
            Err(_) => block + 1,
        }
    }

    /// Collapses blocks that are filled, for as long as one scan may take. True where it did.
    fn collapse_filled(&mut self) -> bool {
        let began = used();
        let mut has_collapsed = false;
        let is_filled = |state: State| state == State::Filled;
        let mut at = 0;
        if !headroom::has_room(MIN_ROOM_BYTES) {
            return false;
        }
        while let Some(block) = BLOCKS.next(at..blocks::ALL.end, is_filled) {
            let is_late = used().saturating_sub(began) > MAX_COLLAPSE;
            if is_late || self.stop.check_before_wait().is_err() {
                break;
            }
            let Some(next) = self.collapse_from(block, &mut has_collapsed) else {
                break;
            };
            at = next;
        }
        has_collapsed
    }

    /// Advises the blocks that the program is about to fill. Gives the next.
    fn advance(&mut self, first: usize) -> usize {
        self.fronts += 1;
        let fronts = FRONTS.load(Ordering::Relaxed).max(self.fronts);
        let most = match is_crowded() && !is_huge(BLOCKS.seen(first - 1).state()) {
            true => 0,
            false => (credit::left() / pmd() / fronts).max(1),
        };
        let mut end = first;
        while end < first + most {
            let seen = BLOCKS.seen(end);
            let is_next = seen.state() == State::Waiting
                && (end == first || resident(end * pmd(), pmd()) == Ok(Some(0)));
            if !is_next || !credit::take_block() {
                break;
            }
            if !BLOCKS.replace(end, seen, State::ADVISED) {
                credit::give(pmd(), pmd());
                break;
            }
            end += 1;
        }
        if end == first {
            return first + 1;
        }
        let run = first..end;
        count_run(first);
        let answer = ask_for(&run);
        stats::advised(run.len() * pmd(), answer.err());
        self.is_filling = true;
        end
    }

    /// The next block from one on of which a page is there, or that does not wait.
    fn next_touched(&mut self, from: usize) -> usize {
        if from >= self.waiting_end {
            let waits = |block: &usize| BLOCKS.seen(*block).state() == State::Waiting;
            self.waiting_end = from + (from..blocks::ALL.end).take_while(waits).count();
        }
        if from >= self.waiting_end {
            return from;
        }
        let range = from * pmd()..self.waiting_end * pmd();
        let next = self.pagemap.as_ref().map(|map| map.next_present(range));
        match next {
            Some(Ok(Some(address))) => address / pmd(),
            Some(Ok(None)) => self.waiting_end,
            _ => from,
        }
    }

    /// Collapses the blocks from one on that are filled. Gives the next; `None`: there is no huge
    /// page.
    fn collapse_from(&mut self, first: usize, has_collapsed: &mut bool) -> Option<usize> {
        let mut run = first..first;
        let most = BATCH_BLOCKS.load(Ordering::Relaxed);
        while run.len() < most {
            let block = run.end;
            let seen = BLOCKS.seen(block);
            if seen.state() != State::Filled {
                break;
            }
            // It may be another process's too, or have been dropped in part: later, if at all.
            let Some(empty) = self.missing(block) else {
                break;
            };
            let state = State::Huge { empty };
            if !credit::take(charge(state), pmd()) {
                break;
            }
            if !BLOCKS.replace(block, seen, state) {
                credit::give(charge(state), pmd());
                break;
            }
            run.end += 1;
        }
        if run.is_empty() {
            return Some(first + 1);
        }
        *has_collapsed = true;
        let began = used();
        let answer = self.collapse(&run);
        let most = match used().saturating_sub(began) > MAX_COLLAPSE / 2 {
            true => run.len() / 2,
            false => run.len() * 2,
        };
        BATCH_BLOCKS.store(most.clamp(1, MAX_BATCH), Ordering::Relaxed);
        self.has_obtained |= answer.is_ok();
        let mut is_short = false;
        for block in run.clone().take_while(|_| answer.is_err()) {
            let answer = match is_short {
                true => Err(Errno::NOMEM),
                false => self.collapse(&(block..block + 1)),
            };
            is_short |= answer == Err(Errno::NOMEM);
            self.has_obtained |= answer.is_ok();
            let seen = BLOCKS.seen(block);
            if let (Err(error), State::Huge { .. }) = (answer, seen.state()) {
                let now = match error {
                    // It lies in two mappings, say.
                    Errno::INVAL => State::Untracked,
                    // A page of it is pinned, or there is no huge page.
                    _ => State::Filled,
                };
                find(block, seen, now);
            }
        }
        (!is_short).then_some(run.end)
    }

    fn collapse(&self, run: &Range<usize>) -> Result<()> {
        let range = run.start * pmd()..run.end * pmd();
        match collapse(&range, Policy::Mapping) {
            // The advice was withdrawn once.
            Err(Errno::INVAL) if ask_for(run).is_ok() => {
                let answer = collapse(&range, Policy::Mapping);
                // What is not charged must not be huge from a touch.
                if answer.is_err() {
                    let _ = withdraw(&range);
                }
                answer
            }
            answer => answer,
        }
    }

    /// The sixteenths that are missing of a block; `None` where they are too many, or the
    /// pages are another process's too.
    fn missing(&self, block: usize) -> Option<u8> {
        let range = block * pmd()..(block + 1) * pmd();
        let there = self.pagemap.as_ref()?.exclusive(range, PAGE_BYTES).ok()?;
        let missing = (pmd() - there.min(pmd())).div_ceil(bytes(1));
        u8::try_from(missing).ok().filter(|missing| *missing <= 1)
    }
}
