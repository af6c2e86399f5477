//! What this process was given, recorded before Rust's runtime changes it.
//!
//! The runtime sets SIGPIPE to ignored and opens /dev/null on those of the descriptors 0, 1 and 2 that
//! are closed. A program started from here would inherit both, so both are put back before `execve`.
//! A binary that starts programs lists [`record`] in its `.init_array`, which runs before the runtime.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};

static RECORDED: AtomicBool = AtomicBool::new(false);
static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
static CLOSED: AtomicI32 = AtomicI32::new(0);

/// Records SIGPIPE's disposition and which of the descriptors 0, 1 and 2 are closed.
#[expect(
    unsafe_code,
    reason = "sigaction and fcntl on raw descriptor numbers, before the runtime is there"
)]
pub extern "C" fn record() {
    let mut closed = 0;
    for fd in 0..3 {
        // SAFETY: F_GETFD reads a flag of a descriptor number and touches no memory.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            closed |= 1 << fd;
        }
    }
    // SAFETY: all zeroes is a valid sigaction, and the call writes no more than that.
    let ignored = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    };
    CLOSED.store(closed, Relaxed);
    SIGPIPE_IGNORED.store(ignored, Relaxed);
    RECORDED.store(true, Relaxed);
}

/// True where standard error was closed when this process started: nothing can be said to the user.
pub fn is_stderr_closed() -> bool {
    CLOSED.load(Relaxed) & (1 << 2) != 0
}

/// Puts back what [`record`] found; nothing where it did not run.
#[expect(
    unsafe_code,
    reason = "the descriptors and dispositions are about to belong to another program"
)]
pub(super) fn restore() {
    if !RECORDED.load(Relaxed) {
        return;
    }
    for fd in (0..3).filter(|fd| CLOSED.load(Relaxed) & (1 << fd) != 0) {
        // SAFETY: the runtime opened these on /dev/null, they have no owner, and the next step is execve
        // or _exit.
        unsafe { libc::close(fd) };
    }
    let action = match SIGPIPE_IGNORED.load(Relaxed) {
        true => libc::SIG_IGN,
        false => libc::SIG_DFL,
    };
    // SAFETY: neither disposition is a handler.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}
