//! The doors of the calls that make and end threads: pthread_create(3), thrd_create(3), exit(2).

use core::ffi::{c_int, c_long, c_void};

use jumbo_inside::events::Mechanism as _;
use jumbo_inside::sandbox;

use crate::mechanisms::All;

/// pthread_create(3): the last moment at which what hugetlb pages hold can move.
///
/// # Safety
/// As for pthread_create(3).
pub(crate) unsafe fn create(
    call: impl Fn(
        *mut libc::pthread_t,
        *const libc::pthread_attr_t,
        extern "C" fn(*mut c_void) -> *mut c_void,
        *mut c_void,
    ) -> c_int,
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    All::before_thread();
    call(thread, attributes, start, argument)
}

/// thrd_create(3), which glibc does not make of the other.
///
/// # Safety
/// As for thrd_create(3).
pub(crate) unsafe fn create_thrd(
    call: impl Fn(*mut libc::pthread_t, extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    thread: *mut libc::pthread_t,
    start: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> c_int {
    All::before_thread();
    call(thread, start, argument)
}

/// exit(2) by its number, which ends one thread.
pub(crate) fn exit(call: impl Fn() -> c_long) -> c_long {
    // Behind a filter there are no workers, and nothing to ask.
    if !sandbox::is_entered() && rustix::thread::gettid() == rustix::process::getpid() {
        All::first_thread_ends();
    }
    call()
}
