//! What a process or thread is to a process that wants to end it: [`Standing`], from /proc/PID/status.

use crate::kernel::task::Status;
use crate::kernel::{FileError, Root};

/// The fields of /proc/PID/status (proc_pid_status(5)) that tell how a process stands. Any user may read
/// them, of any process. A thread other than the first has a file of its own under its own ID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its state: `R`, `S`, `D`, `T` (stopped), `t` (by a tracer), `Z` (has ended), `X`.
    pub state: char,
    /// The process that it is a thread of.
    pub process: u32,
    /// Its parent.
    pub parent: u32,
    /// The thread that traces it; 0: none does.
    pub tracer: u32,
    /// How many threads the process has, with a first one that has ended.
    pub threads: u32,
    /// True where it has memory of its own: false for kernel threads and after its end.
    pub has_memory: bool,
    /// True while its core is being written (4.15).
    pub is_dumping: bool,
    /// Signals that wait for this very thread, a bit each: signal 1 is bit 0.
    pub pending: u64,
    /// Signals that it has a handler for.
    pub caught: u64,
    /// Signals that it ignores.
    pub ignored: u64,
    /// Signals that this thread has blocked.
    pub blocked: u64,
}

impl Standing {
    /// Reads /proc/`pid`/status.
    ///
    /// # Errors
    /// [`FileError::Io`] where it is gone.
    pub fn read(root: &Root, pid: u32) -> Result<Self, FileError> {
        let status = Status::read(root, pid)?;
        let value = |name| status.get(name).unwrap_or_default();
        let number = |name| value(name).parse().unwrap_or_default();
        let set = |name| u64::from_str_radix(value(name), 16).unwrap_or_default();
        Ok(Self {
            state: value("State").chars().next().unwrap_or_default(),
            process: number("Tgid"),
            parent: number("PPid"),
            tracer: number("TracerPid"),
            threads: number("Threads"),
            has_memory: status.get("VmSize").is_some(),
            is_dumping: value("CoreDumping") == "1",
            pending: set("SigPnd"),
            caught: set("SigCgt"),
            ignored: set("SigIgn"),
            blocked: set("SigBlk"),
        })
    }

    /// True where it has ended and its parent has not asked how.
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_stands_as_it_does() {
        let own = Standing::read(&Root::host(), std::process::id()).unwrap();
        assert_eq!(own.process, std::process::id());
        assert!(own.has_memory && own.threads > 0 && own.parent > 0);
        assert!(!own.is_dumping && !own.is_zombie());
    }

    #[test]
    fn a_process_that_was_not_waited_for_is_a_zombie() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let look = || Standing::read(&Root::host(), child.id()).unwrap();
        while !look().is_zombie() {
            std::thread::yield_now();
        }
        assert!(!look().has_memory && look().parent == std::process::id());
        child.wait().unwrap();
    }
}
