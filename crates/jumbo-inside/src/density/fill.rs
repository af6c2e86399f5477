//! Huge pages that a program earns: [`claim`] at an allocation.
//!
//! The first blocks of new memory are advised within the credit ([`credit`]); the others wait on
//! base pages. Measured blocks (`measure`) return credit for the next ones: at an allocation that
//! exceeds the credit, or on the thread (`ahead`).
//!
//! A block that fills up on base pages is collapsed. A sparse block keeps its charge, so a sparse
//! program never exceeds the credit.

use core::fmt::Write as _;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use super::ahead::request_scan;
use super::blocks::{self, BlockState};
use super::measure::{Touched, resident};
use super::table::PAGE_BYTES;
use super::tracked::{
    BLOCKS, RUN_COUNT, charge, count_run, is_crowded, is_huge, may_measure, measure_block, pmd,
    release, set_active, update, withdraw_advice,
};
use super::{credit, touch};
use crate::debug;
use crate::ledger::{Slot, stats};
use crate::sync::millis;
use crate::{sandbox, watch};
use jumbo_sys::{self as sys, proc};

/// Maximum age of the available memory that was read.
const MAX_ROOM_AGE: Duration = Duration::from_millis(100);
/// Age from which a program with threads reads it itself: it is without a scanner.
const MAX_UNSEEN_AGE: Duration = Duration::from_secs(2);
const MAX_MEASURED_BLOCKS: usize = 16;
/// Blocks advised since, after which an untouched one has to make room.
const PATIENCE: usize = 8;
/// Sixteenths of a block whose credit [`measure_recent`] does not return.
const MAX_REST: usize = 2;
static HAS_READ_ROOM: AtomicBool = AtomicBool::new(false);
static READ_MILLIS: AtomicU64 = AtomicU64::new(0);
/// Ring of the blocks advised last, for [`measure_recent`].
static RECENT_BLOCKS: [AtomicUsize; RECENT_COUNT] = [const { AtomicUsize::new(0) }; RECENT_COUNT];
const RECENT_COUNT: usize = 256;
/// Blocks ever put into the ring, and those measured since.
static ADVISED_COUNT: AtomicUsize = AtomicUsize::new(0);
static MEASURED_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Calls that [`measure_recent`] skips after it found nothing touched, now and next time.
static SKIPS_LEFT: AtomicUsize = AtomicUsize::new(0);
static NEXT_SKIPS: AtomicUsize = AtomicUsize::new(0);
const MAX_SKIPS: usize = 1024;
/// Blocks that the child of a fork tracks before it requests a scan. A scanner takes half a
/// millisecond, for which a server that forks for each request would wait.
const CHILD_BLOCKS: usize = 3;
crate::one_page! {
    /// What is left of them.
    static LEFT_BLOCKS: AtomicUsize = AtomicUsize::new(0);
}

/// Returns the indexes of whole blocks in a range; `is_part` adds the partial one at its start.
pub(super) fn indexes(range: &Range<usize>, is_part: bool) -> Range<usize> {
    let shift = pmd().trailing_zeros();
    let first = match is_part {
        true => range.start >> shift,
        false => (range.start.saturating_add(pmd() - 1)) >> shift,
    };
    first..(range.end >> shift).max(first)
}

/// Returns the size of a block in bytes; 1 before the start.
pub(crate) fn block_bytes() -> usize {
    pmd().max(1)
}

/// Tracks a block that waits, or that is advised and charged; false if that is impossible.
fn track(block: usize, state: BlockState) -> bool {
    match BLOCKS.set(block, state) {
        Some(before) => {
            release(before);
            true
        }
        None => false,
    }
}

/// Reports whether the available memory was not read a moment ago, so that the caller reads it.
fn has_to_read() -> bool {
    let is_old = room_age() > MAX_ROOM_AGE;
    if is_old {
        READ_MILLIS.store(millis(crate::sync::now()), Ordering::Relaxed);
    }
    is_old
}

/// Reports whether the process has read the available memory.
pub(super) fn has_read_room() -> bool {
    HAS_READ_ROOM.load(Ordering::Relaxed)
}

fn room_age() -> Duration {
    crate::sync::now().saturating_sub(Duration::from_millis(READ_MILLIS.load(Ordering::Relaxed)))
}

/// Reads the available memory, in a scan.
pub(super) fn read_room() {
    if has_to_read() {
        credit::read_room();
    }
}

/// Reads the available memory where files may be read: the scanner may have no thread.
pub(super) fn read_room_now() {
    if sandbox::is_entered_later() || super::has_left() {
        return;
    }
    HAS_READ_ROOM.store(true, Ordering::Relaxed);
    if has_to_read() {
        sys::unfiltered(|| sys::apart(credit::read_room));
    }
}

