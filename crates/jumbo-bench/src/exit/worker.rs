//! The program whose end is measured: it takes memory, says what it has, and ends when it is told to.

use std::io::{self, BufRead as _, Write as _};
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::reaper::State;
use jumbo::status::Covered;
use jumbo::units::Bytes;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::memory::{Block, Memory, base_pages_only};

/// What the worker says when it is ready to end.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    /// The worker, which a launcher may stand in front of.
    pub(super) pid: u32,
    /// What its block has.
    pub(super) memory: Memory,
    /// The sibling that will give the memory back; `None` where there is none.
    pub(super) reaper: Option<u32>,
}

/// What it says right before it ends by itself: when that is, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Ending {
    pub(super) at_ns: u64,
}

/// The words by which it is told how to end; anything else, or the end of its input, is an `exit` too.
pub(super) const EXIT: &str = "exit";
pub(super) const ABORT: &str = "abort";

/// How long the sibling may take to be ready.
const PATIENCE: Duration = Duration::from_secs(5);

/// Allocates `size` bytes, touches them in base pages, says so, and ends as it is told on its standard input.
/// Where `reaper` is set it waits for its sibling before it says so.
///
/// # Errors
/// [`Error::BasePages`], [`Error::Malloc`], [`Error::File`], [`Error::Pipe`].
pub fn hold(size: Bytes, reaper: bool) -> Result<(), Error> {
    base_pages_only()?;
    no_core()?;
    let root = Root::host();
    let mut block = Block::allocate(size).ok_or(Error::Malloc(size))?;
    block.touch();
    let ready = Ready {
        pid: std::process::id(),
        memory: Memory::read_of(&root, &block.addresses())?,
        reaper: if reaper { sibling(&root)? } else { None },
    };
    say(&ready)?;

    // Were the one who measures gone, this would be the end of the input, and the end.
    let mut order = String::new();
    io::stdin()
        .lock()
        .read_line(&mut order)
        .map_err(Error::Pipe)?;
    say(&Ending { at_ns: now_ns() })?;
    if order.trim_end() == ABORT {
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

fn say(what: &impl Serialize) -> Result<(), Error> {
    let mut line = serde_json::to_string(what).map_err(|error| Error::Pipe(error.into()))?;
    line.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes()).map_err(Error::Pipe)?;
    out.flush().map_err(Error::Pipe)
}

/// A crash shall measure the end and not the disk.
fn no_core() -> Result<(), Error> {
    // Where cores go to a program the kernel does not look at the limit, unless it is 1 (core(5)).
    let pattern = Root::host().read("proc/sys/kernel/core_pattern")?;
    let limit = if pattern.starts_with('|') { 1 } else { 0 };
    let limit = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    setrlimit(Resource::Core, limit).map_err(|errno| Error::Pipe(errno.into()))
}

/// The sibling, once it sleeps.
fn sibling(root: &Root) -> Result<Option<u32>, Error> {
    let clock = Instant::now();
    loop {
        let covered = Covered::read(root, std::process::id())?;
        let reaper = covered.map(|covered| covered.reaper);
        let running = reaper.filter(|reaper| reaper.state == State::Running.name());
        let asleep = running.and_then(|reaper| reaper.pid).filter(|pid| {
            let stat = root.read(format!("proc/{pid}/stat"));
            stat.is_ok_and(|stat| state(&stat) == Some('S'))
        });
        if asleep.is_some() || clock.elapsed() > PATIENCE {
            return Ok(asleep);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
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
    fn the_clock_goes_on() {
        let before = now_ns();
        assert!(before > 0 && now_ns() >= before);
    }
}
