//! Reasons why a process cannot be promoted: [`Refusal`].

use rustix::io::Errno;

use crate::kernel::FileError;

/// Remedy where this process has no more descriptors.
pub const DESCRIPTORS_HINT: &str = "raise the limit of descriptors (`ulimit -n`)";

/// Reason why a process cannot be promoted. Messages follow "cannot promote PID NAME: ".
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such process.
    #[error("no such process")]
    Gone,
    /// A thread's ID.
    #[error("that is a thread of process {0}")]
    Thread(u32),
    /// The calling process.
    #[error("that is this command itself")]
    Itself,
    /// A kernel thread.
    #[error("that is a thread of the kernel: it has no memory of its own")]
    Kernel,
    /// A zombie.
    #[error("it has ended; its parent {parent} has not waited for it")]
    Zombie {
        /// Process that has to wait for it.
        parent: u32,
    },
    /// A reaper or scanner of jumbo.
    #[error("that is a process of jumbo, whose memory is that of a program")]
    Sibling,
    /// A process under `jumbo run`: libjumbo_preload.so in it has a bound of its own.
    #[error("libjumbo_preload.so in it promotes from inside")]
    Covered,
    /// A process whose mappings this user may not read.
    #[error("it runs as user {uid}, and this user may not look into it: {error}")]
    Hidden {
        /// User of the process.
        uid: u32,
        /// The unreadable file.
        error: FileError,
    },
    /// An unreadable file of the process.
    #[error(transparent)]
    File(#[from] FileError),
    /// No MADV_COLLAPSE in the kernel.
    #[error("this kernel has no MADV_COLLAPSE (Linux 6.1), or no THP")]
    NoCollapse,
    /// A process whose memory this user may not advise: the obstacle to process_madvise(2).
    #[error("{0}")]
    Unreachable(String),
}

impl Refusal {
    /// The refusal for an unreadable file that each process has.
    pub fn unread(error: FileError) -> Self {
        match error.is_missing() {
            true => Self::Gone,
            false => Self::File(error),
        }
    }

    /// Returns the remedy.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Gone => Some("`jumbo status` lists the largest processes"),
            Self::File(error) if error.errno() == Some(Errno::MFILE) => Some(DESCRIPTORS_HINT),
            Self::Thread(_) => Some("name the process"),
            Self::Sibling => Some("name the program"),
            Self::Hidden { .. } | Self::Unreachable(_) => {
                Some("run it as root, or with CAP_SYS_PTRACE and CAP_SYS_NICE")
            }
            _ => None,
        }
    }
}
