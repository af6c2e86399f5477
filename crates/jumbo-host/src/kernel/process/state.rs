//! State of a process or thread, from /proc/PID/status: [`ProcessState`].

use crate::kernel::task::Status;
use crate::kernel::{FileError, Root};

/// Fields of /proc/PID/status (proc_pid_status(5)). Any user may read them, of any process. Each
/// thread has a file under its own ID. Sets of signals have a bit for each: signal 1 is bit 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessState {
    /// State: `R`, `S`, `D`, `T` (stopped), `t` (stopped by a tracer), `Z` (zombie), `X`.
    pub state: char,
    /// PID of the process of the thread.
    pub process: u32,
    /// PID of the parent.
    pub parent: u32,
    /// False for kernel threads and zombies.
    pub has_memory: bool,
    /// True during a core dump (4.15).
    pub is_dumping: bool,
    /// Signals with a handler.
    pub caught: u64,
    /// Ignored signals.
    pub ignored: u64,
    /// Signals that this thread blocks.
    pub blocked: u64,
}

impl ProcessState {
    /// Reads /proc/`pid`/status.
    pub fn read(root: &Root, pid: u32) -> Result<Self, FileError> {
        let status = Status::read(root, pid)?;
        let value = |name| status.get(name).unwrap_or_default();
        let number = |name| value(name).parse().unwrap_or_default();
        let set = |name| u64::from_str_radix(value(name), 16).unwrap_or_default();
        Ok(Self {
            state: value("State").chars().next().unwrap_or_default(),
            process: number("Tgid"),
            parent: number("PPid"),
            has_memory: status.get("VmSize").is_some(),
            is_dumping: value("CoreDumping") == "1",
            caught: set("SigCgt"),
            ignored: set("SigIgn"),
            blocked: set("SigBlk"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_read() {
        let own = ProcessState::read(&Root::host(), std::process::id()).unwrap();
        assert_eq!(own.process, std::process::id());
        assert!(own.has_memory && own.parent > 0);
        assert!(!own.is_dumping && own.state != 'Z');
    }

    #[test]
    fn an_ended_child_is_a_zombie() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let read = || ProcessState::read(&Root::host(), child.id()).unwrap();
        while read().state != 'Z' {
            std::thread::yield_now();
        }
        assert!(!read().has_memory && read().parent == std::process::id());
        child.wait().unwrap();
    }
}
