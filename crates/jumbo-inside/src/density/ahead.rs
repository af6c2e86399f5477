//! Thread of `fill`: [`request_scan`] starts a scan of the blocks that wait or are charged.
//!
//! A scan advises the blocks that the program is about to fill, and finds those that are full on
//! base pages: [`dense`] collapses them.

use core::fmt::Write as _;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use super::blocks::{self, BlockState};
use super::fill::{read_room, remember, resident_memory, update_counters};
use super::measure::{Touched, resident};
use super::tracked::{
    BLOCKS, advise_blocks, advise_huge, bytes, count_run, is_active, is_crowded, is_huge,
    may_measure, measure_block, pmd, set_active, update,
};
use super::{credit, dense, pace, program_break};
use crate::debug;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::millis;
use crate::watch::{self, Job, Stop, Without, cpu_time};
use jumbo_sys::Pagemap;

/// Interval between two scans while memory fills, and a shorter one for a faster program.
const FILL_WAIT: Duration = Duration::from_millis(1);
const MIN_FILL_WAIT: Duration = Duration::from_micros(200);
/// Minimum wait while no block can be advised: a scan holds locks that page faults wait for.
const SCARCE_WAIT: Duration = Duration::from_millis(20);
const MAX_IDLE_WAIT: Duration = Duration::from_secs(1);
/// Minimum wait after a scan, in multiples of its CPU time: while memory changes or has been filled not
/// long ago, and after that.
const BUSY_RATIO: u32 = 3;
const IDLE_RATIO: u32 = 50;
/// Time without a block advised ahead until a program counts as one that fills nothing: one of 100 MiB/s
/// fills a block in it.
const QUIET: Duration = Duration::from_millis(20);
/// Interval between two scans that look at all blocks that wait or are charged. The others leave out those
/// that did not change.
const FULL_INTERVAL: Duration = Duration::from_millis(10);
static FULL_MILLIS: AtomicU64 = AtomicU64::new(0);
/// Time of the last scan that advised ahead.
static FILLING_MILLIS: AtomicU64 = AtomicU64::new(0);
static JOB: Job = Job::new(2, scan, without_thread);
static WAIT_MICROS: AtomicU64 = AtomicU64::new(0);
/// Earliest time of the next scan: [`crate::sync::now`].
static NEXT_SCAN_MILLIS: AtomicU64 = AtomicU64::new(0);
/// Minimum wait after a scan without filling memory, in multiples of its CPU time.
const REST_RATIO: u32 = 20;
/// Places where the last scan advised blocks ahead: they share the credit.
static FRONT_COUNT: AtomicUsize = AtomicUsize::new(0);
pub(super) fn request_scan() {
    if may_measure() {
        WAIT_MICROS.store(0, Ordering::Relaxed);
        // The limit holds for any number of requests: a scan visits all blocks.
        let next = Duration::from_millis(NEXT_SCAN_MILLIS.load(Ordering::Relaxed));
        watch::begin(&JOB, next.saturating_sub(crate::sync::now()).max(FILL_WAIT));
    }
}

/// Leaves waiting blocks on base pages where no thread can scan; without a bound advises them.
fn without_thread(why: Without) {
    debug::note([why as usize, 0, 0], |line, [why, ..]| {
        let reasons = [
            "a seccomp filter",
            "no memory or task is left",
            "the kernel",
            "it had to end",
        ];
        let why = reasons.get(why).unwrap_or(&"?");
        write!(line, "nothing scans the memory: {why}")
    });
    if super::is_bounded() || !sandbox::allows_advice() {
        return;
    }
    let mut indexes = blocks::ALL;
    while let Some(block) = BLOCKS.next(indexes.clone(), |state| state == BlockState::Waiting) {
        indexes.start = block + 1;
        let seen = BLOCKS.seen(block);
        if BLOCKS.replace(block, seen, BlockState::Untracked) {
            let _ = advise_huge(&(block * pmd()..(block + 1) * pmd()));
        }
    }
}

