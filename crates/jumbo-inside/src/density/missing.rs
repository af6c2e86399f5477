//! Pages that the program did not touch become missing again: [`make_missing`], before the program
//! registers a range for the faults of missing pages (userfaultfd(2)).
//!
//! The kernel reports no fault in a huge page, where all pages are present. Those that hold only
//! zeroes count as untouched, as in [`super::measure`]: they are dropped. A base page was touched by
//! the program, and stays.
#![expect(unsafe_code, reason = "drops pages of zeroes")]

use core::ops::Range;

use super::blocks::BlockState;
use super::measure::{is_page_zero, mincore};
use super::table::PAGE_BYTES;
use super::tracked::{BLOCKS, pmd};
use super::{IS_BOUNDED, Ordering, RANGES};
use jumbo_sys::{self as sys, Pagemap, Pages};

/// Base pages of a huge page whose residency one call reads.
const PART_PAGES: usize = 512;

/// Drops the pages of zeroes in the huge pages of a range. No other thread fills the range
/// meanwhile: scans have ended, and the program is about to hand the range to its handler. The
/// process has no filter: one may kill for these calls.
pub fn make_missing(range: &Range<usize>) {
    if pmd() == 0 {
        return;
    }
    let pagemap = Pagemap::open().ok();
    for block in range.start / pmd()..range.end.div_ceil(pmd()) {
        let whole = block * pmd()..(block + 1) * pmd();
        let Some(advice) = drop_advice(block) else {
            continue;
        };
        // Before Linux 6.7 nothing says cheaply whether a page is huge.
        let huge = pagemap
            .as_ref()
            .and_then(|map| map.count(whole.clone(), Pages::Huge).ok());
        if huge == Some(0) {
            continue;
        }
        let part = whole.start.max(range.start)..whole.end.min(range.end);
        let mut resident = [0u8; PART_PAGES];
        for start in part.clone().step_by(PART_PAGES * PAGE_BYTES) {
            let length = (part.end - start).min(PART_PAGES * PAGE_BYTES);
            if mincore(start, length, &mut resident).is_ok() {
                drop_zeroes(start, resident.get(..length / PAGE_BYTES), advice);
            }
        }
    }
}

/// Returns the advice that drops a page of a block on jumbo's huge pages; `None` for other memory.
fn drop_advice(block: usize) -> Option<i32> {
    let at = block * pmd();
    if RANGES.each().any(|(_, span)| span.range().contains(&at)) {
        return Some(libc::MADV_REMOVE);
    }
    let is_huge = matches!(BLOCKS.seen(block).state(), BlockState::Huge { .. });
    // Without a bound private memory is advised and not tracked.
    (is_huge || !IS_BOUNDED.load(Ordering::Relaxed)).then_some(libc::MADV_DONTNEED)
}

/// Drops each run of resident pages of zeroes.
fn drop_zeroes(start: usize, resident: Option<&[u8]>, advice: i32) {
    let mut run = start..start;
    let drop_run = |run: &Range<usize>| {
        if !run.is_empty() {
            // SAFETY: all pages hold zeroes, which they read as again until the registration.
            let _ = unsafe { sys::advise(run.start, run.len(), advice) };
        }
    };
    for (index, state) in resident.unwrap_or_default().iter().enumerate() {
        let page = start + index * PAGE_BYTES;
        if state & 1 != 0 && is_page_zero(page) == Ok(true) {
            if run.end != page {
                run.start = page;
            }
            run.end = page + PAGE_BYTES;
        } else {
            drop_run(&run);
            run = page..page;
        }
    }
    drop_run(&run);
}
