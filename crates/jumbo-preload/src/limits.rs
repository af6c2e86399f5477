//! setrlimit(2), prlimit(2): limits under which unused addresses count.
//!
//! mimalloc's arenas reserve 256 MiB of addresses while no limit is in force. A limit on addresses
//! or data releases the unused ones, so that the program can use as much as with glibc alone.

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

/// Releases unused addresses if `pid`, which has this limit now, is the own process. A pool stays:
/// the user requested it.
///
/// # Safety
/// The limit is readable.
unsafe fn limited(pid: pid_t, resource: c_uint, limit: *const rlimit) {
    let counts = [libc::RLIMIT_AS, libc::RLIMIT_DATA].contains(&resource);
    // SAFETY: the caller's promise.
    let counts = counts && unsafe { (*limit).rlim_cur } != libc::RLIM_INFINITY;
    // A seccomp filter may kill a caller of getpid(2); under one, mimalloc is confined already.
    if !counts || mimalloc::has_pool() || sandbox::is_entered_later() {
        return;
    }
    // A vfork(2) child limits itself, not the parent whose memory it uses: its thread ID differs
    // from the one in glibc's thread block.
    let is_process = gettid().as_raw_nonzero().get().unsigned_abs() == glibc::thread();
    if is_process && (pid == 0 || pid == getpid().as_raw_nonzero().get()) {
        mimalloc::give_up_addresses();
    }
}
