//! A plan carried out: [`promote()`].

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;

use super::access::MemoryAdvice;
use super::plan::{Block, Survey, size};
use super::{Access, Pace, Pause, PromotePlan, Target};
use crate::kernel::cgroup;
use crate::kernel::remote::End;
use crate::units::{Bytes, PageSize};

/// The time between two questions to the watcher while nothing is collapsed.
const SLICE: Duration = Duration::from_millis(50);
/// The number of tries of a block whose pages were busy, and the time between.
const TRIES: u32 = 3;
const REST: Duration = Duration::from_millis(2);
/// A command that waits for a moment to go on gives up after this.
const PATIENCE: Duration = Duration::from_mins(1);
/// The same for a thread that can be stopped.
const THREAD_PATIENCE: Duration = Duration::from_secs(10);
/// The number of blocks that are collapsed before free huge pages are counted again.
const BATCH: u64 = 16;

/// Where the work stands.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Collapsed or passed over so far.
    pub done: Bytes,
    /// The plan.
    pub of: Bytes,
    /// Why nothing is collapsed now.
    pub pause: Option<Pause>,
}

/// The caller's view of the work, and its wish to end it.
pub trait Watcher {
    /// Asked before each block and every 50 ms while nothing is collapsed. `Break` ends the work.
    fn poll(&mut self, progress: &Progress) -> ControlFlow<()>;
}

/// Ranges that the kernel refused, by errno.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// `EAGAIN`, say.
    pub errno: &'static str,
    /// The meaning of it here.
    pub reason: &'static str,
    /// The memory.
    pub bytes: Bytes,
    /// The addresses of the first ranges.
    pub ranges: Vec<u64>,
}

/// The result of a plan.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// The plan.
    pub planned: Bytes,
    /// On huge pages now.
    pub obtained: Bytes,
    /// The memory that this took beyond what was resident.
    pub cost: Bytes,
    /// Unmapped, emptied or huge by the time of its turn.
    pub changed: Bytes,
    /// Refused by the kernel.
    pub failures: Vec<Failure>,
    /// Why the rest was not tried.
    pub stopped: Option<String>,
    /// True where the process ended meanwhile, or the program that the plan was made for.
    pub ended: bool,
    /// Time without work, by the reason, in seconds.
    pub paused: BTreeMap<Pause, f64>,
    /// From the first block to the last, in seconds.
    pub seconds: f64,
}

/// The number of ranges that [`Failure::ranges`] has.
const MAX_RANGES: usize = 3;

impl Outcome {
    /// True where all of the plan is huge that is still there, of a process that is.
    pub fn is_whole(&self) -> bool {
        !self.ended && self.stopped.is_none() && self.failures.is_empty()
    }

    pub(super) fn refused(&mut self, address: u64, bytes: Bytes, errno: Errno) {
        let (name, reason) = in_words(errno);
        let found = self
            .failures
            .iter()
            .position(|failure| failure.errno == name);
        let at = found.unwrap_or(self.failures.len());
        if at == self.failures.len() {
            self.failures.push(Failure {
                errno: name,
                reason,
                bytes: Bytes(0),
                ranges: Vec::new(),
            });
        }
        if let Some(failure) = self.failures.get_mut(at) {
            failure.bytes += bytes;
            if failure.ranges.len() < MAX_RANGES {
                failure.ranges.push(address);
            }
        }
    }
}

/// The meaning of an errno of MADV_COLLAPSE (madvise(2)).
fn in_words(errno: Errno) -> (&'static str, &'static str) {
    match errno {
        Errno::AGAIN => (
            "EAGAIN",
            "pages were locked, pinned or in use for I/O: try again later",
        ),
        Errno::NOMEM => (
            "ENOMEM",
            "no huge page was to be had, or the range is unmapped",
        ),
        Errno::BUSY => ("EBUSY", "the memory cgroup is at its limit"),
        Errno::INVAL => (
            "EINVAL",
            "the kernel collapses no such memory: pages under userfaultfd, a mapping with special pages, shared \
             memory whose THP control is `never`, a file without CONFIG_READ_ONLY_THP_FOR_FS or open for writing",
        ),
        Errno::PERM | Errno::ACCESS => ("EPERM", "the process has changed its user or its rights"),
        _ => ("other", "an errno that madvise(2) does not have"),
    }
}

