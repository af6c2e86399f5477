//! Huge pages as a program earns them: [`claim`] at an allocation, and the thread's [`scan`] while
//! memory fills.
//!
//! A program begins with the credit of [`credit`]. The first blocks of new memory are advised as far
//! as it goes; the others wait on base pages. A look at what was advised ([`look`]) finds it
//! touched, and gives the credit back for the next blocks:
//! - at the next allocation that asks for more than there is, without a thread;
//! - by the thread, each [`TICK`] while something changes, which also advises the blocks ahead of
//!   those that fill up, in one allocation of any size.
//!
//! A block that filled up on base pages is collapsed. A block that stays sparse keeps its charge, so
//! sparse programs have no more than the credit.

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

use super::blocks::{self, Blocks, Seen, State};
use super::look::{Touched, look};
use super::table::PAGE_BYTES;
use super::{PMD_BYTES, Policy, collapse, credit};
use crate::headroom;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::millis;
use crate::sys::Pagemap;
use crate::watch::{self, Job, Stop, Without, used};

/// The wait between two scans while memory fills.
const TICK: Duration = Duration::from_millis(1);
/// The longest wait.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// The CPU time of one scan in which blocks are collapsed.
const MAX_SCAN: Duration = Duration::from_millis(4);
/// The wait after a scan is so many times its CPU time, at least: where it found something to do,
/// and where it did not.
const BUSY_RATIO: u32 = 3;
const IDLE_RATIO: u32 = 50;
/// The time between two questions for the memory that is left.
const ROOM_AGE: Duration = Duration::from_millis(100);
/// The most blocks that one allocation looks at.
const MAX_LOOKS: usize = 16;
/// The most blocks that one call collapses: for each call the kernel asks all CPUs for the pages
/// that they keep apart.
const BATCH_BLOCKS: usize = 8;
/// Memory that is left when blocks are collapsed: a huge page is taken before the base pages go
/// back.
const MIN_ROOM_BYTES: usize = 64 << 20;

static BLOCKS: Blocks = Blocks::new();
static JOB: Job = Job::new(2, scan, without_thread);
static WAIT_MILLIS: AtomicU64 = AtomicU64::new(0);
static HAS_ASKED: AtomicBool = AtomicBool::new(false);

/// The blocks that were advised last, for [`settle`].
static RECENT: [AtomicUsize; RECENT_COUNT] = [const { AtomicUsize::new(0) }; RECENT_COUNT];
const RECENT_COUNT: usize = 256;
/// The number of blocks that were ever put there, and of those that were looked at.
static ADVISED: AtomicUsize = AtomicUsize::new(0);
static SETTLED: AtomicUsize = AtomicUsize::new(0);
/// Requests that [`settle`] passes over, since it found nothing touched; and how many it will next
/// time.
static PASSES: AtomicUsize = AtomicUsize::new(0);
static NEXT_PASSES: AtomicUsize = AtomicUsize::new(0);
const MAX_PASSES: usize = 1024;

fn pmd() -> usize {
    PMD_BYTES.load(Ordering::Relaxed)
}

/// The bytes of so many sixteenths of a block.
fn bytes(sixteenths: usize) -> usize {
    pmd() / usize::from(blocks::SIXTEENTHS) * sixteenths
}

fn charge(state: State) -> usize {
    bytes(state.charge())
}

/// Whether the calls may be made that look at memory.
fn may_look() -> bool {
    !sandbox::is_entered_later() && !sandbox::is_untried() && !super::has_left()
}

/// The numbers of the whole blocks in a range; with `is_part` from the one that its start is in.
fn numbers(range: &Range<usize>, is_part: bool) -> Range<usize> {
    let shift = pmd().trailing_zeros();
    let first = match is_part {
        true => range.start >> shift,
        false => (range.start.saturating_add(pmd() - 1)) >> shift,
    };
    first..(range.end >> shift).max(first)
}

/// Tracks a block that is advised and charged already, or waits. False where it cannot be tracked.
fn begin(block: usize, state: State) -> bool {
    match BLOCKS.set(block, state) {
        Some(before) => {
            end(before);
            true
        }
        None => false,
    }
}

