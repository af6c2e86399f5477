//! Ranges of the program's mappings with an advice of its own that splits mappings: [`splits`].
//!
//! Such an advice is a property of a mapping, so one of a part of a mapping cuts it (madvise(2)). Then
//! the kernel refuses to move or grow all of it, with jumbo or without. Each range is remembered until
//! it is unmapped; one that finds no place in the table only lets a move succeed that fails without
//! jumbo.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

use super::maps;
use crate::density::table::{RangeTable, Span};

const MAX_RANGES: usize = 64;

crate::one_page::table! {
    static RANGES: RangeTable<(), MAX_RANGES> = RangeTable::new([(); MAX_RANGES]);
}
crate::one_page! {
    /// Set with the first range.
    static HAS_RANGES: AtomicBool = AtomicBool::new(false);
}

/// Records the program's advice for a range.
pub(super) fn record(address: usize, length: usize, advice: i32) {
    let range = address..address.saturating_add(length);
    match advice {
        libc::MADV_NORMAL
        | libc::MADV_DOFORK
        | libc::MADV_DODUMP
        | libc::MADV_KEEPONFORK
        | libc::MADV_UNMERGEABLE => undo(&range),
        libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_DONTFORK
        | libc::MADV_DONTDUMP
        | libc::MADV_WIPEONFORK
        | libc::MADV_MERGEABLE
        | libc::MADV_NOHUGEPAGE
            if maps::is_placed(address) =>
        {
            add(&range);
        }
        _ => {}
    }
}

/// Adds a range. One mapping may have several kinds of advice, in ranges that overlap.
fn add(range: &Range<usize>) {
    HAS_RANGES.store(true, Ordering::Relaxed);
    if let Some(span) = Span::new(range)
        && !RANGES.each().any(|(_, known)| known == span)
    {
        let _ = RANGES.add(&span, |()| ());
    }
}

/// Forgets the ranges within one whose advice the program has taken back.
fn undo(range: &Range<usize>) {
    for (slot, span) in RANGES.each() {
        let known = span.range();
        if range.start <= known.start && known.end <= range.end {
            slot.end(&span, |()| ());
        }
    }
}

/// Forgets a range that is unmapped or mapped over.
#[inline(always)]
pub(super) fn forget(range: &Range<usize>) {
    if HAS_RANGES.load(Ordering::Relaxed)
        && let Some(gone) = Span::new(range)
    {
        RANGES.cut(&gone, |()| ());
    }
}

/// Moves what is known of `old` bytes, of which `new` are left or which have grown to `new`. Growth has
/// the advice of the end.
pub(super) fn moved(from: usize, old: usize, to: usize, new: usize) {
    if !HAS_RANGES.load(Ordering::Relaxed) {
        return;
    }
    let (end, grown) = (from.saturating_add(old), new.saturating_sub(old));
    let kept = from..from.saturating_add(old.min(new));
    for (slot, span) in RANGES.each() {
        let known = span.range();
        let part = known.start.max(kept.start)..known.end.min(kept.end);
        if part.is_empty() || from == to && (grown == 0 || known.end != end) {
            continue;
        }
        let grown = if part.end == end { grown } else { 0 };
        let place = match from == to {
            true => {
                slot.end(&span, |()| ());
                known.start
            }
            false => part.start - from + to,
        };
        add(&(place..(part.end - from + to).saturating_add(grown)));
    }
    let gone = if from == to { kept.end } else { from };
    forget(&(gone..end));
}

/// Reports whether advice of the program covers a range.
pub(super) fn covers(range: &Range<usize>) -> bool {
    HAS_RANGES.load(Ordering::Relaxed)
        && RANGES.each().any(|(_, span)| {
            let known = span.range();
            known.start <= range.start && range.end <= known.end
        })
}

/// Reports whether advice of the program begins or ends within a range.
pub(super) fn splits(range: &Range<usize>) -> bool {
    RANGES.each().any(|(_, span)| {
        let known = span.range();
        let overlaps = known.start < range.end && range.start < known.end;
        overlaps && !(known.start <= range.start && range.end <= known.end)
    })
}

/// Frees, in the child of a fork, what a thread of the parent was changing.
pub(super) fn forked() {
    RANGES.forked();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_splits_the_range_that_it_covers_in_part() {
        let at = super::super::MAPS_BASE;
        let page = 4096;
        let range = at..at + 100 * page;
        let advise = |first: usize, pages: usize, advice| {
            record(at + first * page, pages * page, advice);
            splits(&range)
        };
        assert!(!advise(0, 200, libc::MADV_SEQUENTIAL), "all of it");
        assert!(!advise(120, 10, libc::MADV_RANDOM), "another range");
        assert!(!advise(10, 10, libc::MADV_COLD), "no property");
        assert!(advise(10, 10, libc::MADV_DONTFORK));
        assert!(!advise(10, 10, libc::MADV_DOFORK), "as before");
        assert!(advise(90, 10, libc::MADV_DONTDUMP));
        moved(at, 100 * page, at + 1000 * page, 100 * page);
        assert!(!splits(&range));
        assert!(splits(&(at + 1000 * page..at + 1100 * page)));
        forget(&(at..at + 2000 * page));
        assert!(!splits(&(at + 1000 * page..at + 1100 * page)));
        // Growth has the advice of the end, also in place.
        let pages = |first: usize, count: usize| at + first * page..at + (first + count) * page;
        record(at, 100 * page, libc::MADV_NOHUGEPAGE);
        moved(at, 100 * page, at, 200 * page);
        assert!(covers(&pages(0, 200)) && !splits(&pages(0, 200)));
        moved(at, 200 * page, at + 1000 * page, 300 * page);
        assert!(covers(&pages(1000, 300)) && !covers(&pages(0, 1)));
        moved(at + 1000 * page, 300 * page, at + 1000 * page, 50 * page);
        assert!(covers(&pages(1000, 50)) && !covers(&pages(1000, 51)));
        forget(&(at..at + 2000 * page));
    }
}
