//! Dispositions and descriptors that this process was given, recorded before they are changed.
//!
//! Rust's runtime, or [`prepare`] in a binary without it, sets SIGPIPE to ignored and opens /dev/null on those of the
//! descriptors 0, 1 and 2 that are closed. A program started from here would inherit both, so both are put back before
//! `execve`. A binary that starts programs calls [`record`] first: in its `.init_array`, where it has the runtime.

use std::sync::OnceLock;

use super::signals::is_ignored;

static GIVEN: OnceLock<Given> = OnceLock::new();

struct Given {
    is_sigpipe_ignored: bool,
    /// Of the descriptors 0, 1 and 2.
    is_closed: [bool; 3],
}

/// Records SIGPIPE's disposition and which of the descriptors 0, 1 and 2 are closed.
#[expect(
    unsafe_code,
    reason = "fcntl on raw descriptor numbers, before the runtime is there"
)]
pub extern "C" fn record() {
    // SAFETY: F_GETFD reads a flag of a descriptor number and touches no memory.
    let is_closed = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0;
    let _ = GIVEN.set(Given {
        is_sigpipe_ignored: is_ignored(libc::SIGPIPE),
        is_closed: [0, 1, 2].map(is_closed),
    });
}

/// Ignores SIGPIPE, and opens /dev/null on those of the descriptors 0, 1 and 2 that are closed, as Rust's runtime does
/// before `main`: a write to a pipe without a reader is an error, and no file gets the number of a standard stream.
/// After [`record`].
#[expect(
    unsafe_code,
    reason = "the disposition and the descriptors of a process without Rust's runtime"
)]
pub fn prepare() {
    // SAFETY: the disposition is no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let closed = GIVEN.get().map_or([false; 3], |given| given.is_closed);
    for _ in closed.iter().filter(|closed| **closed) {
        // The kernel gives the lowest number that is free.
        // SAFETY: a terminated path.
        unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
    }
}

/// True where standard error was closed when this process started: nothing can be said to the user.
pub fn is_stderr_closed() -> bool {
    GIVEN.get().is_some_and(|given| given.is_closed[2])
}

/// Puts back what [`record`] found; nothing where it did not run.
#[expect(
    unsafe_code,
    reason = "the descriptors and dispositions are about to belong to another program"
)]
pub(super) fn restore() {
    let Some(given) = GIVEN.get() else {
        return;
    };
    for (fd, _) in (0..).zip(given.is_closed).filter(|(_, closed)| *closed) {
        // SAFETY: the runtime opened these on /dev/null, they have no owner, and the next step is execve
        // or _exit.
        unsafe { libc::close(fd) };
    }
    let action = match given.is_sigpipe_ignored {
        true => libc::SIG_IGN,
        false => libc::SIG_DFL,
    };
    // SAFETY: neither disposition is a handler.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}