/// Gives back the charge of a state that has ended.
fn end(before: State) {
    if matches!(before, State::Huge { .. }) {
        credit::give(charge(before), pmd());
    }
}

/// Notes what was found out about a block; false where it has changed since.
fn find(block: usize, seen: Seen, now: State) -> bool {
    let is_current = BLOCKS.replace(block, seen, now);
    if is_current {
        match (seen.state(), now) {
            (State::Huge { .. }, State::Huge { .. }) => {
                credit::adjust(charge(seen.state()), charge(now));
            }
            (before, _) => end(before),
        }
    }
    is_current
}

/// Begins the blocks of new memory: gives the range that may be advised, at its start. The rest
/// waits. `is_part`: the block that its start is in is the caller's too.
pub(super) fn claim(range: &Range<usize>, is_part: bool) -> Range<usize> {
    let numbers = numbers(range, is_part);
    let first = numbers.start * pmd();
    if numbers.is_empty() {
        return first..first;
    }
    if !HAS_ASKED.swap(true, Ordering::Relaxed) && may_look() {
        credit::ask_for_room();
    }
    let wanted = numbers.len() * pmd();
    if credit::left() < wanted {
        settle();
    }
    // One allocation does not take all: it may be the one that stays sparse.
    let left = credit::left();
    let most = match wanted > left {
        true => left / 2,
        false => wanted,
    };
    let most = (most / pmd()).max(1);
    let mut advised = numbers.start;
    for block in numbers.clone().take(most) {
        if !credit::take(pmd(), pmd()) {
            break;
        }
        if !begin(block, State::ADVISED) {
            credit::give(pmd(), pmd());
            break;
        }
        let place = ADVISED.fetch_add(1, Ordering::Relaxed);
        if let Some(recent) = RECENT.get(place % RECENT_COUNT) {
            recent.store(block, Ordering::Relaxed);
        }
        advised = block + 1;
    }
    wait(advised..numbers.end);
    first..advised * pmd()
}

/// Has new memory begin on base pages.
pub(super) fn begin_on_base_pages(range: &Range<usize>) {
    wait(numbers(range, false));
}

fn wait(numbers: Range<usize>) {
    let mut is_any = false;
    for block in numbers {
        is_any |= begin(block, State::Waiting);
    }
    if is_any {
        hurry();
    }
}

/// Has the thread scan soon.
fn hurry() {
    if may_look() {
        WAIT_MILLIS.store(0, Ordering::Relaxed);
        watch::begin(&JOB, TICK);
    }
}

/// The program has made memory of what it reserved, in part or whole.
pub(super) fn opened(range: &Range<usize>) {
    if numbers(range, true).any(|block| BLOCKS.seen(block).state() == State::Waiting) {
        hurry();
    }
}

/// The program unmaps a range, or maps something else there.
pub(super) fn forget(range: &Range<usize>) {
    let mut numbers = numbers(range, false);
    while let Some(block) = BLOCKS.next(numbers.clone(), |_| true) {
        begin(block, State::Untracked);
        numbers.start = block + 1;
    }
}

/// The program drops what a range holds: where that was advised, it may stay empty.
pub(super) fn dropped(range: &Range<usize>) {
    let mut numbers = numbers(range, false);
    let is_there = |state| matches!(state, State::Filled | State::Huge { .. });
    while let Some(block) = BLOCKS.next(numbers.clone(), is_there) {
        numbers.start = block + 1;
        if BLOCKS.seen(block).state() == State::Filled {
            begin(block, State::Waiting);
        } else if credit::take(pmd(), pmd()) {
            begin(block, State::ADVISED);
        } else {
            begin(block, State::Waiting);
            let _ = withdraw(&(block * pmd()..(block + 1) * pmd()));
        }
    }
}

/// Before a range moves, or grows: mremap(2) takes one mapping alone before Linux 6.17, so the
/// advice goes. Blocks that are huge stay so.
pub(super) fn moving(range: &Range<usize>) {
    let mut numbers = numbers(range, false);
    // Also the advice of a block that the range has a part of goes with it.
    let shift = pmd().trailing_zeros();
    let parts = range.start >> shift..range.end.div_ceil(pmd());
    if BLOCKS.next(parts, is_huge).is_none() {
        return;
    }
    let is_open = |state: State| state.charge() > 0;
    while let Some(block) = BLOCKS.next(numbers.clone(), is_open) {
        numbers.start = block + 1;
        let is_untouched = settle_block(block) == Some(Touched::Nothing);
        let seen = BLOCKS.seen(block);
        if is_untouched && seen.state() == State::ADVISED {
            find(block, seen, State::Waiting);
        }
    }
    let _ = withdraw(range);
}

