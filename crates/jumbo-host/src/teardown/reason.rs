//! [`Reason`]: why a process was not held, or its memory not released.

use rustix::io::Errno;

/// Why less was done than could be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// PTRACE_SEIZE: EPERM and no process traces it, or another errno.
    #[error("it may not be traced ({0})")]
    Denied(Errno),
    /// Another thread of the system is its tracer.
    #[error("{0} traces it already")]
    Traced(u32),
    /// It had ended before it was held, or the hold was lost at its end.
    #[error("it had ended before it was held")]
    Late,
    /// Less than [`super::Hold::MIN_BYTES`].
    #[error("it had too little memory for it to matter")]
    Small,
    /// Its core was being written while it was held.
    #[error("its core was being written")]
    Dumping,
    /// Others wait for locks in its memory.
    #[error("it held robust locks, which the kernel has to find in its memory")]
    RobustLocks,
    /// Whether it holds robust locks cannot be seen.
    #[error(
        "whether it holds robust locks cannot be seen: it is a 32-bit program, or may not be read"
    )]
    Unreadable,
    /// Without a hold its locks cannot be looked at when it matters.
    #[error("it shares memory that it writes, and robust locks may be in there")]
    SharedMapping,
    /// A thread of it did not end in time.
    #[error("another of its threads had not ended")]
    OtherThreads,
    /// EINVAL of a process that is dying.
    #[error("another process shares its memory: a reaper of its own, or a child made by vfork")]
    SharedMemory,
    /// EINVAL of a process that was not held.
    #[error("it did not end at once")]
    NotEnding,
    /// ESRCH: it was faster.
    #[error("it had given up its memory before the call")]
    TooLate,
    /// ENOSYS.
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