/// Tracks the blocks of new memory. Returns the part to advise, at its start; the rest waits.
/// `is_part`: the caller owns the partial block at the start.
pub(super) fn claim(range: &Range<usize>, is_part: bool) -> Range<usize> {
    let indexes = indexes(range, is_part);
    let first = indexes.start * pmd();
    // The program may have disabled THP by prctl(2).
    let is_off = || may_measure() && sys::is_without_thp();
    if indexes.is_empty() || sys::guarded(is_off) {
        return first..first;
    }
    let is_first = !has_read_room();
    if is_first || may_measure() && (credit::is_scarce() || !watch::is_watched()) {
        // Another thread may count on the lowest free descriptor.
        match is_first || sys::has_one_thread() || room_age() > MAX_UNSEEN_AGE {
            true => read_room_now(),
            false => request_scan(),
        }
    }
    let wanted = indexes.len() * pmd();
    if credit::remaining() < wanted {
        sys::guarded(|| sys::apart(measure_recent));
    }
    // One allocation never takes all credit, since it may stay sparse.
    let left = credit::remaining();
    let max = match wanted > left {
        true => left / 2,
        false => wanted,
    };
    let max = (max / pmd()).max(1);
    let mut advised = indexes.start;
    let is_costly = touch::is_costly();
    let max = if is_crowded() || is_costly { 0 } else { max };
    if is_costly {
        Slot::add(&stats::slot().costly, wanted as u64);
    }
    for block in indexes.clone().take(max) {
        if !credit::charge_block() {
            break;
        }
        if !track(block, BlockState::ADVISED) {
            credit::remove_block(pmd(), pmd());
            break;
        }
        remember(block);
        advised = block + 1;
    }
    if advised > indexes.start {
        count_run(indexes.start);
    }
    track_waiting(advised..indexes.end);
    set_active(advised, true);
    debug::note(
        [(advised - indexes.start) * pmd(), wanted, first],
        |line, [advised, wanted, at]| {
            write!(
                line,
                "new memory: {advised} of {wanted} bytes advised at {at:#x}"
            )
        },
    );
    update_counters();
    first..advised * pmd()
}

pub(super) fn update_counters() {
    let slot = stats::slot();
    let relaxed = Ordering::Relaxed;
    slot.untouched.store(credit::charged() as u64, relaxed);
    slot.huge.store(credit::huge_bytes() as u64, relaxed);
}

/// Adds an advised block to the ring.
pub(super) fn remember(block: usize) {
    set_active(block, true);
    let place = ADVISED_COUNT.fetch_add(1, Ordering::Relaxed);
    if let Some(recent) = RECENT_BLOCKS.get(place % RECENT_COUNT) {
        recent.store(block, Ordering::Relaxed);
    }
}

/// Reports whether the block in front of an address is huge.
pub(super) fn is_behind_huge(address: usize) -> bool {
    is_huge(
        BLOCKS
            .seen((address >> pmd().trailing_zeros()).saturating_sub(1))
            .state(),
    )
}

/// Tracks new memory on base pages.
pub(super) fn begin_on_base_pages(range: &Range<usize>) {
    track_waiting(indexes(range, false));
}

fn track_waiting(indexes: Range<usize>) {
    let new = indexes
        .filter(|block| track(*block, BlockState::Waiting))
        .count();
    let left = LEFT_BLOCKS.load(Ordering::Relaxed);
    if new < left {
        LEFT_BLOCKS.store(left - new, Ordering::Relaxed);
    } else if new > 0 {
        LEFT_BLOCKS.store(0, Ordering::Relaxed);
        request_scan();
    }
}

/// Notes that the program has made reserved memory accessible.
pub(crate) fn opened(range: &Range<usize>) {
    if pmd() != 0
        && indexes(range, true).any(|block| BLOCKS.seen(block).state() == BlockState::Waiting)
    {
        request_scan();
    }
}

/// Leaves blocks to the program, which advises them itself: what was advised ahead is its own now.
pub(super) fn advised_by_program(range: &Range<usize>) {
    if pmd() == 0 {
        return;
    }
    let mut indexes = indexes(range, false);
    let is_ours = |state| state == BlockState::ADVISED;
    while let Some(block) = BLOCKS.next(indexes.clone(), is_ours) {
        indexes.start = block + 1;
        let seen = BLOCKS.seen(block);
        if seen.state() == BlockState::ADVISED {
            update(block, seen, BlockState::Untracked);
        }
    }
}

/// Forgets the blocks of a range that is unmapped or mapped over.
pub(crate) fn forget(range: &Range<usize>) {
    if pmd() == 0 {
        return;
    }
    let mut indexes = indexes(range, false);
    while let Some(block) = BLOCKS.next(indexes.clone(), |_| true) {
        track(block, BlockState::Untracked);
        indexes.start = block + 1;
    }
}

