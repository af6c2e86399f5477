//! Why a process is not promoted: [`Refusal`].

use crate::kernel::FileError;

/// Why nothing is done to a process. The words follow "cannot promote PID NAME: ".
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is none.
    #[error("no such process")]
    Gone,
    /// The ID is that of a thread.
    #[error("that is a thread of process {0}")]
    Thread(u32),
    /// It is the caller.
    #[error("that is this command itself")]
    Itself,
    /// A thread of the kernel.
    #[error("that is a thread of the kernel: it has no memory of its own")]
    Kernel,
    /// It has ended.
    #[error("it has ended; its parent {parent} has not waited for it")]
    Zombie {
        /// The process that has to wait for it.
        parent: u32,
    },
    /// A reaper of jumbo.
    #[error("that is a reaper, whose memory is that of a program")]
    Reaper,
    /// It runs under `jumbo run`: libjumbo_preload.so is in it, with a bound of its own.
    #[error("libjumbo_preload.so is in it, and does it from inside")]
    Covered,
    /// Its mappings are not to be seen.
    #[error("it runs as user {uid}, and this user may not look into it: {error}")]
    Hidden {
        /// Its user.
        uid: u32,
        /// The file that could not be read.
        error: FileError,
    },
    /// A file of it could not be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The kernel has no MADV_COLLAPSE.
    #[error("this kernel has no MADV_COLLAPSE (Linux 6.1), or no THP")]
    NoCollapse,
    /// Neither method reaches it.
    #[error("{advise}; {trace}")]
    Unreachable {
        /// Why process_madvise(2) does not.
        advise: String,
        /// Why ptrace(2) does not.
        trace: String,
    },
}

impl Refusal {
    /// The remedy.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Gone => Some("`jumbo status` lists the largest processes"),
            Self::Thread(_) => Some("name the process"),
            Self::Reaper => Some("name the program"),
            Self::Hidden { .. } | Self::Unreachable { .. } => {
                Some("run it as root, or with CAP_SYS_PTRACE and CAP_SYS_NICE")
            }
            _ => None,
        }
    }
}
