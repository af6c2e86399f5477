//! Why a traced thread stands still: [`Stop`].

use rustix::io::Result;
use rustix::process::Pid;

use crate::kernel::sys::ptrace;

/// A stop of a thread that was seized (ptrace(2), "Stopped states"). It lasts until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A signal is about to be delivered to it.
    Signal(i32),
    /// It was stopped by this signal, with its whole process.
    Group(i32),
    /// It was interrupted, or continued after a group stop.
    Trap,
    /// It is about to end, and still has its memory.
    Exit,
    /// It enters or leaves a system call (PTRACE_SYSCALL).
    Call,
}

impl Stop {
    /// The bit that PTRACE_O_TRACESYSGOOD adds to SIGTRAP.
    const CALL: i32 = libc::SIGTRAP | 0x80;
    const EVENT_EXIT: i32 = 6;
    const EVENT_STOP: i32 = 128;

    /// The stop that a wait status tells of; `None` where it tells of an end.
    pub fn of(status: i32) -> Option<Self> {
        if !libc::WIFSTOPPED(status) {
            return None;
        }
        let signal = libc::WSTOPSIG(status);
        let stops = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
        Some(match status >> 16 {
            0 if signal == Self::CALL => Self::Call,
            0 => Self::Signal(signal),
            Self::EVENT_EXIT => Self::Exit,
            Self::EVENT_STOP if stops.contains(&signal) => Self::Group(signal),
            _ => Self::Trap,
        })
    }

    /// Has `thread` do what it would do if it were not traced.
    ///
    /// # Errors
    /// ESRCH: it was killed meanwhile.
    pub fn pass(self, thread: Pid) -> Result<()> {
        match self {
            Self::Signal(signal) => ptrace::resume(thread, signal),
            Self::Group(_) => ptrace::listen(thread),
            Self::Trap | Self::Exit | Self::Call => ptrace::resume(thread, 0),
        }
    }

    /// [`Stop::pass`], and stops tracing it.
    ///
    /// # Errors
    /// ESRCH: it was killed meanwhile.
    pub fn detach(self, thread: Pid) -> Result<()> {
        match self {
            Self::Signal(signal) => ptrace::detach(thread, signal),
            Self::Group(_) | Self::Trap | Self::Exit | Self::Call => ptrace::detach(thread, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_says_which_stop_it_is() {
        let stopped = |signal: i32, event: i32| event << 16 | signal << 8 | 0x7f;
        assert_eq!(Stop::of(stopped(15, 0)), Some(Stop::Signal(15)));
        assert_eq!(Stop::of(stopped(19, 0)), Some(Stop::Signal(19)));
        assert_eq!(Stop::of(stopped(19, 128)), Some(Stop::Group(19)));
        assert_eq!(Stop::of(stopped(20, 128)), Some(Stop::Group(20)));
        assert_eq!(Stop::of(stopped(5, 128)), Some(Stop::Trap));
        assert_eq!(Stop::of(stopped(5, 6)), Some(Stop::Exit));
        assert_eq!(Stop::of(stopped(5 | 0x80, 0)), Some(Stop::Call));
        for ended in [0, 7 << 8, 9, 6 | 0x80] {
            assert_eq!(Stop::of(ended), None);
        }
    }
}
