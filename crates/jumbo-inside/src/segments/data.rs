//! Copies data, and advises bss: [`start`].
//!
//! `auto` copies a huge page of data only if half of its base pages were written, as relocations
//! do: the copy then takes hardly more memory. `on` copies all data.

use core::ops::Range;

use super::find::blocks;
use super::headers::Layout;
use super::memory::{self, StagingArea};
use super::{count, has_room, record_reason};
use crate::ledger::{Slot, stats, text_reason as reason};
use crate::orders::DataMode;
use crate::sandbox;
use jumbo_sys::proc::{each_mapping, is_alone};
use jumbo_sys::{Blocked, Pagemap, Pages, is_mapped};

/// Copies the PMD-sized blocks of the program's data, the first zeroes of bss included, and advises
/// the rest of its bss.
///
/// # Safety
/// No other thread runs.
#[expect(unsafe_code, reason = "moves memory")]
pub(super) unsafe fn start(layout: &Layout<'_>, mode: DataMode, pmd: usize) {
    for (file, zeroes) in layout.data() {
        let all = blocks(&(file.start..zeroes.end), pmd);
        if all.is_empty() {
            continue;
        }
        // The first block that is all zeroes is not copied.
        let end = file.end.next_multiple_of(pmd).clamp(all.start, all.end);
        let copied = all.start..end;
        // One block at a time: never more than one exists twice.
        for block in copied.step_by(pmd) {
            let block = block..block + pmd;
            // SAFETY: the caller's promise.
            match unsafe { copy(&block, mode, pmd) } {
                Ok(true) => Slot::add(&stats::slot().data_moved, pmd as u64),
                Ok(false) => {}
                Err(why) => {
                    record_reason(why);
                    break;
                }
            }
        }
        let rest = end..all.end;
        if !rest.is_empty() && is_mapped(rest.start) && memory::advise_sparse(&rest).is_ok() {
            Slot::add(&stats::slot().data_advised, rest.len() as u64);
        }
    }
}

/// Replaces a huge page of data by a copy in anonymous memory; false if that does not pay.
///
/// # Safety
/// No other thread runs.
#[expect(unsafe_code, reason = "moves memory")]
unsafe fn copy(range: &Range<usize>, mode: DataMode, pmd: usize) -> Result<bool, u32> {
    if sandbox::is_entered() {
        return Err(reason::FILTER);
    }
    if mode == DataMode::Auto {
        let pagemap = Pagemap::open().map_err(|_| reason::UNKNOWN)?;
        if count(&pagemap, range.clone(), Pages::Changed)? < pmd / 2 {
            return Ok(false);
        }
    }
    if is_alone() != Some(true) {
        return Err(reason::THREADS);
    }
    if !is_plain(range) {
        return Err(reason::GONE);
    }
    if !has_room(range.len()) {
        return Err(reason::NO_MEMORY);
    }
    let staging = StagingArea::reserve(range, pmd).map_err(|_| reason::NO_MEMORY)?;
    staging.map_anonymous().map_err(|_| reason::NO_MEMORY)?;
    // A signal handler could write to data that is already copied.
    let _blocked = Blocked::all();
    // SAFETY: the area was reserved for the range and mapped writable; no thread and no handler
    // writes to either, and no variable of this library is in the program's data.
    unsafe {
        staging
            .copy(range, 0..range.len())
            .map_err(|_| reason::GONE)?;
        staging.move_over(range).map_err(|_| reason::NO_MEMORY)?;
    }
    Ok(true)
}

/// Reports whether all of a range is private and writable, and not executable, without a gap.
fn is_plain(range: &Range<usize>) -> bool {
    let mut next = range.start;
    let read = each_mapping(|mapping| {
        if (mapping.start..mapping.end).contains(&next)
            && mapping.private
            && mapping.writable
            && !mapping.executable
        {
            next = mapping.end;
        }
        next >= range.end
    });
    read.is_ok() && next >= range.end
}
