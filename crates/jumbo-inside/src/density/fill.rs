//! Huge pages as a program earns them: [`claim`] at an allocation.
//!
//! A program begins with the credit of [`credit`]. The first blocks of new memory are advised as far
//! as it goes; the others wait on base pages. A look at what was advised ([`look`]) finds it
//! touched, and gives the credit back for the next blocks: at the next allocation that asks for more
//! than there is, or by the thread (`ahead`).
//!
//! A block that filled up on base pages is collapsed. A block that stays sparse keeps its charge, so
//! sparse programs have no more than the credit.

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

use super::ahead::hurry;
use super::blocks::{self, Blocks, Seen, State};
use super::look::{Touched, look};
use super::table::PAGE_BYTES;
use super::{PMD_BYTES, credit, program_break};
use crate::headroom;
use crate::ledger::stats;
use crate::sandbox;
use crate::sync::millis;
use crate::sys;

/// The time between two questions for the memory that is left.
const ROOM_AGE: Duration = Duration::from_millis(100);
/// The most blocks that one allocation looks at.
const MAX_LOOKS: usize = 16;
crate::one_page::table! {
    pub(super) static BLOCKS: Blocks = Blocks::new();
}
/// The rows of blocks that are advised: each is a mapping to the kernel, and so is what lies between.
pub(super) static RUNS: AtomicUsize = AtomicUsize::new(0);
/// A quarter of what `vm.max_map_count` allows by default, 65 530.
const MAX_RUNS: usize = 1 << 13;
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

pub(super) fn pmd() -> usize {
    PMD_BYTES.load(Ordering::Relaxed)
}

/// The bytes of so many sixteenths of a block.
pub(super) fn bytes(sixteenths: usize) -> usize {
    pmd() / usize::from(blocks::SIXTEENTHS) * sixteenths
}

pub(super) fn charge(state: State) -> usize {
    bytes(state.charge())
}

