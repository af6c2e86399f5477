//! [`Teardown`]: the release of a dying process's memory from two sides; [`Gain`]: its result.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};

use super::process::id;
use super::{Process, Reason, locks};
use crate::kernel::process::{Stop, tree};
use crate::kernel::{sys, task};
use crate::units::Bytes;

/// Maximum time that a process is held until the call works: usually some 50 us.
const HOLD_TIMEOUT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_micros(10);

/// Method of a teardown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TeardownMethod {
    /// The process was held at its exit until the call worked.
    Held,
    /// The call came right after the signal.
    Raced,
    /// The kernel freed the memory alone.
    Kernel,
}

/// The teardown of a process that is ending.
#[derive(Debug)]
pub struct Teardown {
    process: Process,
    memory: task::Memory,
    begun: Instant,
    /// The last thread of the process, and its CPU time when the hold ended.
    last: Option<(Pid, Option<Duration>)>,
    worker: Result<JoinHandle<Work>, Reason>,
    /// Time when the end was detected, and the last thread's CPU time then.
    gone: Option<(Instant, Option<Duration>)>,
}

/// Result of the releasing thread.
#[derive(Clone, Copy, Debug)]
struct Work {
    outcome: Result<(), Errno>,
    time: Duration,
    cpu: Duration,
}

/// Result of a [`Teardown`].
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Gain {
    /// Method of the teardown.
    pub way: TeardownMethod,
    /// Resident anonymous memory at the beginning of the exit.
    pub anonymous: Bytes,
    /// Memory that process_mrelease skips and the kernel frees: shared memory and hugetlb.
    pub left: Bytes,
    /// Estimate of the part of `anonymous` that our side freed, by its share of the CPU time of
    /// both sides: the kernel has no counter. `None` where our side did nothing.
    pub released: Option<Bytes>,
    /// Duration of our side's work.
    pub worked_ms: f64,
    /// Time from the beginning of the exit to the end of the process; `None` before that.
    pub teardown_ms: Option<f64>,
    /// Reason why our side did nothing.
    pub reason: Option<Reason>,
}

impl Teardown {
    /// Releases the memory of a process whose last `thread` is at its exit stop, unless `checked`
    /// is an error, and detaches.
    pub(super) fn begin(
        process: &Process,
        thread: Pid,
        memory: task::Memory,
        checked: Result<(), Reason>,
    ) -> Self {
        let begun = Instant::now();
        let before = resident(process, thread);
        let worker = checked.and_then(|()| {
            let process = process.clone();
            spawn(move || Work::release(&process))
        });
        let cpu = process.cpu_time(thread);
        if let (Ok(worker), Some(before)) = (&worker, before) {
            wait_for_release(process, thread, before, worker);
        }
        // A failure means that a second SIGKILL has ended the stop.
        let _ = Stop::Exit.detach(thread);
        Self {
            process: process.clone(),
            memory,
            begun,
            last: Some((thread, cpu)),
            worker,
            gone: None,
        }
    }

    /// Sends `signal` to a process that cannot be held, and races it: the thread that sends the
    /// signal makes the call right after it.
    ///
    /// # Errors
    /// Errno of [`Process::signal`].
    pub fn race(process: &Process, signal: i32) -> Result<Self, Errno> {
        let memory = task::memory(process.root(), process.pid());
        let memory = memory.ok().flatten().unwrap_or_default();
        let checked = match memory.anon < super::Hold::MIN_BYTES {
            true => Err(Reason::Small),
            false => locks::check_mappings(process),
        };
        let begun = Instant::now();
        let sent = Arc::new(OnceLock::new());
        let worker = checked.and_then(|()| {
            let (process, sent) = (process.clone(), Arc::clone(&sent));
            spawn(move || {
                // To wake a waiting thread would take as long as the race.
                match sent.get_or_init(|| process.signal(signal)) {
                    Ok(()) => Work::release(&process),
                    Err(_) => Work::none(),
                }
            })
        });
        match &worker {
            Ok(worker) => loop {
                match sent.get() {
                    Some(sent) => break (*sent)?,
                    None if worker.is_finished() => return Err(Errno::IO),
                    None => std::thread::sleep(Duration::from_micros(50)),
                }
            },
            Err(_) => process.signal(signal)?,
        }
        Ok(Self {
            process: process.clone(),
            memory,
            begun,
            last: None,
            worker,
            gone: None,
        })
    }

