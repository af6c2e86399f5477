//! Blocks in glibc's main heap, above jumbo's minimum size: sizes that the program freed before go
//! where plain has them ([`jumbo_inside::heap::main_heap`]).

use core::ffi::c_void;

use jumbo_inside::density::program_break;
use jumbo_inside::heap::main_heap::{self, Part};
use jumbo_inside::heap::{self, maps};
use jumbo_inside::sandbox;

use crate::alloc::{ALIGN, drained};
use crate::glibc;
use crate::next::{self, set_errno};

/// Returns the part of glibc's main heap that a block may come from. glibc adds room for the
/// alignment.
pub(crate) fn part(size: usize, align: usize) -> Part {
    match align {
        ALIGN => main_heap::part(size),
        // A program that requests a larger alignment manages huge pages itself.
        _ if align.is_power_of_two() && align <= heap::BASE_PAGE => {
            main_heap::part(size.saturating_add(align + 2 * ALIGN))
        }
        _ => Part::None,
    }
}

/// Allocates a large block in glibc's main heap.
#[cold]
#[inline(never)]
pub(crate) fn in_main_heap(size: usize, allocate: impl Fn() -> *mut c_void) -> *mut c_void {
    let block = from_glibc(|| drained(&allocate));
    if main_heap::record_block(size, heap_end()) {
        heap::give_back();
    }
    block
}

/// Allocates a block from the free memory of glibc's main heap, as glibc does before it maps a
/// block.
#[cold]
#[inline(never)]
pub(crate) fn between(size: usize, align: usize, zeroed: bool) -> Option<*mut c_void> {
    // Without free memory glibc maps the block, and unmaps it again: not under a filter.
    if sandbox::is_entered() || sandbox::is_entered_later() {
        return None;
    }
    let before = next::errno();
    // SAFETY: memalign(3).
    let block = from_glibc(|| unsafe { (next::memalign.get())(align, size) });
    let end = heap_end();
    let has_found = program_break::is_below(block.addr(), end);
    main_heap::record_attempt(size, has_found, end);
    if !has_found {
        // SAFETY: the block has just been allocated, and nothing uses it.
        unsafe { (next::free.get())(block) };
        set_errno(before);
        return None;
    }
    if zeroed {
        // SAFETY: as above; the block has that size.
        unsafe { block.write_bytes(0, size) };
    }
    Some(block)
}

/// Allocates a block of glibc, and advises the growth of the main heap: glibc would advise the
/// whole step, which may be more than the credit covers.
pub(crate) fn from_glibc(allocate: impl Fn() -> *mut c_void) -> *mut c_void {
    glibc::set_threshold();
    let has_earned = glibc::earn(false);
    let block = allocate();
    if let Some(step) = program_break::moved(heap_end()) {
        maps::advise_mapping(step.start, step.len(), true);
    }
    if has_earned {
        glibc::earn(true);
    }
    block
}

/// Returns the end of glibc's main heap.
pub(crate) fn heap_end() -> usize {
    // SAFETY: sbrk(0) changes nothing.
    unsafe { (next::sbrk.get())(0) }.addr()
}
