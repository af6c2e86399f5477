//! A library that was built without mimalloc: all is served as by `--heap=glibc`.

use jumbo_inside::orders::PoolOrder;

pub(crate) const IS_THERE: bool = false;

pub(crate) fn divert(_pool: Option<PoolOrder>) {}

pub(crate) fn before_fork() {}

pub(crate) fn after_fork() {}

pub(crate) fn owns(_block: *const core::ffi::c_void) -> bool {
    false
}

pub(crate) fn before_thread() {}

pub(crate) fn before_lock() {}

pub(crate) fn confine() {}

pub(crate) fn taken() -> usize {
    0
}
