//! Carries out a plan: [`promote()`].

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;

use super::access::MemoryAdvice;
use super::plan::{Block, Survey, size};
use super::{Access, Pace, Pause, PromotePlan, Refusal, Target};
use crate::kernel::remote::End;
use crate::units::{Bytes, PageSize};

/// Interval between calls of the watcher while nothing is collapsed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of attempts for a block with busy pages.
const MAX_ATTEMPTS: u32 = 3;
/// Delay before the second attempt; later ones wait longer.
const RETRY_DELAY: Duration = Duration::from_millis(2);
/// Maximum time of one pause.
const PAUSE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum time without a thread that can be stopped.
const THREAD_TIMEOUT: Duration = Duration::from_secs(10);
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
    access: &Access,
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
        access,
        survey: Survey::new(calls, base, plan.huge_page),
        huge: plan.huge_page,
        pace,
        watcher,
        outcome,
        done: Bytes(0),
        thread_wait: Duration::ZERO,
    };
    let stopped = work.run(&plan.blocks).err();
    let mut outcome = work.outcome;
    outcome.stopped = stopped.filter(|_| !outcome.ended);
    outcome.seconds = started.elapsed().as_secs_f64();
    outcome
}

struct Work<'a> {
    target: &'a Target,
    access: &'a Access,
    survey: Survey<'a>,
    huge: PageSize,
    pace: &'a mut Pace,
    watcher: &'a mut dyn Watcher,
    outcome: Outcome,
    /// Memory that was collapsed or skipped.
    done: Bytes,
    /// Time without a thread that can be stopped.
    thread_wait: Duration,
}

impl Work<'_> {
    /// Collapses `blocks`.
    ///
    /// # Errors
    /// The reason why some are left, in words.
    fn run(&mut self, mut blocks: &[Block]) -> Result<(), String> {
        let at_once = self.access.at_once();
        let mut free = 0;
        while !blocks.is_empty() {
            if free < at_once as u64 {
                free = self.pace.room(self.target, self.huge)?;
            }
            let batch = at_once.min(usize::try_from(free).unwrap_or(1));
            let done = self.step(&blocks[..batch.min(blocks.len())])?;
            free = free.saturating_sub(done as u64);
            blocks = &blocks[done..];
        }
        Ok(())
    }

    /// Collapses the first of `blocks`; returns the number of blocks that are done.
    fn step(&mut self, blocks: &[Block]) -> Result<usize, String> {
        self.wait()?;
        let bytes = Bytes(self.huge.bytes());
        let mut left = Vec::new();
        for block in blocks {
            match self.survey.is_worthwhile(block) {
                Ok(true) => left.push(*block),
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(End::Held.to_string());
                }
                Ok(false) | Err(_) => {}
            }
        }
        let addresses: Vec<u64> = left.iter().map(|block| block.address).collect();
        let skipped = blocks.len() - left.len();
        if addresses.is_empty() {
            self.skip(skipped)?;
            return Ok(blocks.len());
        }
        let started = Instant::now();
        let mut advised = self.advise(&addresses);
        for attempts in 1..MAX_ATTEMPTS {
            let is_busy = advised.answers.last() == Some(&Err(Errno::AGAIN));
            if advised.end != End::Done || !is_busy {
                break;
            }
            // The blocks before the last have their answers.
            std::thread::sleep(RETRY_DELAY * attempts);
            let at = advised.answers.len() - 1;
            let again = self.advise(addresses.get(at..=at).unwrap_or_default());
            if again.answers.is_empty() {
                break;
            }
            advised.answers.truncate(at);
            advised.answers.extend(again.answers);
        }
        let reached = advised.answers.len();
        for (block, answer) in left.iter().zip(advised.answers) {
            self.done += bytes;
            match answer {
                Ok(()) => {
                    self.outcome.obtained += bytes;
                    self.outcome.cost += block.cost;
                }
                Err(errno) => self.outcome.add_failure(block.address, bytes, errno),
            }
            if answer == Err(Errno::BUSY) {
                return Err(String::from("its memory cgroup is at the limit"));
            }
        }
        self.pace.count(Bytes(bytes.0 * reached as u64));
        match advised.end {
            End::Done | End::Signal => self.thread_wait = Duration::ZERO,
            // If only the thread has ended, another one is tried.
            End::Gone if self.target.process.is_gone() => {
                self.outcome.ended = true;
                return Err(End::Gone.to_string());
            }
            End::NoThread | End::Gone => {
                self.pause_for_thread(started.elapsed())?;
            }
            end => return Err(end.to_string()),
        }
        // Blocks up to the next one are done: reached, or skipped in between.
        let next = left.get(reached).map(|block| block.address);
        let at = blocks.iter().position(|block| Some(block.address) == next);
        let at = at.unwrap_or(blocks.len());
        self.skip(at.saturating_sub(reached))?;
        Ok(at)
    }

    fn advise(&self, addresses: &[u64]) -> crate::kernel::remote::Advised {
        let length = size(self.huge);
        self.access
            .advise(self.target, addresses, MemoryAdvice::Collapse, length)
    }

    /// Counts blocks that are not worthwhile any more: the process may have ended.
    fn skip(&mut self, blocks: usize) -> Result<(), String> {
        let bytes = Bytes(self.huge.bytes() * blocks as u64);
        self.outcome.changed += bytes;
        self.done += bytes;
        if blocks > 0 && self.target.process.is_gone() {
            self.outcome.ended = true;
            return Err(String::from("it has ended"));
        }
        Ok(())
    }

    fn pause_for_thread(&mut self, waited: Duration) -> Result<(), String> {
        let waited = waited.max(Duration::from_millis(1));
        *self.outcome.paused.entry(Pause::Thread).or_default() += waited.as_secs_f64();
        self.thread_wait += waited;
        if self.thread_wait >= THREAD_TIMEOUT {
            return Err(format!("{} for {THREAD_TIMEOUT:?}", End::NoThread));
        }
        self.poll(Some(Pause::Thread))
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
