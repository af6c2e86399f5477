//! The end of a measurement that a signal asks for: [`watch`], [`asked`].
//!
//! A handler notes the signal and no more, so that whatever was started or made is ended and removed on the way out.
//! What is started has the default dispositions again (execve(2)), and no signal blocked.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::Error;

/// The signal that came; 0: none.
static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// From now on SIGHUP, SIGINT, SIGQUIT and SIGTERM no longer end this process: a measurement that one asks to end
/// returns [`Error::Interrupted`]. Those that
/// are ignored stay so (nohup(1)).
pub fn watch() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: all zeroes are a valid action: the default one, with no flag and no signal blocked.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes the action of the signal where `action` is, and changes nothing.
        unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        if action.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        // Without SA_RESTART: what sleeps shall wake up.
        action.sa_flags = 0;
        action.sa_sigaction = note as *const () as libc::sighandler_t;
        // SAFETY: the handler writes one atomic number, which may be done at any moment.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// The signal that asked for the end, if one did.
pub fn asked() -> Option<i32> {
    Some(ASKED.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

/// [`Error::Interrupted`] once a signal has asked for the end.
pub(crate) fn check() -> Result<(), Error> {
    asked().map_or(Ok(()), |signal| Err(Error::Interrupted(signal)))
}
