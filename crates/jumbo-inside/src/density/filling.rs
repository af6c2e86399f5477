//! Ranges that the program makes resident whole: [`begin_filling`], [`end_filling`].
//!
//! All pages of such a range are resident without jumbo, too. So its blocks are huge without a
//! charge, as long as the host has free huge pages.

use core::ops::Range;
use core::sync::atomic::Ordering;

use super::ahead::request_scan;
use super::blocks::BlockState;
use super::fill::{indexes, read_room_now, update_counters};
use super::measure::resident;
use super::table::PAGE_BYTES;
use super::tracked::{
    BLOCKS, RUN_COUNT, advise_blocks, count_run, is_crowded, may_measure, pmd, update,
    withdraw_advice,
};
use super::{credit, is_bounded};
use crate::ledger::stats;
use jumbo_sys::{self as sys, Pagemap};

const FULL: BlockState = BlockState::Huge { empty: 0 };

/// Advises the blocks of a range without a resident page, before the range is populated.
pub(crate) fn begin_filling(range: &Range<usize>) {
    if !is_bounded() || pmd() == 0 || !may_measure() || is_crowded() {
        return;
    }
    let mut indexes = indexes(range, false);
    let is_open = |state: BlockState| state == BlockState::Waiting || state.charge() > 0;
    if BLOCKS.next(indexes.clone(), is_open).is_none() || sys::is_without_thp() {
        return;
    }
    read_room_now();
    while let Some(first) = BLOCKS.next(indexes.clone(), is_open) {
        let mut end = first;
        while end < indexes.end && begin_block(end) {
            end += 1;
        }
        let run = first..end;
        if !run.is_empty() {
            count_run(first);
            let answer = advise_blocks(&run);
            stats::advised(run.len() * pmd(), answer.err());
        }
        indexes.start = end.max(first + 1);
    }
    update_counters();
}

/// Records that a block is about to be full of one huge page; false if it has base pages.
fn begin_block(block: usize) -> bool {
    let seen = BLOCKS.seen(block);
    match seen.state() {
        BlockState::Huge { .. } => update(block, seen, FULL),
        BlockState::Waiting if resident(block * pmd(), pmd()) == Ok(Some(0)) => {
            if !credit::add_full_block(pmd()) {
                return false;
            }
            let is_current = BLOCKS.replace(block, seen, FULL);
            if !is_current {
                credit::remove_block(0, pmd());
            }
            is_current
        }
        _ => false,
    }
}

/// Finds the blocks of a range that were not populated, which wait again, and those on base pages,
/// which are collapsed later.
pub(crate) fn end_filling(range: &Range<usize>) {
    if !is_bounded() || pmd() == 0 || !may_measure() {
        return;
    }
    let Ok(pagemap) = Pagemap::open() else {
        return;
    };
    let mut indexes = indexes(range, false);
    let mut is_any = false;
    while let Some(block) = BLOCKS.next(indexes.clone(), |state| state == FULL) {
        indexes.start = block + 1;
        let (seen, address) = (BLOCKS.seen(block), block * pmd());
        if resident(address, pmd()) == Ok(Some(0)) {
            RUN_COUNT.fetch_add(1, Ordering::Relaxed);
            is_any |= update(block, seen, BlockState::Waiting);
            let _ = withdraw_advice(&(address..address + pmd()));
        } else if pagemap.is_base(address, PAGE_BYTES, true) == Ok(true) {
            is_any |= update(block, seen, BlockState::Filled);
        }
    }
    if is_any {
        request_scan();
    }
}
