//! The signal to a process, and the release of its memory beside the kernel: process_mrelease(2) in
//! two threads, while the exit of the process frees in one. See `docs/design/free.md`.
//!
//! The call frees the memory of a process that is dying and still has its memory. That state lasts
//! microseconds after the signal. One thread sends the signal and makes the call; the other makes
//! it from before the signal on, until the kernel accepts it. On a busy machine one thread alone came
//! too late for 9 processes of 10, two for 1 of 10.
//!
//! Invariant: no memory is freed that another process needs. The kernel refuses a process that is
//! not dying, that dumps its core, or whose memory another process shares. It reads the memory of
//! a dying process for others in one case, robust futexes (`man 3 pthread_mutexattr_setrobust`) in
//! shared memory: a process with writable shared mappings is left to the kernel alone.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Process, release};
use jumbo_host::kernel::{maps, task};
use rustix::io::{Errno, Result};

/// Minimum anonymous memory: the kernel frees less before a thread here has started.
const MIN_BYTES: Bytes = Bytes(16 << 20);
/// Maximum time from the start of a thread until the process is dying.
const DYING_TIMEOUT: Duration = Duration::from_millis(10);

/// The end of a process by a signal; the threads that free, or the reason for none.
pub(super) struct Teardown {
    memory: task::Memory,
    workers: std::result::Result<[JoinHandle<Result<Duration>>; 2], &'static str>,
}

/// Result of a [`Teardown`].
#[derive(serde::Serialize)]
pub(super) struct Gain {
    /// Resident anonymous memory at the signal.
    pub(super) anonymous: Bytes,
    /// Memory that process_mrelease skips: shared memory and hugetlb.
    pub(super) left: Bytes,
    /// Estimate of the part of `anonymous` that this process freed, by the time of its calls: the
    /// kernel has no counter.
    pub(super) released: Bytes,
    /// Reason why this process freed nothing.
    pub(super) reason: Option<String>,
}

impl Teardown {
    /// Sends `signal`, and starts to free the memory if the signal kills the process.
    ///
    /// # Errors
    /// Errno of [`Process::signal`].
    pub(super) fn begin(process: &Process, signal: i32) -> Result<Self> {
        // An error of the thread that sends the signal would be seen late.
        process.signal(0)?;
        let (root, pid) = (process.root(), process.pid());
        let memory = task::memory(root, pid).ok().flatten().unwrap_or_default();
        let maps = || maps(root, pid);
        let workers = if memory.anon < MIN_BYTES {
            Err("it had too little memory to matter")
        } else if maps().map_or(true, |maps| maps.mappings().any(|it| it.write && it.shared)) {
            Err("it shares memory that it writes, and robust locks may be in there")
        } else {
            let start = |signal| spawn(process, signal).map_err(|_| "no thread could be made");
            start(None).and_then(|beside| Ok([start(Some(signal))?, beside]))
        };
        if workers.is_err() {
            process.signal(signal)?;
        }
        Ok(Self { memory, workers })
    }

    /// Waits for the calls, which end no later than the process, and returns the result. `took`:
    /// time from the signal to the end of the process.
    pub(super) fn finish(self, took: Duration) -> Gain {
        let anonymous = self.memory.anon;
        let time = self.workers.map_err(str::to_owned).and_then(|workers| {
            let ended = workers.map(|worker| worker.join().unwrap_or(Err(Errno::SRCH)));
            let longest = ended.iter().filter_map(|one| one.ok()).max();
            longest.ok_or_else(|| match ended[0].err() {
                Some(Errno::INVAL) => "it did not end at once, or shares its memory".to_owned(),
                Some(Errno::SRCH) | None => "the kernel was faster".to_owned(),
                Some(Errno::NOSYS) => "this kernel has no process_mrelease (Linux 5.15)".to_owned(),
                Some(errno) => format!("process_mrelease(2) failed: {errno}"),
            })
        });
        let nanos = time.as_ref().map_or(0, Duration::as_nanos);
        let part = u128::from(anonymous.0) * nanos / (nanos + took.as_nanos()).max(1);
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
fn spawn(process: &Process, signal: Option<i32>) -> std::io::Result<JoinHandle<Result<Duration>>> {
    let (process, started) = (process.clone(), Instant::now());
    std::thread::Builder::new().spawn(move || {
        signal.map_or(Ok(()), |signal| process.signal(signal))?;
        loop {
            let called = Instant::now();
            match release(&process) {
                Err(Errno::INVAL) if started.elapsed() < DYING_TIMEOUT => {}
                // An MMU notifier, as of a KVM guest, would block.
                Err(Errno::AGAIN) if !process.is_gone() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                outcome => return outcome.map(|()| called.elapsed()),
            }
        }
    })
}
