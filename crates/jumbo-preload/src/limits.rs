//! Limits that the program gives itself: addresses that it does not use yet begin to count.
//!
//! mimalloc's arenas are 256 MiB of addresses, which no limit there was when they were reserved. What is not used of them goes
//! once there is one; the program has as much then as with glibc alone.

use core::ffi::{c_int, c_uint};

use jumbo_inside::sandbox;
use libc::{pid_t, rlimit};
use rustix::process::getpid;
use rustix::thread::gettid;

use crate::{glibc, mimalloc};

/// setrlimit(2).
///
/// # Safety
/// As for setrlimit(2).
pub(crate) unsafe fn set(
    call: impl Fn(c_uint, *const rlimit) -> c_int,
    resource: c_uint,
    limit: *const rlimit,
) -> c_int {
    let answer = call(resource, limit);
    if answer == 0 {
        // SAFETY: the kernel has just read it.
        unsafe { limited(0, resource, limit) };
    }
    answer
}

/// prlimit(2).
///
/// # Safety
/// As for prlimit(2).
pub(crate) unsafe fn exchange(
    call: impl Fn(pid_t, c_uint, *const rlimit, *mut rlimit) -> c_int,
    pid: pid_t,
    resource: c_uint,
    limit: *const rlimit,
    before: *mut rlimit,
) -> c_int {
    let answer = call(pid, resource, limit, before);
    if answer == 0 && !limit.is_null() {
        // SAFETY: the kernel has just read it.
        unsafe { limited(pid, resource, limit) };
    }
    answer
}

/// `pid` has a limit now. A pool was asked for by the user, and stays.
///
/// # Safety
/// The limit can be read.
unsafe fn limited(pid: pid_t, resource: c_uint, limit: *const rlimit) {
    let counts = [libc::RLIMIT_AS, libc::RLIMIT_DATA].contains(&resource);
    // SAFETY: the caller's promise.
    let counts = counts && unsafe { (*limit).rlim_cur } != libc::RLIM_INFINITY;
    // A filter may end who asks for its own ID; with one, mimalloc rests.
    if !counts || mimalloc::has_pool() || sandbox::is_entered_later() {
        return;
    }
    // The child of a vfork(2) limits itself, and not the process whose memory it has: it is not the thread that glibc takes
    // it for.
    let is_process = gettid().as_raw_nonzero().get().unsigned_abs() == glibc::thread();
    if is_process && (pid == 0 || pid == getpid().as_raw_nonzero().get()) {
        mimalloc::give_up_addresses();
    }
}