/// Whether the calls may be made that look at memory.
pub(super) fn may_look() -> bool {
    !sandbox::is_entered() && !super::has_left()
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

/// The start of the first whole block from an address on.
pub(super) fn next_block(address: usize) -> usize {
    address
        .checked_next_multiple_of(pmd())
        .unwrap_or(usize::MAX)
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
pub(super) fn find(block: usize, seen: Seen, now: State) -> bool {
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

/// Asks what memory is left, but not too often.
pub(super) fn ask_for_room() {
    static ASKED_MILLIS: AtomicU64 = AtomicU64::new(0);
    let now = millis(crate::sync::now());
    let asked = ASKED_MILLIS.load(Ordering::Relaxed);
    if Duration::from_millis(now.saturating_sub(asked)) > ROOM_AGE {
        ASKED_MILLIS.store(now, Ordering::Relaxed);
        credit::ask_for_room();
    }
}

/// An address on the first thread's stack, near its start.
static FIRST_STACK: AtomicUsize = AtomicUsize::new(0);

/// Notes that this is the first thread.
pub(super) fn start() {
    let here = 0u8;
    FIRST_STACK.store((&raw const here).addr(), Ordering::Relaxed);
}

/// Whether this is the first thread, not deep in its stack, and not on an alternate one: to ask for room takes 7 KiB of it.
#[expect(
    unsafe_code,
    reason = "a system call that writes to a place of its own"
)]
fn has_large_stack() -> bool {
    const MAX_DEPTH: usize = 1 << 20;
    // main() has its frame above that of our constructor.
    const MARGIN: usize = 64 << 10;
    let mut alternate = core::mem::MaybeUninit::<libc::stack_t>::zeroed();
    let here = alternate.as_ptr().addr();
    let depth = FIRST_STACK
        .load(Ordering::Relaxed)
        .saturating_add(MARGIN)
        .checked_sub(here);
    let arguments = [0, alternate.as_mut_ptr().expose_provenance(), 0, 0, 0, 0];
    if depth.is_none_or(|depth| depth > MAX_DEPTH) {
        return false;
    }
    // SAFETY: sigaltstack(2) writes a stack_t, of which zeroes are one.
    let (answer, alternate) = unsafe {
        let answer = sys::request(libc::SYS_sigaltstack, arguments);
        (answer, alternate.assume_init())
    };
    answer.is_ok() && alternate.ss_flags & libc::SS_ONSTACK == 0
}

/// Begins the blocks of new memory: gives the range that may be advised, at its start. The rest
/// waits. `is_part`: the block that its start is in is the caller's too.
pub(super) fn claim(range: &Range<usize>, is_part: bool) -> Range<usize> {
    let numbers = numbers(range, is_part);
    let first = numbers.start * pmd();
    // The program may have told the kernel that it wants none.
    if numbers.is_empty() || may_look() && sys::is_without_thp() {
        return first..first;
    }
    if may_look() && (!HAS_ASKED.swap(true, Ordering::Relaxed) || credit::is_scarce()) {
        match has_large_stack() {
            true => ask_for_room(),
            // The thread asks.
            false => hurry(),
        }
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
    let most = if is_crowded() { 0 } else { most };
    for block in numbers.clone().take(most) {
        if !credit::take_block() {
            break;
        }
        if !begin(block, State::ADVISED) {
            credit::give(pmd(), pmd());
            break;
        }
        note(block);
        advised = block + 1;
    }
    if advised > numbers.start {
        count_run(numbers.start);
    }
    wait(advised..numbers.end);
    publish();
    first..advised * pmd()
}

/// Counts what is charged, for the report, and what is huge.
pub(super) fn publish() {
    let slot = stats::slot();
    let relaxed = Ordering::Relaxed;
    slot.untouched.store(credit::charged() as u64, relaxed);
    slot.huge.store(credit::huge() as u64, relaxed);
}

/// Notes a block that was advised, for [`settle`].
fn note(block: usize) {
    let place = ADVISED.fetch_add(1, Ordering::Relaxed);
    if let Some(recent) = RECENT.get(place % RECENT_COUNT) {
        recent.store(block, Ordering::Relaxed);
    }
}

/// The blocks of a step by which glibc grows its heap.
const MAX_STEP_BLOCKS: usize = 2;

/// Charges a block beforehand, for a step of the break that glibc will advise.
pub(super) fn charge_ahead() -> bool {
    if credit::left() < pmd() {
        settle();
    }
    credit::take_block()
}

/// Gives back what was charged beforehand.
pub(super) fn give_ahead() {
    credit::give(pmd(), pmd());
}

/// Begins the blocks of a step of the break that glibc has advised, of which the first is charged. False where it has no
/// whole block.
pub(super) fn begin_charged(range: &Range<usize>) -> bool {
    let numbers = numbers(range, true);
    // glibc grows by a block or two; what is more is the program's own (sbrk(2)).
    let last = numbers
        .end
        .saturating_sub(MAX_STEP_BLOCKS)
        .max(numbers.start);
    wait(numbers.start..last);
    for block in last..numbers.end {
        if block > last {
            credit::insist(pmd(), pmd());
        }
        if begin(block, State::ADVISED) {
            note(block);
        } else {
            credit::give(pmd(), pmd());
        }
    }
    !numbers.is_empty()
}

/// Begins the blocks of a step of the break on base pages.
pub(super) fn begin_break(range: &Range<usize>) {
    wait(numbers(range, true));
}

/// Whether the block in front of an address is huge.
pub(super) fn is_behind_huge(address: usize) -> bool {
    is_huge(
        BLOCKS
            .seen((address >> pmd().trailing_zeros()).saturating_sub(1))
            .state(),
    )
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

/// The program unmaps a part of the blocks at the ends of a range. What is left of them may be resident and untouched, or
/// nothing: a block that is not looked at any more is looked at again.
pub(super) fn forget_parts(range: &Range<usize>) {
    for end in [range.start, range.end] {
        let block = end >> pmd().trailing_zeros();
        let seen = BLOCKS.seen(block);
        let is_part = !end.is_multiple_of(pmd());
        if is_part
            && seen.state() == (State::Huge { empty: 0 })
            && find(block, seen, State::Huge { empty: 1 })
        {
            note(block);
            hurry();
        }
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
        } else if credit::take_block() {
            begin(block, State::ADVISED);
        } else if is_crowded() {
            credit::insist(pmd(), pmd());
            begin(block, State::ADVISED);
        } else {
            RUNS.fetch_add(1, Ordering::Relaxed);
            begin(block, State::Waiting);
            let _ = withdraw(&(block * pmd()..(block + 1) * pmd()));
        }
    }
}

/// Whether a block of a range is tracked, so that advice may have cut its mapping.
pub(super) fn is_cut(range: &Range<usize>) -> bool {
    let shift = pmd().trailing_zeros();
    let parts = range.start >> shift..range.end.div_ceil(pmd());
    BLOCKS.next(parts, |_| true).is_some()
}

/// Before a range moves, or grows: mremap(2) takes one mapping alone before Linux 6.17, so the
/// advice goes. Blocks that are huge stay so.
pub(super) fn moving(range: &Range<usize>) {
    let mut numbers = numbers(range, false);
    // Also the advice of a block that the range has a part of goes with it.
    if !is_cut(range) {
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

/// A mapping that is tracked has grown by a range. The thread may have advised the block in front just before, since [`moving`],
/// and what was advised there came with the range.
pub(super) fn grown(range: &Range<usize>) {
    let before = range.start.saturating_sub(1) >> pmd().trailing_zeros();
    if BLOCKS.next(before..before + 1, |_| true).is_some() {
        let _ = withdraw(range);
    }
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
pub(super) fn withdraw(range: &Range<usize>) -> Result<()> {
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
pub(super) fn settle_block(block: usize) -> Option<Touched> {
    let seen = BLOCKS.seen(block);
    let touched = may_look().then(|| look(block * pmd(), pmd()).ok())??;
    let now = match touched {
        Touched::Gone => State::Untracked,
        Touched::Nothing => State::ADVISED,
        // On base pages nothing is wasted, and the next touch brings a base page.
        Touched::Some { empty: 0, resident } if resident < pmd() => State::Waiting,
        Touched::Some { empty, .. } => State::Huge { empty },
    };
    if now != seen.state() && find(block, seen, now) && now == State::Waiting && !is_crowded() {
        // Or what is dropped of it would be huge from its next touch, for no charge.
        RUNS.fetch_add(1, Ordering::Relaxed);
        let _ = withdraw(&(block * pmd()..(block + 1) * pmd()));
    }
    Some(touched)
}

/// In the child of a fork, before anything else.
pub(super) fn forked() {
    let ahead = program_break::charged_ahead();
    let (mut charged, mut huge) = (ahead, ahead);
    let mut numbers = blocks::ALL;
    while blocks::IS_ANY.load(Ordering::Acquire)
        && let Some(block) = BLOCKS.next(numbers.clone(), |_| true)
    {
        numbers.start = block + 1;
        if let state @ State::Huge { .. } = BLOCKS.seen(block).state() {
            charged += charge(state);
            huge += pmd();
        }
    }
    credit::recount(charged, huge);
}

/// Whether so many mappings differ in their advice that more could reach `vm.max_map_count`.
pub(super) fn is_crowded() -> bool {
    RUNS.load(Ordering::Relaxed) > MAX_RUNS
}

/// Counts a run of blocks whose advice differs from that of the block in front.
pub(super) fn count_run(first: usize) {
    if !is_huge(BLOCKS.seen(first.saturating_sub(1)).state()) {
        RUNS.fetch_add(1, Ordering::Relaxed);
    }
}

/// MADV_HUGEPAGE of blocks that are tracked as huge. The program's own word is the last: what it has
/// taken from huge pages meanwhile is taken from them again.
pub(super) fn ask_for(run: &Range<usize>) -> Result<()> {
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

pub(super) fn is_huge(state: State) -> bool {
    matches!(state, State::Huge { .. })
}

/// The resident memory of the process, in bytes. proc_pid_statm(5).
pub(crate) fn resident_memory() -> Option<usize> {
    let mut text = [0u8; 128];
    let text = headroom::read(c"/proc/self/statm", &mut text).ok()?;
    let second = text.split(|byte| *byte == b' ').nth(1)?;
    headroom::number(second)?.checked_mul(PAGE_BYTES)
}