    /// Reports whether the process has ended. Frequent calls make the timing more exact.
    pub fn poll(&mut self) -> bool {
        if self.gone.is_none() && self.process.is_gone() {
            let at = Instant::now();
            let cpu = self
                .last
                .and_then(|(thread, _)| self.process.cpu_time(thread));
            self.gone = Some((at, cpu));
        }
        self.gone.is_some()
    }

    /// Waits for our side, which ends no later than the kernel's, and returns the result.
    pub fn finish(mut self) -> Gain {
        self.poll();
        let memory = &self.memory;
        let teardown = self.gone.map(|(at, _)| at - self.begun);
        let way = match (&self.worker, self.last) {
            (Ok(_), Some(_)) => TeardownMethod::Held,
            (Ok(_), None) => TeardownMethod::Raced,
            (Err(_), _) => TeardownMethod::Kernel,
        };
        let mut gain = Gain {
            way,
            anonymous: memory.anon,
            left: memory.shmem + memory.hugetlb,
            released: None,
            worked_ms: 0.0,
            teardown_ms: teardown.map(milliseconds),
            reason: None,
        };
        let work = match self.worker.map(JoinHandle::join) {
            Err(reason) => {
                gain.reason = Some(reason);
                return gain;
            }
            Ok(work) => work.unwrap_or(Work::none()),
        };
        gain.worked_ms = milliseconds(work.time);
        gain.reason = work.outcome.err().map(|errno| match (errno, way) {
            (Errno::SRCH, _) => Reason::TooLate,
            (Errno::INVAL, TeardownMethod::Raced) => Reason::NotEnding,
            (Errno::INVAL, _) => Reason::SharedMemory,
            (Errno::NOSYS, _) => Reason::Kernel,
            (errno, _) => Reason::Refused(errno),
        });
        gain.released = Some(match gain.reason {
            Some(_) => Bytes(0),
            None => {
                let before = self.last.and_then(|(_, cpu)| cpu);
                let after = self.gone.and_then(|(_, cpu)| cpu);
                let (ours, theirs) = match before.zip(after) {
                    Some((before, after)) => (work.cpu, after.saturating_sub(before)),
                    // Without CPU times: both sides work until all is freed.
                    None => (work.time, teardown.unwrap_or(work.time)),
                };
                share(memory.anon, ours, theirs)
            }
        });
        gain
    }
}

impl Work {
    /// Calls process_mrelease until it succeeds or fails for good.
    fn release(process: &Process) -> Self {
        let (started, cpu) = (Instant::now(), cpu_time());
        let outcome = loop {
            match sys::release(process) {
                // An MMU notifier, as of a KVM guest, would block.
                Err(Errno::AGAIN) if !process.is_gone() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                outcome => break outcome,
            }
        };
        Self {
            outcome,
            time: started.elapsed(),
            cpu: cpu_time().saturating_sub(cpu),
        }
    }

    const fn none() -> Self {
        Self {
            outcome: Err(Errno::SRCH),
            time: Duration::ZERO,
            cpu: Duration::ZERO,
        }
    }
}

fn spawn(work: impl FnOnce() -> Work + Send + 'static) -> Result<JoinHandle<Work>, Reason> {
    let thread = std::thread::Builder::new().name("jumbo-release".to_owned());
    thread.spawn(work).map_err(|_| Reason::NoThread)
}

/// Waits until some memory is freed: from then on the call holds a reference to the memory.
fn wait_for_release(process: &Process, thread: Pid, before: Bytes, worker: &JoinHandle<Work>) {
    let started = Instant::now();
    while !worker.is_finished() && started.elapsed() < HOLD_TIMEOUT {
        match resident(process, thread) {
            Some(now) if now >= before => std::thread::sleep(POLL_INTERVAL),
            Some(_) | None => return,
        }
    }
}

fn resident(process: &Process, thread: Pid) -> Option<Bytes> {
    tree::resident_anonymous(process.root(), id(thread)).ok()
}

/// Returns the part of `whole` that is proportional to `ours`.
fn share(whole: Bytes, ours: Duration, theirs: Duration) -> Bytes {
    let both = (ours + theirs).as_nanos().max(1);
    let part = u128::from(whole.0) * ours.as_nanos() / both;
    Bytes(u64::try_from(part).unwrap_or(whole.0))
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
