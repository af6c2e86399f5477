//! The tracked blocks, [`BLOCKS`]: their charges, advice and measurement.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::blocks::{self, BlockState, BlockTable, SeenState};
use super::measure::{Touched, measure};
use super::{PMD_BYTES, credit};
use crate::sandbox;
use jumbo_sys as sys;

crate::one_page::table! {
    pub(super) static BLOCKS: BlockTable = BlockTable::new();
}

/// A quarter of the default of `vm.max_map_count`, 65 530.
const MAX_RUN_COUNT: usize = 1 << 13;

/// Runs of advised blocks: each is a mapping of its own, and so is the memory between two.
pub(super) static RUN_COUNT: AtomicUsize = AtomicUsize::new(0);

/// Blocks that each scan looks at, by their number modulo the length: those that were advised or have
/// changed not long ago, and those where the program may be filling memory in order.
static ACTIVE: [AtomicBool; 256] = [const { AtomicBool::new(false) }; 256];

/// Reports whether each scan looks at a block.
pub(super) fn is_active(block: usize) -> bool {
    let word = ACTIVE.get(block % ACTIVE.len());
    word.is_some_and(|word| word.load(Ordering::Relaxed))
}

pub(super) fn set_active(block: usize, is_active: bool) {
    if let Some(word) = ACTIVE.get(block % ACTIVE.len()) {
        word.store(is_active, Ordering::Relaxed);
    }
}

pub(super) fn pmd() -> usize {
    PMD_BYTES.load(Ordering::Relaxed)
}

pub(super) fn bytes(sixteenths: usize) -> usize {
    pmd() / usize::from(blocks::SIXTEENTHS) * sixteenths
}

pub(super) fn charge(state: BlockState) -> usize {
    bytes(state.charge())
}

/// Reports whether the system calls that measure memory are allowed.
pub(super) fn may_measure() -> bool {
    !sandbox::is_entered() && !super::has_left()
}

/// Releases the charge of a previous state.
pub(super) fn release(before: BlockState) {
    if matches!(before, BlockState::Huge { .. }) {
        credit::remove_block(charge(before), pmd());
    }
}

/// Stores the measured state of a block; false if the block has changed since.
pub(super) fn update(block: usize, seen: SeenState, now: BlockState) -> bool {
    let is_current = BLOCKS.replace(block, seen, now);
    if is_current {
        match (seen.state(), now) {
            (BlockState::Huge { .. }, BlockState::Huge { .. }) => {
                credit::adjust(charge(seen.state()), charge(now));
            }
            (before, _) => release(before),
        }
    }
    is_current
}

/// Calls MADV_NOHUGEPAGE; EPERM behind a filter that forbids it.
#[expect(unsafe_code, reason = "advises memory")]
pub(super) fn withdraw_advice(range: &Range<usize>) -> Result<()> {
    // SAFETY: changes only how memory is backed, never its content.
    unsafe { sys::advise(range.start, range.len(), libc::MADV_NOHUGEPAGE) }
}

/// Calls MADV_HUGEPAGE.
#[expect(unsafe_code, reason = "advises memory")]
pub(super) fn advise_huge(range: &Range<usize>) -> Result<()> {
    // SAFETY: as above.
    unsafe { sys::advise(range.start, range.len(), libc::MADV_HUGEPAGE) }
}

/// Measures a charged block; returns the result.
pub(super) fn measure_block(block: usize) -> Option<Touched> {
    let seen = BLOCKS.seen(block);
    let measured = || may_measure().then(|| measure(block * pmd(), pmd()).ok())?;
    let touched = sys::guarded(measured)?;
    let now = match touched {
        Touched::Gone => BlockState::Untracked,
        Touched::Nothing => BlockState::ADVISED,
        // Base pages waste nothing, and the next touch adds a base page.
        Touched::Some { empty: 0, resident } if resident < pmd() => BlockState::Waiting,
        Touched::Some { empty, .. } => BlockState::Huge { empty },
    };
    if now != seen.state()
        && update(block, seen, now)
        && now == BlockState::Waiting
        && !is_crowded()
    {
        // Otherwise dropped parts of it would be huge after their next touch, without a charge.
        RUN_COUNT.fetch_add(1, Ordering::Relaxed);
        let _ = withdraw_advice(&(block * pmd()..(block + 1) * pmd()));
    }
    Some(touched)
}

/// Reports whether more differences in advice could exceed `vm.max_map_count`.
pub(super) fn is_crowded() -> bool {
    RUN_COUNT.load(Ordering::Relaxed) > MAX_RUN_COUNT
}

/// Counts a run whose advice differs from that of the block in front.
pub(super) fn count_run(first: usize) {
    if !is_huge(BLOCKS.seen(first.saturating_sub(1)).state()) {
        RUN_COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

/// Advises blocks tracked as huge, and withdraws advice that the program has forbidden since.
pub(super) fn advise_blocks(run: &Range<usize>) -> Result<()> {
    let is_forbidden = |block: &usize| !is_huge(BLOCKS.seen(*block).state());
    if run.clone().any(|block| is_forbidden(&block)) {
        return Err(Errno::AGAIN);
    }
    let answer = advise_huge(&(run.start * pmd()..run.end * pmd()));
    for block in run.clone().filter(is_forbidden) {
        let _ = withdraw_advice(&(block * pmd()..(block + 1) * pmd()));
    }
    answer
}

pub(super) fn is_huge(state: BlockState) -> bool {
    matches!(state, BlockState::Huge { .. })
}
