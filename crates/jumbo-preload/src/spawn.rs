//! pthread_create(3), thrd_create(3): the last moment at which what hugetlb pages hold can move.

use core::ffi::{c_int, c_void};

use jumbo_inside::heap;

use crate::{mimalloc, next};

/// pthread_create(3).
///
/// # Safety
/// As for pthread_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    mimalloc::before_thread();
    heap::before_thread();
    // SAFETY: the same call.
    unsafe { (next::pthread_create.get())(thread, attributes, start, argument) }
}

/// thrd_create(3), which glibc does not make of the other.
///
/// # Safety
/// As for thrd_create(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn thrd_create(
    thread: *mut libc::pthread_t,
    start: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> c_int {
    mimalloc::before_thread();
    heap::before_thread();
    // SAFETY: the same call.
    unsafe { (next::thrd_create.get())(thread, start, argument) }
}
