//! Signals of this process, read from a descriptor: [`Signals`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// All signals of this process, or all that it does not ignore: blocked, and read from a signalfd.
///
/// At most one exists at a time. It holds the previous mask and disposition of SIGCHLD, which a
/// [`Child`](super::Child) gets.
pub struct Signals {
    fd: OwnedFd,
    mask: libc::sigset_t,
    sigchld: libc::sigaction,
}

/// A signal to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Signal number.
    pub number: i32,
    /// Origin: `SI_USER`, `SI_QUEUE`, `SI_KERNEL`, or a code of the signal (`CLD_EXITED`).
    pub code: i32,
    /// PID of the sender; 0 for the kernel and for senders outside this PID namespace.
    pub sender: u32,
    /// Value of a queued signal.
    pub value: u64,
}

#[expect(
    unsafe_code,
    reason = "signal sets and dispositions are C structures that libc fills in"
)]
impl Signals {
    /// Blocks every signal that is not ignored (nohup(1)), and sets SIGCHLD to its default, so that
    /// children stay until they are waited for.
    ///
    /// # Errors
    /// The errno of signalfd(2) (2.6.22).
    pub fn take() -> io::Result<Self> {
        Self::block(|signal| signal == libc::SIGCHLD || !is_ignored(signal))
    }

    /// Blocks ignored signals too, for a process that forwards signals: the program may have set a
    /// handler meanwhile. The program inherits the ignored dispositions.
    pub fn take_ignored_too() -> io::Result<Self> {
        Self::block(|_| true)
    }

    fn block(is_taken: impl Fn(i32) -> bool) -> io::Result<Self> {
        // SAFETY: all zeroes are valid values of both sets, which the calls below overwrite.
        let (mut all, mut mask): (libc::sigset_t, libc::sigset_t) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: the sets are ours; the calls read one and write the other.
        unsafe {
            libc::sigfillset(&raw mut all);
            for signal in (1..=libc::SIGRTMAX()).filter(|signal| !is_taken(*signal)) {
                libc::sigdelset(&raw mut all, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut mask);
        }
        let sigchld = set_default(libc::SIGCHLD);
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: -1 requests a new descriptor; the set is ours.
        let fd = unsafe { libc::signalfd(-1, &raw const all, flags) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            restore(&mask, &sigchld);
            return Err(error);
        }
        // SAFETY: a new descriptor without another owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, mask, sigchld })
    }

    /// The next pending signal.
    ///
    /// # Errors
    /// The errno of read(2) on a signalfd.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        const INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();
        let mut bytes = [0; INFO_BYTES];
        match rustix::io::read(&self.fd, &mut bytes) {
            Ok(INFO_BYTES) => {}
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        // SAFETY: the array has the size of the structure, in which any bits are valid.
        let info: libc::signalfd_siginfo = unsafe { std::mem::transmute(bytes) };
        Ok(Some(Signal {
            number: i32::try_from(info.ssi_signo).unwrap_or(0),
            code: info.ssi_code,
            sender: info.ssi_pid,
            value: info.ssi_ptr,
        }))
    }

    /// Stops this process by the default action of `signal`; returns after its continuation, or at
    /// once where the kernel refuses to stop it (orphaned process group).
    pub fn stop_by(&self, signal: i32) {
        // SAFETY: the structures are ours; the disposition is restored, and the signal blocked
        // again, before other code can run: this thread is the only one.
        unsafe {
            let before = set_default(signal);
            libc::kill(libc::getpid(), signal);
            mask(libc::SIG_UNBLOCK, signal);
            mask(libc::SIG_BLOCK, signal);
            libc::sigaction(signal, &raw const before, ptr::null_mut());
        }
    }

    /// Drops pending signals, and restores the previous mask and SIGCHLD's disposition.
    pub fn release(self) {
        while let Ok(Some(_)) = self.next() {}
        self.restore();
    }

    /// Restores the previous mask and SIGCHLD's disposition, in a child before its execve.
    pub(super) fn restore(&self) {
        restore(&self.mask, &self.sigchld);
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[expect(unsafe_code, reason = "signal sets and dispositions are C structures")]
fn restore(mask: &libc::sigset_t, sigchld: &libc::sigaction) {
    // SAFETY: the kernel returned both values in `Signals::block`, handlers included.
    unsafe {
        libc::sigaction(libc::SIGCHLD, sigchld, ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, mask, ptr::null_mut());
    }
}

/// Blocks or unblocks a signal of this thread (pthread_sigmask(3)).
#[expect(unsafe_code, reason = "the set is a C structure")]
pub(super) fn mask(how: libc::c_int, signal: libc::c_int) {
    // SAFETY: the set is ours, and the calls overwrite all of it.
    unsafe {
        let mut only: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut only);
        libc::sigaddset(&raw mut only, signal);
        libc::pthread_sigmask(how, &raw const only, ptr::null_mut());
    }
}

/// Reports whether this process ignores a signal.
#[expect(unsafe_code, reason = "the disposition is a C structure")]
pub(super) fn is_ignored(signal: i32) -> bool {
    // SAFETY: all zeroes are a valid value of the structure, which the call fills in. A null
    // pointer leaves the disposition unchanged.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

/// Sets a signal to its default, and returns the previous disposition.
#[expect(unsafe_code, reason = "the disposition is a C structure")]
fn set_default(signal: i32) -> libc::sigaction {
    // SAFETY: all zeroes are the default disposition with an empty mask; the call fills in
    // `before`.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let default: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const default, &raw mut before);
        before
    }
}

/// Ends this process by `signal`, without a core dump: the program has written its own. Returns
/// where the signal does not kill.
#[expect(unsafe_code, reason = "rustix has no real-time signals here")]
pub fn die_by(signal: i32) {
    forbid_core_dump();
    // A core pattern with a pipe ignores the limit.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    set_default(signal);
    // SAFETY: kill touches no memory of this process.
    unsafe { libc::kill(libc::getpid(), signal) };
    mask(libc::SIG_UNBLOCK, signal);
}

/// Sets the limit of core dumps to 0.
pub(super) fn forbid_core_dump() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = setrlimit(Resource::Core, none);
}

#[cfg(test)]
#[expect(unsafe_code, reason = "dispositions, and signals to one thread")]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_stay_ignored_unless_taken() {
        // SAFETY: no other code in this process uses the two signals, and only this thread gets
        // them.
        unsafe {
            let before = libc::signal(libc::SIGUSR2, libc::SIG_IGN);
            let signals = Signals::take().unwrap();
            for signal in [libc::SIGUSR2, libc::SIGUSR1] {
                assert_eq!(libc::pthread_kill(libc::pthread_self(), signal), 0);
            }
            let next = || signals.next().unwrap().map(|signal| signal.number);
            assert_eq!((next(), next()), (Some(libc::SIGUSR1), None));
            signals.release();

            let signals = Signals::take_ignored_too().unwrap();
            assert_eq!(libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2), 0);
            let next = || signals.next().unwrap().map(|signal| signal.number);
            assert_eq!((next(), next()), (Some(libc::SIGUSR2), None));
            assert!(is_ignored(libc::SIGUSR2));
            signals.release();
            libc::signal(libc::SIGUSR2, before);
        }
    }
}
