//! Stub of a library built without mimalloc, which runs as with `--heap=glibc`.

use core::ffi::c_void;
use core::ptr::null_mut;

use jumbo_inside::orders::PoolOrder;

pub(crate) const IS_THERE: bool = false;

pub(crate) fn divert(_pool: Option<PoolOrder>) -> bool {
    false
}

pub(crate) fn before_fork() {}

pub(crate) fn after_fork() {}

pub(crate) fn allocate(_size: usize, _align: usize, _zeroed: bool) -> *mut c_void {
    null_mut()
}

/// # Safety
/// No requirement.
pub(crate) unsafe fn free(_block: *mut c_void) -> bool {
    false
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
