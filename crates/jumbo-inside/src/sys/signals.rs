//! No signal handler on this thread for a while: [`Blocked`].
#![expect(unsafe_code, reason = "a system call that takes a set of signals")]

use core::marker::PhantomData;
use core::ptr;

use super::request;

/// The kernel's set of signals.
type Set = u64;

/// What glibc sends to every thread for setuid(2) and its kin, and waits for with locks held that
/// pthread_create(3) needs (SIGSETXID, nptl/pthreadP.h). Its handler touches nothing of ours.
const SETXID: u32 = 33;
/// By what a seccomp filter may have a system call answered: blocked, it would kill.
const SYS: u32 = libc::SIGSYS.unsigned_abs();

const MOST: Set = !(1 << (SETXID - 1) | 1 << (SYS - 1));

/// While this lives the signals of this thread wait: no handler runs that could come back in, jump away
/// (siglongjmp(3)), or stop this thread until another has got on.
#[derive(Debug)]
#[must_use]
pub struct Blocked {
    before: Option<Set>,
    /// It is this thread's mask.
    _not_send: PhantomData<*const ()>,
}

impl Blocked {
    /// Blocks them, but for SIGSYS and what glibc needs to reach all threads.
    ///
    /// # References
    /// rt_sigprocmask(2); Linux 2.2.
    pub fn new() -> Self {
        Self::these(MOST)
    }

    /// Blocks all of them: for a moment in which a thread is made that the C library does not know, or in which
    /// memory is at two places.
    pub fn all() -> Self {
        Self::these(Set::MAX)
    }

    fn these(signals: Set) -> Self {
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
    /// What came meanwhile is delivered here.
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
    // SAFETY: the call reads one set and writes the other, if there is one.
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
    fn the_mask_is_as_it_was_afterwards() {
        let before = blocked();
        let outer = Blocked::new();
        // The kernel never blocks SIGKILL and SIGSTOP.
        let never = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
        assert_eq!(blocked() | never, MOST | before | never);
        drop(Blocked::new());
        assert_eq!(blocked() | never, MOST | before | never);
        drop(outer);
        assert_eq!(blocked(), before);
    }
}