/// Notes that a range is unmapped that ends within blocks. The rest of such a block may be resident
/// and untouched, or nothing, so a dense block is measured again.
pub(super) fn forget_parts(range: &Range<usize>) {
    if pmd() == 0 {
        return;
    }
    for end in [range.start, range.end] {
        let block = end >> pmd().trailing_zeros();
        let seen = BLOCKS.seen(block);
        let is_part = !end.is_multiple_of(pmd());
        if is_part
            && seen.state() == (BlockState::Huge { empty: 0 })
            && update(block, seen, BlockState::Huge { empty: 1 })
        {
            remember(block);
            request_scan();
        }
    }
}

/// Notes that the content of a range is dropped: an advised block may stay empty.
pub(crate) fn dropped(range: &Range<usize>) {
    drop_content(range, true);
}

/// Variant of [`dropped`] for a sparse owner, whose own waste uses the allowance: it begins again on
/// base pages.
pub(crate) fn dropped_by_sparse(range: &Range<usize>) {
    drop_content(range, false);
}

fn drop_content(range: &Range<usize>, may_charge: bool) {
    if pmd() == 0 || range.len() < pmd() {
        return;
    }
    let mut indexes = indexes(range, false);
    let is_there = |state| matches!(state, BlockState::Filled | BlockState::Huge { .. });
    while let Some(block) = BLOCKS.next(indexes.clone(), is_there) {
        indexes.start = block + 1;
        if BLOCKS.seen(block).state() == BlockState::Filled {
            track(block, BlockState::Waiting);
        } else if may_charge && credit::charge_block() {
            track(block, BlockState::ADVISED);
        } else if is_crowded() || !sys::allows(libc::MADV_NOHUGEPAGE) {
            credit::charge_unchecked(pmd(), pmd());
            track(block, BlockState::ADVISED);
        } else {
            RUN_COUNT.fetch_add(1, Ordering::Relaxed);
            track(block, BlockState::Waiting);
            let _ = withdraw_advice(&(block * pmd()..(block + 1) * pmd()));
        }
    }
}

/// Reports whether a block of a range is tracked, so that advice may have split its mapping.
pub(crate) fn is_cut(range: &Range<usize>) -> bool {
    if pmd() == 0 {
        return false;
    }
    let shift = pmd().trailing_zeros();
    let parts = range.start >> shift..range.end.div_ceil(pmd());
    BLOCKS.next(parts, |_| true).is_some()
}

/// Removes the advice of a range before it moves or grows: before Linux 6.17 mremap(2) accepts only
/// one mapping. Huge blocks stay huge.
pub(crate) fn moving(range: &Range<usize>) {
    // The advice of partial blocks is removed, too.
    if range.len() < pmd() || !is_cut(range) {
        return;
    }
    let mut indexes = indexes(range, false);
    let is_open = |state: BlockState| state.charge() > 0;
    while let Some(block) = BLOCKS.next(indexes.clone(), is_open) {
        indexes.start = block + 1;
        let is_untouched = measure_block(block) == Some(Touched::Nothing);
        let seen = BLOCKS.seen(block);
        if is_untouched && seen.state() == BlockState::ADVISED {
            update(block, seen, BlockState::Waiting);
        }
    }
    let _ = withdraw_advice(range);
}

/// Removes the advice that a tracked mapping's growth inherited: the thread may have advised the
/// block in front after [`moving`].
pub(crate) fn grown(range: &Range<usize>) {
    if pmd() == 0 {
        return;
    }
    let before = range.start.saturating_sub(1) >> pmd().trailing_zeros();
    if BLOCKS.next(before..before + 1, |_| true).is_some() {
        let _ = withdraw_advice(range);
    }
}

/// Moves the states of a range.
pub(crate) fn moved(from: usize, to: usize, length: usize) {
    if pmd() == 0 || length < pmd() || from == to {
        return;
    }
    let (old, new) = (from..from + length, to..to + length);
    let is_alike = from % pmd() == to % pmd();
    let indexes = indexes(&old, false);
    let offset = (to >> pmd().trailing_zeros()).wrapping_sub(from >> pmd().trailing_zeros());
    let mut at = indexes.start;
    while let Some(block) = BLOCKS.next(at..indexes.end, |_| true) {
        at = block + 1;
        let state = BLOCKS
            .set(block, BlockState::Untracked)
            .unwrap_or(BlockState::Untracked);
        // The charge moves along.
        let has_moved = is_alike
            && BLOCKS
                .set(block.wrapping_add(offset), state)
                .is_some_and(|before| {
                    release(before);
                    true
                });
        if !has_moved {
            release(state);
        }
    }
    if !is_alike {
        begin_on_base_pages(&new);
    }
}

