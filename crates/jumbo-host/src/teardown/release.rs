//! [`Teardown`]: the memory of a dying process, given back from two sides; [`Gain`]: what that came to.

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

/// How long a process is held until the call is seen at work. That takes some 50 us, and longer where the
/// CPUs are busy with others.
const UNTIL_SEEN: Duration = Duration::from_secs(1);
const BETWEEN_LOOKS: Duration = Duration::from_micros(10);

/// How it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TeardownMethod {
    /// The process was held at its end until the call was at work.
    Held,
    /// The call was made right after the signal.
    Raced,
    /// By the kernel alone.
    Kernel,
}

/// The teardown of a process that is ending.
#[derive(Debug)]
pub struct Teardown {
    process: Process,
    memory: task::Memory,
    begun: Instant,
    /// The last thread of the process, and its CPU time when it was let go.
    last: Option<(Pid, Option<Duration>)>,
    worker: Result<JoinHandle<Work>, Reason>,
    /// When the end was seen, and the last thread's CPU time then.
    gone: Option<(Instant, Option<Duration>)>,
}

/// What the thread that releases did.
#[derive(Clone, Copy, Debug)]
struct Work {
    outcome: Result<(), Errno>,
    time: Duration,
    cpu: Duration,
}

/// What a [`Teardown`] came to.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Gain {
    /// How it was done.
    pub way: TeardownMethod,
    /// Its resident anonymous memory when it began to end.
    pub anonymous: Bytes,
    /// What process_mrelease skips and the kernel gives back: shared memory and hugetlb.
    pub left: Bytes,
    /// About how much of `anonymous` our side gave back: all of it, by the share of the CPU time that both
    /// sides took together. The kernel does not count it. `None` where nothing was tried.
    pub released: Option<Bytes>,
    /// How long our side was at it.
    pub worked_ms: f64,
    /// From the beginning of its end until the process was gone; `None` where it is not.
    pub teardown_ms: Option<f64>,
    /// Why the kernel was alone, or our side of no use.
    pub reason: Option<Reason>,
}

impl Teardown {
    /// Releases the memory of a process whose last `thread` stands at its exit, unless `checked` says why
    /// not, and lets it go on.
    pub(super) fn begin(
        process: &Process,
        thread: Pid,
        memory: task::Memory,
        checked: Result<(), Reason>,
    ) -> Self {
        let begun = Instant::now();
        let before = resident(process, thread);
        let worker = checked.and_then(|()| {
            let theirs = process.clone();
            spawn(move || Work::of(&theirs))
        });
        let cpu = process.cpu_time(thread);
        if let (Ok(worker), Some(before)) = (&worker, before) {
            wait_until_seen(process, thread, before, worker);
        }
        // Where this fails another process killed it a second time, and it goes on already.
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

    /// Sends `signal` to a process that cannot be held, and races it: the call is made at once, by the
    /// thread that sent the signal.
    ///
    /// # Errors
    /// The errno of the signal, as [`Process::signal`].
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
            let (theirs, sent) = (process.clone(), Arc::clone(&sent));
            spawn(move || {
                // Waking the thread that waits for the answer would take as long as the race does.
                match sent.get_or_init(|| theirs.signal(signal)) {
                    Ok(()) => Work::of(&theirs),
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

    /// Looks whether the process is gone. The sooner after its end, the better the account.
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

    /// What it came to. Waits for our side, which ends when the process's does.
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
                    // Both walk until all is done: by the clock the sides are equal.
                    None => (work.time, teardown.unwrap_or(work.time)),
                };
                share(memory.anon, ours, theirs)
            }
        });
        gain
    }
}

impl Work {
    /// Releases what can be, until all is or the process has given it up.
    fn of(process: &Process) -> Self {
        let (started, cpu) = (Instant::now(), cpu_time());
        let outcome = loop {
            match sys::release(process) {
                // Another user of the memory (a KVM guest, say) keeps a part of it busy.
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

/// Waits until some of the memory is gone: then the call has the memory in its hands, whatever the
/// process does.
fn wait_until_seen(process: &Process, thread: Pid, before: Bytes, worker: &JoinHandle<Work>) {
    let started = Instant::now();
    while !worker.is_finished() && started.elapsed() < UNTIL_SEEN {
        match resident(process, thread) {
            Some(now) if now >= before => std::thread::sleep(BETWEEN_LOOKS),
            Some(_) | None => return,
        }
    }
}

fn resident(process: &Process, thread: Pid) -> Option<Bytes> {
    tree::resident_anonymous(process.root(), id(thread)).ok()
}

/// The part of `whole` that `ours` is of both.
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
