//! Carries out a plan: [`promote()`].

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;

use super::access::{Answer, End, collapse};
use super::plan::{Block, Survey, size};
use super::{Pace, Pause, PromotePlan, Refusal, Target};
use crate::units::{Bytes, PageSize};

/// Interval between calls of the watcher while nothing is collapsed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of attempts for a block with busy pages.
const MAX_ATTEMPTS: u32 = 3;
/// Delay before the second attempt; later ones wait longer.
const RETRY_DELAY: Duration = Duration::from_millis(2);
/// Maximum time of one pause.
const PAUSE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum length of [`Failure::ranges`].
const MAX_RANGES: usize = 3;

/// Progress of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Memory that was collapsed or skipped.
    pub done: Bytes,
    /// Memory of the plan.
    pub of: Bytes,
    /// Reason of the current pause.
    pub pause: Option<Pause>,
}

/// Observer of the work, which can end it.
pub trait Watcher {
    /// Called before each block, and every 50 ms while nothing is collapsed. `Break` ends the work.
    fn poll(&mut self, progress: &Progress) -> ControlFlow<()>;
}

/// Ranges that the kernel did not collapse, of one errno.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Name of the errno.
    pub errno: &'static str,
    /// Meaning of the errno.
    pub reason: &'static str,
    /// Size of all ranges.
    pub bytes: Bytes,
    /// Addresses of the first ranges.
    pub ranges: Vec<u64>,
}

/// Result of a plan.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Memory of the plan.
    pub planned: Bytes,
    /// Memory that was collapsed.
    pub obtained: Bytes,
    /// Memory that filled up its blocks.
    pub cost: Bytes,
    /// Skipped memory: unmapped, emptied or huge since the plan.
    pub changed: Bytes,
    /// Memory that the kernel did not collapse.
    pub failures: Vec<Failure>,
    /// Reason why the rest was not tried.
    pub stopped: Option<String>,
    /// The process has ended, or executed another program.
    pub ended: bool,
    /// Time of pauses by reason, in seconds.
    pub paused: BTreeMap<Pause, f64>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Outcome {
    /// Reports whether all remaining memory of the plan is huge.
    pub fn is_whole(&self) -> bool {
        !self.ended && self.stopped.is_none() && self.failures.is_empty()
    }

    fn add_failure(&mut self, address: u64, bytes: Bytes, errno: Errno) {
        let (errno, reason) = in_words(errno);
        let known = self
            .failures
            .iter()
            .position(|failure| failure.errno == errno);
        let at = known.unwrap_or_else(|| {
            self.failures.push(Failure {
                errno,
                reason,
                bytes: Bytes(0),
                ranges: Vec::new(),
            });
            self.failures.len() - 1
        });
        let failure = &mut self.failures[at];
        failure.bytes += bytes;
        if failure.ranges.len() < MAX_RANGES {
            failure.ranges.push(address);
        }
    }
}

/// Returns the name and the meaning of an errno of MADV_COLLAPSE (madvise(2)).
fn in_words(errno: Errno) -> (&'static str, &'static str) {
    match errno {
        Errno::AGAIN => (
            "EAGAIN",
            "pages were locked, pinned or in use for I/O: try again later",
        ),
        Errno::NOMEM => ("ENOMEM", "no huge page was free, or the range is unmapped"),
        Errno::BUSY => ("EBUSY", "the memory cgroup is at its limit"),
        Errno::INVAL => (
            "EINVAL",
            "the kernel collapses no such memory: pages under userfaultfd, a mapping with special pages, shared \
             memory whose THP control is `deny`, a file whose file system has no huge folios, or before Linux 7.0 \
             without CONFIG_READ_ONLY_THP_FOR_FS or open for writing",
        ),
        Errno::PERM | Errno::ACCESS => ("EPERM", "the process has changed its user or its rights"),
        _ => ("other", "an errno that madvise(2) does not have"),
    }
}

