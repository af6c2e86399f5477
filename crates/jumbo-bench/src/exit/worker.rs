//! The program whose end is measured: it takes memory, says what it has, and ends when it is told to.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_inside::reaper::State;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::figures::{Figures, with};
use crate::memory::{Block, base_pages_only, had_in};
use crate::talk::say;
use crate::work::{Work, shown};

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// It calls `exit(0)`.
    Exit,
    /// It calls `abort()`, and leaves no core.
    Crash,
    /// It gets SIGKILL.
    Kill,
}

/// The process IDs in the figures of [`HOLD`]: the worker, which a launcher may stand in front of;
/// and the sibling that will give the memory back, where there is one.
pub(super) const PID: &str = "pid";
pub(super) const REAPER: &str = "reaper_pid";

impl End {
    /// The start of its rows' keys.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::Crash => "crash",
            Self::Kill => "kill",
        }
    }

    /// Whether a process ended this way.
    pub(super) fn is(self, status: ExitStatus) -> bool {
        match self {
            Self::Exit => status.success(),
            Self::Crash => status.signal() == Some(libc::SIGABRT),
            Self::Kill => status.signal() == Some(libc::SIGKILL),
        }
    }
}

/// A process that holds so many bytes in base pages until its standard input says something; then
/// it says when that was ([`now_ns`]), and ends that way. Where that is set it waits for its
/// sibling before it says that it is ready.
pub(crate) const HOLD: Work<(Bytes, bool, End)> = Work::new("hold", hold).staying(end);

fn hold((size, reaper, _): (Bytes, bool, End)) -> Result<Figures, Error> {
    base_pages_only()?;
    no_core()?;
    let root = Root::host();
    let mut block = Block::allocate(size)?;
    block.touch();
    let mut figures = had_in(&root, &[block.addresses()])?;
    // Its end is that of the process.
    std::mem::forget(block);
    figures = with(figures, [(PID, f64::from(std::process::id()))]);
    if reaper && let Some(reaper) = sibling(&root)? {
        figures = with(figures, [(REAPER, f64::from(reaper))]);
    }
    Ok(figures)
}

fn end((_, _, end): (Bytes, bool, End)) -> Result<(), Error> {
    // Were the process that measures gone, this would be the end of the input.
    io::stdin().read_line(&mut String::new())?;
    say(&now_ns())?;
    if end == End::Crash {
        std::process::abort();
    }
    std::process::exit(0);
}

/// CLOCK_MONOTONIC, which is the same in all processes.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000_000 + nanos
}

/// A crash shall measure the end and not the disk.
fn no_core() -> Result<(), Error> {
    // Less than a page: no file. Where cores go to a program the kernel looks at no other limit than 1 (core(5)).
    let limit = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    Ok(setrlimit(Resource::Core, limit)?)
}

/// The sibling, once it sleeps.
fn sibling(root: &Root) -> Result<Option<u32>, Error> {
    shown(root, |covered| {
        let running = covered.reaper.state == State::Running.name();
        covered.reaper.pid.filter(|pid| {
            let stat = root.read(format!("proc/{pid}/stat"));
            running && stat.is_ok_and(|stat| state(&stat) == Some('S'))
        })
    })
}

/// The state that /proc/PID/stat shows, behind a name that may hold anything.
fn state(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_stands_behind_the_name() {
        assert_eq!(state("7 (a) R b) S 1 2"), Some('S'));
        assert_eq!(state("7"), None);
    }

    #[test]
    fn a_process_that_ended_in_another_way_is_seen() {
        for (end, raw) in [(End::Exit, 0), (End::Kill, 9), (End::Crash, 6)] {
            for other in [0, 9, 6, 15, 0x100] {
                let status = ExitStatus::from_raw(other);
                assert_eq!(end.is(status), raw == other, "{end:?} {other}");
            }
        }
    }
}
