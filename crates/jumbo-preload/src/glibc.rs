//! Identity of the calling thread in the C library: [`thread`].

use jumbo_inside::sandbox;
use rustix::thread::gettid;

use crate::next;

/// Returns the calling thread's ID in the C library, by pthread_getcpuclockid(3), without a system
/// call. The upper 29 bits of the clock's number are the inverted ID (`CPUCLOCK_PID`,
/// include/linux/posix-timers.h). 0 if it is not available. In a vfork(2) child it is the parent's.
pub(crate) fn thread() -> u32 {
    let mut clock = -1;
    // SAFETY: the calling thread is alive, and the number is written to `clock`.
    match unsafe { (next::pthread_getcpuclockid.get())(libc::pthread_self(), &raw mut clock) } {
        // Before glibc 2.34 the function is in libpthread, which a program with one thread may not
        // load.
        libc::ENOENT if !sandbox::is_entered() => gettid().as_raw_nonzero().get().cast_unsigned(),
        _ => (!(clock >> 3)).cast_unsigned(),
    }
}