/// A range has moved.
pub(super) fn moved(from: usize, to: usize, length: usize) {
    let (old, new) = (from..from + length, to..to + length);
    if from == to {
        return;
    }
    let is_alike = from % pmd() == to % pmd();
    let numbers = numbers(&old, false);
    let offset = (to >> pmd().trailing_zeros()).wrapping_sub(from >> pmd().trailing_zeros());
    let mut at = numbers.start;
    while let Some(block) = BLOCKS.next(at..numbers.end, |_| true) {
        at = block + 1;
        let state = BLOCKS
            .set(block, State::Untracked)
            .unwrap_or(State::Untracked);
        // The charge goes with it.
        let goes = is_alike
            && BLOCKS
                .set(block.wrapping_add(offset), state)
                .is_some_and(|before| {
                    end(before);
                    true
                });
        if !goes {
            end(state);
        }
    }
    if !is_alike {
        begin_on_base_pages(&new);
    }
}

/// MADV_NOHUGEPAGE.
#[expect(unsafe_code, reason = "advises memory")]
fn withdraw(range: &Range<usize>) -> Result<()> {
    let at = with_exposed_provenance_mut(range.start);
    // SAFETY: it changes how memory is backed, never what it holds.
    unsafe { mm::madvise(at, range.len(), Advice::LinuxNoHugepage) }
}

/// MADV_HUGEPAGE.
#[expect(unsafe_code, reason = "advises memory")]
pub(super) fn ask(range: &Range<usize>) -> Result<()> {
    let at = with_exposed_provenance_mut(range.start);
    // SAFETY: as above.
    unsafe { mm::madvise(at, range.len(), Advice::LinuxHugepage) }
}

/// Looks at the blocks that were advised last, for the credit that they may give back.
fn settle() {
    if !may_look() {
        return;
    }
    let passes = PASSES.load(Ordering::Relaxed);
    if passes > 0 {
        PASSES.store(passes - 1, Ordering::Relaxed);
        return;
    }
    let before = credit::charged();
    let end = ADVISED.load(Ordering::Relaxed);
    let start = SETTLED
        .load(Ordering::Relaxed)
        .max(end.saturating_sub(RECENT_COUNT));
    let mut looks = 0;
    for place in start..end {
        let Some(recent) = RECENT.get(place % RECENT_COUNT) else {
            break;
        };
        let block = recent.load(Ordering::Relaxed);
        if BLOCKS.seen(block).state().charge() > 0 {
            settle_block(block);
            looks += 1;
        }
        // The first that is being filled is looked at again.
        let is_settled = BLOCKS.seen(block).state().charge() == 0;
        if is_settled && SETTLED.load(Ordering::Relaxed) == place {
            SETTLED.store(place + 1, Ordering::Relaxed);
        }
        if looks == MAX_LOOKS {
            break;
        }
    }
    if SETTLED.load(Ordering::Relaxed) < start {
        SETTLED.store(start, Ordering::Relaxed);
    }
    let passes = match credit::charged() + pmd() <= before {
        true => 0,
        false => (NEXT_PASSES.load(Ordering::Relaxed) * 2 + 1).min(MAX_PASSES),
    };
    NEXT_PASSES.store(passes, Ordering::Relaxed);
    PASSES.store(passes, Ordering::Relaxed);
}

/// Looks at a block that is charged. Gives what was found.
fn settle_block(block: usize) -> Option<Touched> {
    let seen = BLOCKS.seen(block);
    let touched = look(block * pmd(), pmd()).ok()?;
    let now = match touched {
        Touched::Gone => State::Untracked,
        Touched::Nothing => State::ADVISED,
        // On base pages nothing is wasted, and the next touch brings a base page.
        Touched::Some { empty: 0, resident } if resident < pmd() => State::Waiting,
        Touched::Some { empty, .. } => State::Huge { empty },
    };
    if now != seen.state() {
        find(block, seen, now);
    }
    Some(touched)
}

