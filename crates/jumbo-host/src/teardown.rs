//! Ends a process by a signal, and frees its memory beside the kernel: process_mrelease(2) in two
//! threads of this process, while the exit of the process frees in one thread. See
//! `docs/design/free.md`.
//!
//! The call frees the memory of a process that is dying and still has its memory. That state lasts
//! microseconds after the signal. One thread sends the signal and makes the call; the other makes
//! it from before the signal on, until the kernel accepts it. One thread alone came too late for 9
//! processes of 10, two for 1 of 10.
//!
//! Invariant: no memory is freed that another process needs. The kernel refuses a process that is
//! not dying, that dumps its core, or whose memory another process shares. It reads the memory of
//! a dying process for others in one case, robust futexes (`man 3 pthread_mutexattr_setrobust`) in
//! shared memory: a process with writable shared mappings is left to the kernel alone.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::kernel::process::Process;
use crate::kernel::{aside, sys, task};
use crate::units::Bytes;

/// Minimum anonymous memory: the kernel frees less before a thread here has started.
const MIN_BYTES: Bytes = Bytes(16 << 20);
/// Maximum time from the start of a thread until the process is dying.
const DYING_TIMEOUT: Duration = Duration::from_millis(10);

/// Reason why this process freed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Less memory than [`MIN_BYTES`].
    #[error("it had too little memory to matter")]
    Small,
    /// Writable shared memory, which can have robust futexes, or mappings that cannot be read.
    #[error("it shares memory that it writes, and robust locks may be in there")]
    SharedMapping,
    /// EINVAL: not dying within [`DYING_TIMEOUT`], a core dump, or a reaper.
    #[error("it did not end at once, or another process shares its memory")]
    NotEnding,
    /// ESRCH: the process had given up its memory.
    #[error("the kernel was faster")]
    TooLate,
    /// Another errno of process_mrelease(2): ENOSYS before Linux 5.15.
    #[error("process_mrelease(2) failed: {0}")]
    Refused(Errno),
    /// clone(2) failed.
    #[error("no thread could be made")]
    NoThread,
}

impl serde::Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Result of a [`Teardown`].
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Gain {
    /// Resident anonymous memory at the signal.
    pub anonymous: Bytes,
    /// Memory that process_mrelease skips: shared memory and hugetlb.
    pub left: Bytes,
    /// Estimate of the part of `anonymous` that this process freed, by the time of its calls: the
    /// kernel has no counter.
    pub released: Bytes,
    /// Reason why this process freed nothing.
    pub reason: Option<Reason>,
}

/// The end of a process by a signal.
#[derive(Debug)]
pub struct Teardown {
    memory: task::Memory,
    workers: Result<[JoinHandle<Result<Duration, Errno>>; 2], Reason>,
}

impl Teardown {
    /// Sends `signal`, and starts to free the memory if the signal kills the process.
    ///
    /// # Errors
    /// Errno of [`Process::signal`].
    pub fn begin(process: &Process, signal: i32) -> Result<Self, Errno> {
        // An error of the thread that sends the signal would be seen late.
        process.signal(0)?;
        let (root, pid) = (process.root(), process.pid());
        let memory = task::memory(root, pid).ok().flatten().unwrap_or_default();
        let is_shared = || {
            let maps = aside::maps(root, pid);
            maps.map_or(true, |maps| {
                maps.mappings().any(|one| one.write && one.shared)
            })
        };
        let workers = match memory.anon < MIN_BYTES {
            true => Err(Reason::Small),
            false if is_shared() => Err(Reason::SharedMapping),
            false => {
                spawn(process, None).and_then(|beside| Ok([spawn(process, Some(signal))?, beside]))
            }
        };
        if workers.is_err() {
            process.signal(signal)?;
        }
        Ok(Self { memory, workers })
    }

    /// Waits for the calls, which end no later than the process, and returns the result. `took`:
    /// time from the signal to the end of the process.
    pub fn finish(self, took: Duration) -> Gain {
        let anonymous = self.memory.anon;
        let time = self.workers.and_then(|workers| {
            let ended = workers.map(|worker| worker.join().unwrap_or(Err(Errno::SRCH)));
            let longest = ended.iter().filter_map(|one| one.ok()).max();
            longest.ok_or(match ended[0].err().unwrap_or(Errno::SRCH) {
                Errno::SRCH => Reason::TooLate,
                Errno::INVAL => Reason::NotEnding,
                errno => Reason::Refused(errno),
            })
        });
        let nanoseconds = time.unwrap_or_default().as_nanos();
        let part = u128::from(anonymous.0) * nanoseconds / (nanoseconds + took.as_nanos()).max(1);
        Gain {
            anonymous,
            left: self.memory.shmem + self.memory.hugetlb,
            released: Bytes(u64::try_from(part).unwrap_or(anonymous.0)),
            reason: time.err(),
        }
    }
}

/// Starts a thread that sends `signal`, if any, and frees the memory of the process once it is
/// dying. The result is the duration of the call that freed.
fn spawn(
    process: &Process,
    signal: Option<i32>,
) -> Result<JoinHandle<Result<Duration, Errno>>, Reason> {
    let process = process.clone();
    let thread = std::thread::Builder::new().name("jumbo-release".to_owned());
    let work = move || {
        let started = Instant::now();
        if let Some(signal) = signal {
            process.signal(signal)?;
        }
        loop {
            let called = Instant::now();
            match sys::release(&process) {
                Err(Errno::INVAL) if started.elapsed() < DYING_TIMEOUT => {}
                // An MMU notifier, as of a KVM guest, would block.
                Err(Errno::AGAIN) if !process.is_gone() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                outcome => return outcome.map(|()| called.elapsed()),
            }
        }
    };
    thread.spawn(work).map_err(|_| Reason::NoThread)
}
