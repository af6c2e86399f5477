//! Signals that end a measurement: [`watch`], [`asked`].
//!
//! The handler only records the signal, so that processes and files are cleaned up on the way out.
//! Child processes have the default dispositions (execve(2)) and no blocked signal.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::Error;

/// Received signal; 0: none.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    RECEIVED.store(signal, Ordering::Relaxed);
}

/// Records SIGHUP, SIGINT, SIGQUIT and SIGTERM from now on instead of ending the process: the
/// measurement returns [`Error::Interrupted`]. Ignored signals stay ignored (nohup(1)).
pub fn watch() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: all zeroes are a valid action: the default, with no flag and no blocked signal.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes the signal's action to `action`, and changes nothing.
        unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        if action.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        // Without SA_RESTART: a signal interrupts sleeps.
        action.sa_flags = 0;
        action.sa_sigaction = note as *const () as libc::sighandler_t;
        // SAFETY: the handler stores to one atomic, which is async-signal-safe.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// Received signal, if any.
pub fn asked() -> Option<i32> {
    Some(RECEIVED.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

/// Returns [`Error::Interrupted`] after a signal.
pub(crate) fn check() -> Result<(), Error> {
    asked().map_or(Ok(()), |signal| Err(Error::Interrupted(signal)))
}