/// In the child of a fork, before anything else.
pub(super) fn forked() {
    let (mut charged, mut huge) = (0, 0);
    let mut numbers = blocks::ALL;
    while let Some(block) = BLOCKS.next(numbers.clone(), |_| true) {
        numbers.start = block + 1;
        if let state @ State::Huge { .. } = BLOCKS.seen(block).state() {
            charged += charge(state);
            huge += pmd();
        }
    }
    credit::recount(charged, huge);
}

/// No thread can scan. Where the bound is not asked for, what waits is advised as other memory is.
fn without_thread(_why: Without) {
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
        began,
        has_changed: false,
        is_filling: false,
        is_waiting: false,
    };
    static ASKED_MILLIS: AtomicU64 = AtomicU64::new(0);
    let now = crate::sync::now();
    let asked = Duration::from_millis(ASKED_MILLIS.load(Ordering::Relaxed));
    if now.saturating_sub(asked) > ROOM_AGE {
        ASKED_MILLIS.store(millis(now), Ordering::Relaxed);
        credit::ask_for_room();
    }
    if let Some(resident) = resident() {
        credit::set_resident(resident);
    }
    scan.look_at_all();
    if !scan.is_filling && scan.collapse_filled() && !super::is_bounded() {
        advise_dense();
    }
    if !scan.is_waiting {
        return None;
    }
    let took = used().saturating_sub(began);
    let before = Duration::from_millis(WAIT_MILLIS.load(Ordering::Relaxed));
    let (next, ratio) = match (scan.is_filling, scan.has_changed) {
        (true, _) => (TICK, 1),
        (false, true) => (TICK, BUSY_RATIO),
        (false, false) => ((before * 2).clamp(TICK, MAX_WAIT), IDLE_RATIO),
    };
    let next = next.max(took.saturating_mul(ratio));
    WAIT_MILLIS.store(millis(next), Ordering::Relaxed);
    Some(next)
}

/// Advises memory of which all blocks are huge: what is dropped of it is huge again from its touch.
fn advise_dense() {
    let mut at = 0;
    while let Some(first) = BLOCKS.next(at..blocks::ALL.end, |_| true) {
        let state = |block: &usize| BLOCKS.seen(*block).state();
        let is_tracked = |block: &usize| state(block) != State::Untracked;
        at = (first..).take_while(is_tracked).last().unwrap_or(first) + 1;
        if (first..at).all(|block| is_huge(state(&block))) {
            let _ = ask_for(&(first..at));
        }
    }
}

/// MADV_HUGEPAGE of blocks that are tracked as huge. The program's own word is the last: what it has
/// taken from huge pages meanwhile is taken from them again.
fn ask_for(run: &Range<usize>) -> Result<()> {
    let gone = |block: &usize| !is_huge(BLOCKS.seen(*block).state());
    if run.clone().any(|block| gone(&block)) {
        return Err(Errno::AGAIN);
    }
    let answer = ask(&(run.start * pmd()..run.end * pmd()));
    for block in run.clone().filter(gone) {
        let _ = withdraw(&(block * pmd()..(block + 1) * pmd()));
    }
    answer
}

fn is_huge(state: State) -> bool {
    matches!(state, State::Huge { .. })
}

/// Whether the block in front of an address is huge.
pub(super) fn is_behind_huge(address: usize) -> bool {
    is_huge(
        BLOCKS
            .seen((address >> pmd().trailing_zeros()).saturating_sub(1))
            .state(),
    )
}

/// The resident memory of the process. proc_pid_statm(5).
fn resident() -> Option<usize> {
    let mut text = [0u8; 128];
    let text = headroom::read(c"/proc/self/statm", &mut text).ok()?;
    let second = text.split(|byte| *byte == b' ').nth(1)?;
    headroom::number(second)?.checked_mul(PAGE_BYTES)
}

