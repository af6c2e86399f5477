//! Changes of pages by the program that outlive a block: [`note`].

use core::sync::atomic::Ordering;

use super::window::Change;
use super::{HAS_STICKY_PAGES, HEAP, HEAP_BASE, HEAP_END, POOL, POOL_BASE};

/// Notes a change of a range.
pub(super) fn note(address: usize, length: usize, change: Change) {
    let range = address..address.saturating_add(length.max(1));
    let windows = [(&HEAP, HEAP_BASE..POOL_BASE), (&POOL, POOL_BASE..HEAP_END)];
    for (shared, site) in windows {
        if range.start >= site.end || range.end <= site.start {
            continue;
        }
        // In a handler that interrupted a holder of the lock a change is not seen.
        let is_in_blocks = shared.window.with(|window| window.change(&range, change));
        if is_in_blocks.unwrap_or(true) {
            HAS_STICKY_PAGES.store(true, Ordering::Relaxed);
        }
    }
}

/// Reports whether advice changes pages beyond the call (madvise(2)).
pub(super) fn is_sticky(advice: i32) -> bool {
    let passing = [
        libc::MADV_DONTNEED,
        libc::MADV_FREE,
        libc::MADV_HUGEPAGE,
        libc::MADV_WILLNEED,
        libc::MADV_COLD,
        libc::MADV_PAGEOUT,
        libc::MADV_POPULATE_READ,
        libc::MADV_POPULATE_WRITE,
        libc::MADV_COLLAPSE,
    ];
    !passing.contains(&advice)
}
