//! Data by copy, bss by advice: [`start`].
//!
//! `auto` copies a huge page of data only if half of its base pages were written to by then, as those are that relocations fill:
//! the copy takes hardly more memory than they did. `on` copies all of it.

use core::ops::Range;

use super::find::blocks;
use super::headers::Layout;
use super::memory::{self, Staging};
use super::{Looking, because, has_room};
use crate::ledger::{Slot, stats, text_reason as reason};
use crate::orders::DataMode;
use crate::proc::{each_mapping, is_alone};
use crate::sandbox;
use crate::sys::{Blocked, Pages, is_mapped};

/// Copies what of the program's data fills PMDs, the first zeroes behind it among it, and advises the rest of its bss.
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
        // Up to the first block that is all zeroes.
        let end = file.end.next_multiple_of(pmd).clamp(all.start, all.end);
        let copied = all.start..end;
        // One at a time: there is never more than one of them twice.
        for block in copied.step_by(pmd) {
            let block = block..block + pmd;
            // SAFETY: the caller's promise.
            match unsafe { copy(&block, mode, pmd) } {
                Ok(true) => Slot::add(&stats::slot().data_moved, pmd as u64),
                Ok(false) => {}
                Err(why) => {
                    because(why);
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

/// Puts a copy in anonymous memory in the place of a huge page of data; false where it does not pay.
///
/// # Safety
/// No other thread runs.
#[expect(unsafe_code, reason = "moves memory")]
unsafe fn copy(range: &Range<usize>, mode: DataMode, pmd: usize) -> Result<bool, u32> {
    if sandbox::is_entered() {
        return Err(reason::FILTER);
    }
    if mode == DataMode::Auto {
        let looking = Looking::open().map_err(|_| reason::UNKNOWN)?;
        if looking.pages(range.clone(), Pages::Changed)? < pmd / 2 {
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
    let staging = Staging::reserve(range, pmd).map_err(|_| reason::NO_MEMORY)?;
    staging.map_anonymous().map_err(|_| reason::NO_MEMORY)?;
    // A handler could write to what has been copied.
    let _blocked = Blocked::all();
    // SAFETY: the area stands in for the range and was mapped to be written; no thread and no handler writes to either, and no
    // variable of this library is in the program's data.
    unsafe {
        staging
            .copy(range, 0..range.len())
            .map_err(|_| reason::GONE)?;
        staging
            .take_place_of(range)
            .map_err(|_| reason::NO_MEMORY)?;
    }
    Ok(true)
}

/// Whether all of a range is private, readable and writable, without a gap.
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