/// Measures the blocks that were advised last, to return their credit.
fn measure_recent() {
    if !may_measure() {
        return;
    }
    let skips = SKIPS_LEFT.load(Ordering::Relaxed);
    if skips > 0 {
        SKIPS_LEFT.store(skips - 1, Ordering::Relaxed);
        return;
    }
    let before = credit::charged();
    let end = ADVISED_COUNT.load(Ordering::Relaxed);
    let start = MEASURED_COUNT
        .load(Ordering::Relaxed)
        .max(end.saturating_sub(RECENT_COUNT));
    let mut measured = 0;
    for place in start..end {
        let Some(recent) = RECENT_BLOCKS.get(place % RECENT_COUNT) else {
            break;
        };
        let block = recent.load(Ordering::Relaxed);
        let charge = || BLOCKS.seen(block).state().charge();
        let charged = charge();
        if charged > MAX_REST {
            let touched = measure_block(block);
            measured += 1;
            if touched == Some(Touched::Nothing) && end - place > PATIENCE {
                take_back(block);
            }
        }
        // The first block that is still filling is measured again next time. One of which a part stays
        // untouched is left to the thread, or such blocks would soon be all that are measured.
        let is_untouched = charge() == usize::from(blocks::SIXTEENTHS);
        let is_settled = charge() <= MAX_REST || !is_untouched && charge() == charged;
        if is_settled && MEASURED_COUNT.load(Ordering::Relaxed) == place {
            MEASURED_COUNT.store(place + 1, Ordering::Relaxed);
        }
        if measured == MAX_MEASURED_BLOCKS {
            break;
        }
    }
    if MEASURED_COUNT.load(Ordering::Relaxed) < start {
        MEASURED_COUNT.store(start, Ordering::Relaxed);
    }
    let skips = match credit::charged() + pmd() <= before {
        true => 0,
        false => (NEXT_SKIPS.load(Ordering::Relaxed) * 2 + 1).min(MAX_SKIPS),
    };
    NEXT_SKIPS.store(skips, Ordering::Relaxed);
    SKIPS_LEFT.store(skips, Ordering::Relaxed);
}

/// Takes the advice of an untouched block back, and with it the charge: later blocks are filled, and
/// this one may never be.
fn take_back(block: usize) {
    if is_crowded() || !sys::allows(libc::MADV_NOHUGEPAGE) {
        return;
    }
    let seen = BLOCKS.seen(block);
    let range = block * pmd()..(block + 1) * pmd();
    if !update(block, seen, BlockState::Waiting) {
        return;
    }
    RUN_COUNT.fetch_add(1, Ordering::Relaxed);
    let _ = withdraw_advice(&range);
    if resident(range.start, pmd()) == Ok(Some(0)) {
        debug::note([range.start, 0, 0], |line, [at, ..]| {
            write!(
                line,
                "advice taken back from the untouched block at {at:#x}"
            )
        });
    } else {
        // Touched before that, it may be huge.
        let seen = BLOCKS.seen(block);
        credit::charge_unchecked(pmd(), pmd());
        if seen.state() != BlockState::Waiting || !BLOCKS.replace(block, seen, BlockState::ADVISED)
        {
            credit::remove_block(pmd(), pmd());
        }
    }
    // It is huge once it is full.
    request_scan();
}

/// Counts the charges anew in the child of a fork, before any other use.
pub(super) fn forked() {
    LEFT_BLOCKS.store(CHILD_BLOCKS, Ordering::Relaxed);
    // There is one more process to share it.
    HAS_READ_ROOM.store(false, Ordering::Relaxed);
    READ_MILLIS.store(0, Ordering::Relaxed);
    let (mut charged, mut huge) = (0, 0);
    let mut indexes = blocks::ALL;
    while blocks::HAS_BLOCKS.load(Ordering::Acquire)
        && let Some(block) = BLOCKS.next(indexes.clone(), |_| true)
    {
        indexes.start = block + 1;
        if let state @ BlockState::Huge { .. } = BLOCKS.seen(block).state() {
            charged += charge(state);
            huge += pmd();
        }
    }
    credit::recount(charged, huge);
}

/// Returns the resident memory of the process, in bytes. proc_pid_statm(5).
pub(crate) fn resident_memory() -> Option<usize> {
    let mut text = [0u8; 128];
    let text = proc::read(c"/proc/self/statm", &mut text).ok()?;
    let second = text.split(|byte| *byte == b' ').nth(1)?;
    proc::number(second)?.checked_mul(PAGE_BYTES)
}