/// A scan that is under way.
struct Scan<'s> {
    stop: &'s Stop,
    pagemap: Option<Pagemap>,
    began: Duration,
    /// Something was found that was not so before.
    has_changed: bool,
    /// Blocks were advised ahead of what the program fills.
    is_filling: bool,
    /// A block waits.
    is_waiting: bool,
}

impl Scan<'_> {
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
            self.has_changed |= BLOCKS.seen(block).state() != seen.state();
            if let Some(Touched::Some { empty, resident }) = touched
                && empty <= blocks::SIXTEENTHS / 2
                && resident >= pmd() / 2
            {
                *filled = Some(block);
            }
            return block + 1;
        }
        self.is_waiting = true;
        match look(address, pmd()) {
            Ok(Touched::Gone) => {
                find(block, seen, State::Untracked);
                block + 1
            }
            Ok(Touched::Nothing) if is_ahead => self.advance(block),
            Ok(Touched::Nothing) => self.next_touched(block + 1),
            Ok(Touched::Some { resident, .. }) => {
                if resident >= pmd() / 2 {
                    *filled = Some(block);
                }
                if resident >= pmd() - bytes(1) {
                    self.has_changed |= find(block, seen, State::Filled);
                }
                block + 1
            }
            Err(_) => block + 1,
        }
    }

    /// Collapses blocks that are filled, for as long as one scan may take. True where it did.
    fn collapse_filled(&mut self) -> bool {
        let mut has_collapsed = false;
        let is_filled = |state: State| state == State::Filled;
        let mut at = 0;
        let mut has_room = None;
        while let Some(block) = BLOCKS.next(at..blocks::ALL.end, is_filled) {
            self.is_waiting = true;
            let has_room = *has_room.get_or_insert_with(|| headroom::has_room(MIN_ROOM_BYTES));
            let is_late = used().saturating_sub(self.began) > MAX_SCAN;
            if !has_room || self.stop.check_before_wait().is_err() {
                break;
            }
            if is_late {
                // There is more to do than time.
                self.has_changed = true;
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
        let most = (credit::left() / pmd()).max(1);
        let mut end = first;
        while end < first + most {
            let seen = BLOCKS.seen(end);
            let is_next = seen.state() == State::Waiting
                && (end == first || look(end * pmd(), pmd()) == Ok(Touched::Nothing));
            if !is_next || !credit::take(pmd(), pmd()) {
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
        let answer = ask_for(&run);
        stats::advised(run.len() * pmd(), answer.err());
        self.is_filling = true;
        end
    }

    /// The next block from one on of which a page is there, or that does not wait.
    fn next_touched(&self, from: usize) -> usize {
        let end = BLOCKS
            .next(from..blocks::ALL.end, |state| state != State::Waiting)
            .unwrap_or(blocks::ALL.end);
        let last = (from..end)
            .take_while(|block| BLOCKS.seen(*block).state() == State::Waiting)
            .last();
        let Some(last) = last else { return from };
        let range = from * pmd()..(last + 1) * pmd();
        let next = self.pagemap.as_ref().map(|map| map.next_present(range));
        match next {
            Some(Ok(Some(address))) => address / pmd(),
            Some(Ok(None)) => last + 1,
            _ => from,
        }
    }

    /// Collapses the blocks from one on that are filled. Gives the next; `None`: there is no huge
    /// page.
    fn collapse_from(&mut self, first: usize, has_collapsed: &mut bool) -> Option<usize> {
        let mut run = first..first;
        while run.len() < BATCH_BLOCKS {
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
        (self.has_changed, *has_collapsed) = (true, true);
        if self.collapse(&run).is_err() {
            for block in run.clone() {
                let answer = self.collapse(&(block..block + 1));
                let seen = BLOCKS.seen(block);
                if answer.is_err() && matches!(seen.state(), State::Huge { .. }) {
                    find(block, seen, State::Waiting);
                }
                if answer == Err(Errno::NOMEM) {
                    return None;
                }
            }
        }
        Some(run.end)
    }

    fn collapse(&self, run: &Range<usize>) -> Result<()> {
        let range = run.start * pmd()..run.end * pmd();
        match collapse(&range, Policy::Mapping) {
            // The advice was withdrawn once.
            Err(Errno::INVAL) if ask_for(run).is_ok() => collapse(&range, Policy::Mapping),
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
