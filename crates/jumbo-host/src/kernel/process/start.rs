//! Inherited dispositions and descriptors, recorded before they change.
//!
//! Rust's runtime, or [`prepare`] in a binary without it, ignores SIGPIPE, and opens /dev/null on
//! closed standard descriptors. A program would inherit both, so both are restored before `execve`.
//! A binary that starts programs calls [`record`] first, in its `.init_array` if it has the
//! runtime.

use std::sync::OnceLock;

use super::signals::is_ignored;

static INHERITED: OnceLock<Inherited> = OnceLock::new();

struct Inherited {
    is_sigpipe_ignored: bool,
    /// For each of the descriptors 0, 1 and 2.
    is_closed: [bool; 3],
}

/// Records SIGPIPE's disposition, and the closed ones of the descriptors 0, 1 and 2.
#[expect(
    unsafe_code,
    reason = "fcntl on raw descriptor numbers, before the runtime is there"
)]
pub extern "C" fn record() {
    // SAFETY: F_GETFD reads a flag of a descriptor number and touches no memory.
    let is_closed = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0;
    let _ = INHERITED.set(Inherited {
        is_sigpipe_ignored: is_ignored(libc::SIGPIPE),
        is_closed: [0, 1, 2].map(is_closed),
    });
}

/// Ignores SIGPIPE, and opens /dev/null on closed standard descriptors, as Rust's runtime does
/// before `main`: a write to a pipe without a reader is an error, and no file gets the number of a
/// standard stream. Callers call [`record`] first.
#[expect(
    unsafe_code,
    reason = "the disposition and the descriptors of a process without Rust's runtime"
)]
pub fn prepare() {
    // SAFETY: the disposition is no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let inherited = INHERITED.get();
    let closed = inherited.map_or([false; 3], |inherited| inherited.is_closed);
    for _ in closed.iter().filter(|closed| **closed) {
        // The kernel assigns the lowest free number.
        // SAFETY: the path is terminated by a zero byte.
        unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
    }
}

/// Reports whether this process started with standard error closed, so that no message reaches the
/// user.
pub fn is_stderr_closed() -> bool {
    (INHERITED.get()).is_some_and(|inherited| inherited.is_closed[2])
}

/// Restores the state that [`record`] found, if it ran.
#[expect(
    unsafe_code,
    reason = "the descriptors and dispositions are about to belong to another program"
)]
pub(super) fn restore() {
    let Some(inherited) = INHERITED.get() else {
        return;
    };
    for (fd, _) in (0..).zip(inherited.is_closed).filter(|(_, closed)| *closed) {
        // SAFETY: the runtime opened these on /dev/null, they have no owner, and the next step is
        // execve or _exit.
        unsafe { libc::close(fd) };
    }
    let action = match inherited.is_sigpipe_ignored {
        true => libc::SIG_IGN,
        false => libc::SIG_DFL,
    };
    // SAFETY: neither disposition is a handler.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}