/// Carries out `plan`, of `target` as it was.
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
    let Ok(pagemap) = target.pagemap() else {
        outcome.ended = true;
        return outcome;
    };
    let base = crate::kernel::base_page(&target.root);
    let mut work = Work {
        target,
        access,
        survey: Survey {
            pagemap: &pagemap,
            base: size(base),
            pmd: size(plan.huge_page),
            scans: true,
        },
        huge: plan.huge_page,
        pace,
        watcher,
        outcome,
        done: Bytes(0),
        thread_wait: Duration::ZERO,
    };
    work.survey.find_out();
    let mut stopped = None;
    let mut blocks = plan.blocks.as_slice();
    let mut free = 0;
    while !blocks.is_empty() && stopped.is_none() {
        if free < access.at_once() as u64 {
            free = work.pace.free_pages(plan.huge_page).min(BATCH);
            // Each may grow it by a huge page.
            let limit = cgroup::memory_limit(&target.root, target.pid());
            if let Some(limit) = limit.filter(|_| free > 0) {
                free = free.min(limit.spare().0 / plan.huge_page.bytes());
                if free == 0 {
                    stopped = Some(format!(
                        "its control group has {} left of {}, which it may need to grow",
                        limit.room(),
                        limit.limit
                    ));
                    break;
                }
            }
        }
        if free == 0 {
            let why = "no huge page is free, and the kernel would have to move memory for one; \
                       `jumbo doctor` has more";
            stopped = Some(String::from(why));
            break;
        }
        let count = access
            .at_once()
            .min(blocks.len())
            .min(usize::try_from(free).unwrap_or(1));
        let (now, _) = blocks.split_at(count);
        match work.step(now) {
            Ok(done) => {
                free = free.saturating_sub(done as u64);
                blocks = blocks.get(done..).unwrap_or_default();
            }
            Err(why) => stopped = Some(why),
        }
    }
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
    /// For [`Progress`].
    done: Bytes,
    /// The time in which no thread could be stopped.
    thread_wait: Duration,
}

impl Work<'_> {
    /// Collapses the first of `blocks`; how many are done with.
    fn step(&mut self, blocks: &[Block]) -> Result<usize, String> {
        self.wait()?;
        let bytes = Bytes(self.huge.bytes());
        let is_still = |block: &&Block| self.survey.is_still(block).unwrap_or(false);
        let there: Vec<Block> = blocks.iter().filter(is_still).copied().collect();
        let addresses: Vec<u64> = there.iter().map(|block| block.address).collect();
        let passed = blocks.len() - there.len();
        if addresses.is_empty() {
            self.pass(passed)?;
            return Ok(blocks.len());
        }
        let tried = Instant::now();
        let mut advised = self.advise(&addresses);
        for tries in 1..TRIES {
            let is_busy = advised.answers.last() == Some(&Err(Errno::AGAIN));
            if advised.end != End::Done || !is_busy {
                break;
            }
            // The others have their answer.
            std::thread::sleep(REST * tries);
            let at = advised.answers.len() - 1;
            let again = self.advise(addresses.get(at..=at).unwrap_or_default());
            if again.answers.is_empty() {
                break;
            }
            advised.answers.truncate(at);
            advised.answers.extend(again.answers);
        }
        let reached = advised.answers.len();
        for (block, answer) in there.iter().zip(advised.answers) {
            self.done += bytes;
            match answer {
                Ok(()) => {
                    self.outcome.obtained += bytes;
                    self.outcome.cost += block.cost;
                }
                Err(errno) => self.outcome.refused(block.address, bytes, errno),
            }
            if answer == Err(Errno::BUSY) {
                return Err(String::from("its memory cgroup is at the limit"));
            }
        }
        self.pace.count(Bytes(bytes.0 * reached as u64));
        match advised.end {
            End::Done | End::Signal => self.thread_wait = Duration::ZERO,
            // A thread that ended, of a process that goes on, is tried again with another.
            End::Gone if self.target.process.is_gone() => {
                self.outcome.ended = true;
                return Err(End::Gone.to_string());
            }
            End::NoThread | End::Gone => {
                self.pause_for_thread(tried.elapsed())?;
            }
            end => return Err(end.to_string()),
        }
        // What was passed over lies between those that were reached.
        if reached == there.len() {
            self.pass(passed)?;
            return Ok(blocks.len());
        }
        let next = there.get(reached).map(|block| block.address);
        let at = blocks.iter().position(|block| Some(block.address) == next);
        let at = at.unwrap_or(blocks.len());
        self.pass(at.saturating_sub(reached))?;
        Ok(at)
    }

    fn advise(&self, addresses: &[u64]) -> crate::kernel::remote::Advised {
        let length = size(self.huge);
        self.access
            .advise(self.target, addresses, MemoryAdvice::Collapse, length)
    }

    /// Counts blocks that are not worth it any more. A process of which all are gone has ended, or runs
    /// another program.
    fn pass(&mut self, blocks: usize) -> Result<(), String> {
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
        if self.thread_wait >= THREAD_PATIENCE {
            return Err(format!("{} for {THREAD_PATIENCE:?}", End::NoThread));
        }
        self.ask(Some(Pause::Thread))
    }

    /// Waits until the next block is due.
    fn wait(&mut self) -> Result<(), String> {
        self.ask(None)?;
        let mut waited = Duration::ZERO;
        while let Some(pause) = self.pace.stall() {
            self.ask(Some(pause))?;
            std::thread::sleep(SLICE);
            waited += SLICE;
            *self.outcome.paused.entry(pause).or_default() += SLICE.as_secs_f64();
            if waited >= PATIENCE {
                return Err(format!("{pause} for {PATIENCE:?}"));
            }
        }
        loop {
            match self.pace.wait() {
                Duration::ZERO => return Ok(()),
                left => std::thread::sleep(left.min(SLICE)),
            }
            self.ask(None)?;
        }
    }

    fn ask(&mut self, pause: Option<Pause>) -> Result<(), String> {
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