/// Carries out `plan`, which may be stale.
pub fn promote(
    target: &Target,
    plan: &PromotePlan,
    pace: &mut Pace,
    watcher: &mut dyn Watcher,
) -> Outcome {
    let started = Instant::now();
    let mut outcome = Outcome {
        planned: plan.gain,
        ..Outcome::default()
    };
    let calls = match target.pagemap() {
        Ok(calls) => calls,
        Err(Refusal::File(error)) if error.is_held_back() => {
            outcome.stopped = Some(error.to_string());
            return outcome;
        }
        Err(_) => {
            outcome.ended = true;
            return outcome;
        }
    };
    let base = crate::kernel::base_page(&target.root);
    let mut work = Work {
        target,
        survey: Survey::new(calls, base, plan.huge_page),
        huge: plan.huge_page,
        pace,
        watcher,
        outcome,
        done: Bytes(0),
    };
    let stopped = work.run(&plan.blocks).err();
    let mut outcome = work.outcome;
    outcome.stopped = stopped.filter(|_| !outcome.ended);
    outcome.seconds = started.elapsed().as_secs_f64();
    outcome
}

struct Work<'a> {
    target: &'a Target,
    survey: Survey<'a>,
    huge: PageSize,
    pace: &'a mut Pace,
    watcher: &'a mut dyn Watcher,
    outcome: Outcome,
    /// Memory that was collapsed or skipped.
    done: Bytes,
}

impl Work<'_> {
    /// Collapses `blocks`.
    ///
    /// # Errors
    /// The reason why some are left, in words.
    fn run(&mut self, blocks: &[Block]) -> Result<(), String> {
        let mut free = 0;
        for block in blocks {
            if free == 0 {
                free = self.pace.room(self.target, self.huge)?;
            }
            self.step(block)?;
            free -= 1;
        }
        Ok(())
    }

    /// Collapses a block, or skips it where that is not worthwhile any more.
    fn step(&mut self, block: &Block) -> Result<(), String> {
        self.wait()?;
        let bytes = Bytes(self.huge.bytes());
        match self.survey.is_worthwhile(block) {
            Ok(true) => {}
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                return Err(End::Held.to_string());
            }
            Ok(false) | Err(_) => {
                self.outcome.changed += bytes;
                self.done += bytes;
                return match self.target.process.is_gone() {
                    true => Err(self.ended()),
                    false => Ok(()),
                };
            }
        }
        let answer = self.advise(block).map_err(|end| match end {
            End::Gone => self.ended(),
            End::Held => end.to_string(),
        })?;
        self.done += bytes;
        match answer {
            Ok(()) => {
                self.outcome.obtained += bytes;
                self.outcome.cost += block.cost;
            }
            Err(errno) => self.outcome.add_failure(block.address, bytes, errno),
        }
        self.pace.count(bytes);
        match answer {
            Err(Errno::BUSY) => Err(String::from("its memory cgroup is at the limit")),
            _ => Ok(()),
        }
    }

    /// Collapses a block; where pages of it are busy, a few times.
    fn advise(&self, block: &Block) -> Answer {
        let try_it = || collapse(self.target, block.address, size(self.huge));
        let mut answer = try_it();
        for attempts in 1..MAX_ATTEMPTS {
            if answer != Ok(Err(Errno::AGAIN)) {
                break;
            }
            std::thread::sleep(RETRY_DELAY * attempts);
            answer = try_it();
        }
        answer
    }

    fn ended(&mut self) -> String {
        self.outcome.ended = true;
        End::Gone.to_string()
    }

    /// Waits until the next block is due.
    fn wait(&mut self) -> Result<(), String> {
        self.poll(None)?;
        let mut waited = Duration::ZERO;
        while let Some(pause) = self.pace.stall() {
            self.poll(Some(pause))?;
            std::thread::sleep(POLL_INTERVAL);
            waited += POLL_INTERVAL;
            *self.outcome.paused.entry(pause).or_default() += POLL_INTERVAL.as_secs_f64();
            if waited >= PAUSE_TIMEOUT {
                return Err(format!("{pause} for {PAUSE_TIMEOUT:?}"));
            }
        }
        loop {
            match self.pace.wait() {
                Duration::ZERO => return Ok(()),
                left => std::thread::sleep(left.min(POLL_INTERVAL)),
            }
            self.poll(None)?;
        }
    }

    fn poll(&mut self, pause: Option<Pause>) -> Result<(), String> {
        let progress = Progress {
            done: self.done,
            of: self.outcome.planned,
            pause,
        };
        match self.watcher.poll(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(String::from("interrupted")),
        }
    }
}
