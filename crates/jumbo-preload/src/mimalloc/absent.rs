//! Stub of a library built without mimalloc, which runs as with `--heap=glibc`.

use core::ffi::c_void;
use core::ptr::null_mut;

use jumbo_inside::orders::PoolOrder;

use crate::alloc;

pub(crate) const IS_THERE: bool = false;

pub(crate) fn divert(_pool: Option<PoolOrder>) -> bool {
    false
}

pub(crate) fn usual_size_limit() -> usize {
    0
}

pub(crate) fn may_reuse() -> bool {
    false
}

pub(crate) fn is_elsewhere() -> bool {
    false
}

pub(crate) fn before_fork() {}

pub(crate) fn after_fork() {}

pub(crate) fn allocate(_size: usize, _align: usize, _zeroed: bool) -> *mut c_void {
    null_mut()
}

/// # Safety
/// As for free(3).
pub(crate) unsafe fn free(block: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { alloc::jumbo_free_other(block) }
}

pub(crate) fn is_small(_size: usize) -> bool {
    false
}

pub(crate) fn malloc(size: usize) -> *mut c_void {
    alloc::jumbo_malloc_other(size)
}

/// # Safety
/// No requirement.
pub(crate) unsafe fn room(_block: *const c_void) -> Option<usize> {
    None
}

pub(crate) fn trim() -> bool {
    false
}

pub(crate) fn before_thread() {}

pub(crate) fn has_pool() -> bool {
    false
}

pub(crate) fn give_up_addresses() {}

pub(crate) fn has_served() -> bool {
    false
}

pub(crate) fn confine() {}

pub(crate) fn without_clock() {}

pub(crate) fn unconfine() {}

pub(crate) fn forked() {}

pub(crate) fn taken() -> usize {
    0
}
