//! Stops of a traced thread: [`Stop`].

use rustix::io::Result;
use rustix::process::Pid;

use jumbo_sys::ptrace;

/// A stop of a seized thread (ptrace(2), "Stopped states"), until the tracer answers it. ESRCH as
/// an answer means that the thread was killed meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Stop before the delivery of this signal.
    Signal(i32),
    /// Group stop: this signal stopped the whole process.
    Group(i32),
    /// Stop by PTRACE_INTERRUPT, or at the end of a group stop.
    Trap,
    /// Stop at the entry or exit of a system call (PTRACE_SYSCALL).
    Call,
}

impl Stop {
    /// SIGTRAP with the bit of PTRACE_O_TRACESYSGOOD.
    const SYSCALL_TRAP: i32 = libc::SIGTRAP | 0x80;
    const PTRACE_EVENT_STOP: i32 = 128;

    /// The stop in a wait status; `None` if the status is an end.
    pub fn of(status: i32) -> Option<Self> {
        if !libc::WIFSTOPPED(status) {
            return None;
        }
        let signal = libc::WSTOPSIG(status);
        let stops = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
        Some(match status >> 16 {
            0 if signal == Self::SYSCALL_TRAP => Self::Call,
            0 => Self::Signal(signal),
            Self::PTRACE_EVENT_STOP if stops.contains(&signal) => Self::Group(signal),
            _ => Self::Trap,
        })
    }

    /// Continues `thread` as without a tracer.
    pub fn pass(self, thread: Pid) -> Result<()> {
        match self {
            Self::Signal(signal) => ptrace::resume(thread, signal),
            Self::Group(_) => ptrace::listen(thread),
            Self::Trap | Self::Call => ptrace::resume(thread, 0),
        }
    }

    /// Detaches `thread`, and continues it as without a tracer.
    pub fn detach(self, thread: Pid) -> Result<()> {
        match self {
            Self::Signal(signal) => ptrace::detach(thread, signal),
            Self::Group(_) | Self::Trap | Self::Call => ptrace::detach(thread, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_its_stop() {
        let stopped = |signal: i32, event: i32| event << 16 | signal << 8 | 0x7f;
        assert_eq!(Stop::of(stopped(15, 0)), Some(Stop::Signal(15)));
        assert_eq!(Stop::of(stopped(19, 0)), Some(Stop::Signal(19)));
        assert_eq!(Stop::of(stopped(19, 128)), Some(Stop::Group(19)));
        assert_eq!(Stop::of(stopped(20, 128)), Some(Stop::Group(20)));
        assert_eq!(Stop::of(stopped(5, 128)), Some(Stop::Trap));
        assert_eq!(Stop::of(stopped(5 | 0x80, 0)), Some(Stop::Call));
        for ended in [0, 7 << 8, 9, 6 | 0x80] {
            assert_eq!(Stop::of(ended), None);
        }
    }
}
