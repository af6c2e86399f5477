//! A guard that blocks the signals of the thread: [`Blocked`].
#![expect(unsafe_code, reason = "a system call that takes a set of signals")]

use core::marker::PhantomData;
use core::ptr;

use super::request;

/// Signal set of the kernel.
type Set = u64;

/// SIGSETXID (nptl/pthreadP.h), which glibc sends to every thread for setuid(2) and similar calls,
/// while it holds locks that pthread_create(3) needs. Its handler uses nothing of jumbo.
const SIGSETXID: u32 = 33;
/// Result of a system call under some seccomp filters; fatal if blocked.
const SIGSYS: u32 = libc::SIGSYS.unsigned_abs();

/// Signals of faults, which are fatal if blocked.
const FAULTS: [i32; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
];

const BLOCKED_BY_NEW: Set = !(1 << (SIGSETXID - 1) | 1 << (SIGSYS - 1));

/// Guard that blocks this thread's signals: no handler can re-enter, jump out (siglongjmp(3)), or
/// wait for another thread.
#[derive(Debug)]
#[must_use]
pub struct Blocked {
    before: Option<Set>,
    /// The mask is the thread's.
    _not_send: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks all signals except SIGSYS and SIGSETXID.
    ///
    /// # References
    /// rt_sigprocmask(2); Linux 2.2.
    pub fn new() -> Self {
        Self::block(BLOCKED_BY_NEW)
    }

    /// Blocks all signals: while a thread unknown to the C library starts, or while memory moves.
    pub fn all() -> Self {
        Self::block(Set::MAX)
    }

    /// Blocks the signals of [`Blocked::new`] except those of faults: code that reads the program's
    /// memory may fault where the program's handler mends that.
    pub fn asynchronous() -> Self {
        let faults = FAULTS.iter().fold(0, |set, signal| set | 1 << (signal - 1));
        Self::block(BLOCKED_BY_NEW & !faults)
    }

    /// Reports whether a signal waits for this thread that was not blocked before.
    ///
    /// # References
    /// rt_sigpending(2); Linux 2.2.
    pub fn has_pending(&self) -> bool {
        let mut pending: Set = 0;
        let to = (&raw mut pending).expose_provenance();
        // SAFETY: the call writes one set.
        let answer =
            unsafe { request(libc::SYS_rt_sigpending, [to, size_of::<Set>(), 0, 0, 0, 0]) };
        answer.is_ok() && self.before.is_some_and(|before| pending & !before != 0)
    }

    fn block(signals: Set) -> Self {
        let mut before: Set = 0;
        let masked = mask(libc::SIG_BLOCK, &signals, &raw mut before);
        Self {
            before: masked.then_some(before),
            _not_send: PhantomData,
        }
    }
}

impl Default for Blocked {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Blocked {
    /// Restores the mask; pending signals are delivered here.
    fn drop(&mut self) {
        if let Some(before) = self.before {
            mask(libc::SIG_SETMASK, &before, ptr::null_mut());
        }
    }
}

fn mask(how: i32, set: &Set, before: *mut Set) -> bool {
    let (how, set) = (how.unsigned_abs() as usize, ptr::from_ref(set));
    let (set, before) = (set.expose_provenance(), before.expose_provenance());
    let arguments = [how, set, before, size_of::<Set>(), 0, 0];
    // SAFETY: the call reads one set and writes the other, unless it is null.
    unsafe { request(libc::SYS_rt_sigprocmask, arguments) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> Set {
        let mut now = 0;
        assert!(mask(libc::SIG_BLOCK, &0, &raw mut now));
        now
    }

    #[test]
    fn the_guard_restores_the_mask() {
        let before = blocked();
        let outer = Blocked::new();
        // The kernel never blocks SIGKILL and SIGSTOP.
        let never = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
        assert_eq!(blocked() | never, BLOCKED_BY_NEW | before | never);
        drop(Blocked::new());
        assert_eq!(blocked() | never, BLOCKED_BY_NEW | before | never);
        drop(outer);
        assert_eq!(blocked(), before);
    }
}