/// Scans all blocks that wait or are charged, on the thread.
fn scan(stop: &Stop) -> Option<Duration> {
    if !may_measure() {
        return None;
    }
    let began = cpu_time();
    read_room();
    let due = pace::wait();
    if !due.is_zero() {
        pace::spend(cpu_time().saturating_sub(began));
        return Some(due);
    }
    let last_full = Duration::from_millis(FULL_MILLIS.load(Ordering::Relaxed));
    let is_full = crate::sync::now().saturating_sub(last_full) >= FULL_INTERVAL;
    if is_full {
        FULL_MILLIS.store(millis(crate::sync::now()), Ordering::Relaxed);
    }
    let mut scan = BlockScan {
        stop,
        is_full,
        pagemap: is_full.then(|| Pagemap::open().ok()).flatten(),
        has_changed: false,
        has_filled: false,
        is_filling: false,
        fronts: 0,
        untouched_blocks: 0,
        touched_blocks: 0,
        is_waiting: false,
        waiting_end: 0,
    };
    if is_full {
        program_break::check();
        if let Some(resident) = resident_memory() {
            credit::set_resident(resident);
        }
    }
    scan.visit_all();
    update_counters();
    FRONT_COUNT.store(scan.fronts, Ordering::Relaxed);
    let scan_time = cpu_time().saturating_sub(began);
    pace::spend(scan_time);
    if scan.is_filling {
        FILLING_MILLIS.store(millis(crate::sync::now()), Ordering::Relaxed);
    }
    let wait = scan.wait(scan_time).max(pace::wait());
    let ratio = match was_filling() {
        true => BUSY_RATIO,
        false => REST_RATIO,
    };
    let rest = scan_time
        .saturating_mul(ratio)
        .max(min_wait())
        .max(pace::wait());
    let rest = crate::sync::now().saturating_add(rest);
    NEXT_SCAN_MILLIS.store(millis(rest), Ordering::Relaxed);
    let fills_base_pages = scan.has_filled && credit::is_scarce();
    if scan.is_filling || scan.touched_blocks > 0 || fills_base_pages {
        dense::record_filling();
    }
    let is_filled = |state| state == BlockState::Filled;
    if BLOCKS.next(blocks::ALL, is_filled).is_some() {
        scan.is_waiting = true;
        dense::request(scan.has_filled);
    }
    if !scan.is_waiting {
        return None;
    }
    let micros = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX);
    WAIT_MICROS.store(micros, Ordering::Relaxed);
    Some(wait)
}

/// Reports whether a scan has advised ahead not long ago.
fn was_filling() -> bool {
    let last = Duration::from_millis(FILLING_MILLIS.load(Ordering::Relaxed));
    crate::sync::now().saturating_sub(last) < QUIET
}

/// Returns the minimum wait between two scans: longer while no block can be advised.
fn min_wait() -> Duration {
    match credit::is_scarce() {
        true => SCARCE_WAIT,
        false => Duration::ZERO,
    }
}

struct BlockScan<'s> {
    stop: &'s Stop,
    /// It looks at all blocks that wait or are charged.
    is_full: bool,
    pagemap: Option<Pagemap>,
    /// A state has changed.
    has_changed: bool,
    /// A block was found full on base pages.
    has_filled: bool,
    /// Blocks were advised ahead of the program.
    is_filling: bool,
    fronts: usize,
    /// Advised blocks that are still untouched, and those found touched now.
    untouched_blocks: usize,
    touched_blocks: usize,
    is_waiting: bool,
    /// End of the current run of waiting blocks.
    waiting_end: usize,
}

