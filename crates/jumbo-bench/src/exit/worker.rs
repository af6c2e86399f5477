//! The program whose end is measured: it takes memory, says what it has, and ends when it is told to.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use jumbo::kernel::Root;
use jumbo::units::Bytes;
use jumbo_inside::reaper::State;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::memory::{Block, base_pages_only, had_in};
use crate::worker::{Figures, say, shown};

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

/// What the worker says when it is ready to end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    /// The worker, which a launcher may stand in front of.
    pub(super) pid: u32,
    /// What its block has.
    pub(super) figures: Figures,
    /// The sibling that will give the memory back; `None` where there is none.
    pub(super) reaper: Option<u32>,
}

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

/// Allocates `size` bytes, touches them in base pages, says so ([`Ready`]), and ends that way when its standard input
/// says something, having said when ([`now_ns`]). Where `reaper` is set it waits for its sibling before it says so.
pub(crate) fn hold(size: Bytes, reaper: bool, end: End) -> Result<(), Error> {
    base_pages_only()?;
    no_core()?;
    let root = Root::host();
    let mut block = Block::allocate(size)?;
    block.touch();
    say(&Ready {
        pid: std::process::id(),
        figures: had_in(&root, &[block.addresses()])?,
        reaper: if reaper { sibling(&root)? } else { None },
    })?;

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
