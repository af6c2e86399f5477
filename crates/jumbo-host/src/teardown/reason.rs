//! [`Reason`]: the obstacle to a hold, or to the release of memory.

use rustix::io::Errno;

/// Reason why less than possible was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// PTRACE_SEIZE failed, though no process traces it.
    #[error("it may not be traced ({0})")]
    Denied(Errno),
    /// Traced by another thread.
    #[error("{0} traces it already")]
    Traced(u32),
    /// The process ended before it was held, or the hold was lost at its end.
    #[error("it had ended before it was held")]
    Late,
    /// Less memory than [`super::Hold::MIN_BYTES`].
    #[error("it had too little memory to matter")]
    Small,
    /// Core dump during the hold.
    #[error("its core was being written")]
    Dumping,
    /// Robust futexes in its memory, which other processes may wait for.
    #[error("it held robust locks, which the kernel has to find in its memory")]
    RobustLocks,
    /// Unreadable list of robust futexes.
    #[error(
        "whether it holds robust locks cannot be seen: it is a 32-bit program, or may not be read"
    )]
    Unreadable,
    /// Writable shared memory: without a hold its locks cannot be checked at the right time.
    #[error("it shares memory that it writes, and robust locks may be in there")]
    SharedMapping,
    /// EINVAL for a dying process.
    #[error("another process shares its memory: a reaper of its own, or a child made by vfork")]
    SharedMemory,
    /// EINVAL for a process that was not held.
    #[error("it did not end at once")]
    NotEnding,
    /// ESRCH: the kernel had freed the memory already.
    #[error("it had given up its memory before the call")]
    TooLate,
    /// ENOSYS: no process_mrelease.
    #[error("this kernel has no process_mrelease (Linux 5.15)")]
    Kernel,
    /// Another errno of process_mrelease.
    #[error("process_mrelease failed: {0}")]
    Refused(Errno),
    /// clone(2) failed.
    #[error("no thread could be made")]
    NoThread,
}

impl serde::Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