impl BlockScan<'_> {
    /// Returns the wait until the next scan, after one that took `scan_time` of CPU time.
    fn wait(&self, scan_time: Duration) -> Duration {
        let before = Duration::from_micros(WAIT_MICROS.load(Ordering::Relaxed));
        let (next, ratio) = match (self.is_filling, self.has_changed) {
            (true, _) if self.touched_blocks >= self.untouched_blocks => (MIN_FILL_WAIT, 1),
            (true, _) => (FILL_WAIT, 1),
            (false, true) => (FILL_WAIT, BUSY_RATIO),
            (false, false) if was_filling() => (FILL_WAIT, BUSY_RATIO),
            (false, false) => (
                (before + before / 4).clamp(FILL_WAIT, MAX_IDLE_WAIT),
                IDLE_RATIO,
            ),
        };
        next.max(scan_time.saturating_mul(ratio)).max(min_wait())
    }

    fn visit_all(&mut self) {
        let mut at = 0;
        let mut filled = None;
        let is_open = |state: BlockState| state == BlockState::Waiting || state.charge() > 0;
        while let Some(block) = BLOCKS.next(at..blocks::ALL.end, is_open) {
            if self.stop.check_before_wait().is_err() {
                break;
            }
            let front = block.saturating_sub(1);
            let is_ahead = filled == Some(front)
                || matches!(
                    BLOCKS.seen(front).state(),
                    BlockState::Filled | BlockState::Huge { empty: 0 }
                );
            at = self.visit(block, is_ahead, &mut filled);
        }
    }

    /// Visits a block; `is_ahead`: the block in front is full. Returns the next block to visit.
    fn visit(&mut self, block: usize, is_ahead: bool, filled: &mut Option<usize>) -> usize {
        let seen = BLOCKS.seen(block);
        let address = block * pmd();
        if seen.state() != BlockState::Waiting {
            if !self.is_full && !is_active(block) {
                return block + 1;
            }
            let touched = measure_block(block);
            // Advised ahead already.
            if touched == Some(Touched::Nothing) && is_ahead {
                *filled = Some(block);
            }
            let has_changed = BLOCKS.seen(block).state() != seen.state();
            self.has_changed |= has_changed;
            if has_changed || self.is_full {
                set_active(block, has_changed);
            }
            match touched {
                Some(Touched::Nothing) => self.untouched_blocks += 1,
                Some(Touched::Some { empty: 0, .. }) => self.touched_blocks += 1,
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
        if !self.is_full && !is_ahead && !is_active(block) {
            return block + 1;
        }
        let there = resident(address, pmd());
        if there == Ok(Some(0)) {
            // Where the program goes on, if it fills memory in order.
            set_active(block.saturating_sub(1), true);
        }
        match there {
            Ok(None) => {
                update(block, seen, BlockState::Untracked);
                block + 1
            }
            Ok(Some(0)) if is_ahead => self.advise_ahead(block),
            Ok(Some(0)) => self.next_touched(block + 1),
            Ok(Some(resident)) => {
                set_active(block, !self.is_full);
                // The program fills this block if it has filled the one in front.
                if is_ahead || resident >= pmd() / 2 {
                    *filled = Some(block);
                }
                if resident >= pmd() - bytes(1) {
                    self.has_filled |= update(block, seen, BlockState::Filled);
                    self.has_changed |= self.has_filled;
                }
                block + 1
            }
            Err(_) => block + 1,
        }
    }

    /// Advises the blocks that the program is about to fill. Returns the next block to visit.
    fn advise_ahead(&mut self, first: usize) -> usize {
        self.fronts += 1;
        let fronts = FRONT_COUNT.load(Ordering::Relaxed).max(self.fronts);
        let max = match is_crowded() && !is_huge(BLOCKS.seen(first - 1).state()) {
            true => 0,
            false => (credit::remaining() / pmd() / fronts).max(1),
        };
        let mut end = first;
        while end < first + max {
            let seen = BLOCKS.seen(end);
            let is_next = seen.state() == BlockState::Waiting
                && (end == first || resident(end * pmd(), pmd()) == Ok(Some(0)));
            if !is_next || !credit::charge_block() {
                break;
            }
            if !BLOCKS.replace(end, seen, BlockState::ADVISED) {
                credit::remove_block(pmd(), pmd());
                break;
            }
            remember(end);
            end += 1;
        }
        if end == first {
            return first + 1;
        }
        let run = first..end;
        debug::note(
            [run.len() * pmd(), first * pmd(), 0],
            |line, [bytes, at, _]| {
                write!(line, "ahead of a fill: {bytes} bytes advised at {at:#x}")
            },
        );
        count_run(first);
        let answer = advise_blocks(&run);
        stats::advised(run.len() * pmd(), answer.err());
        if answer.is_ok() {
            pace::save(run.len());
        }
        self.is_filling = true;
        end
    }

    /// Returns the first block at or after `from` that has a resident page or does not wait.
    fn next_touched(&mut self, from: usize) -> usize {
        if from >= self.waiting_end {
            let waits = |block: &usize| BLOCKS.seen(*block).state() == BlockState::Waiting;
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
}
