//! What this process was given, recorded before Rust's runtime changes it.
//!
//! The runtime sets SIGPIPE to ignored and opens /dev/null on those of the descriptors 0, 1 and 2 that
//! are closed. A program started from here would inherit both, so both are put back before `execve`.
//! A binary that starts programs lists [`record`] in its `.init_array`, which runs before the runtime.

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
