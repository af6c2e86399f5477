//! [`Hold`]: a thread of a process, seized so that the process stops before it frees its memory.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::process::id;
use super::{Process, Reason, Teardown, locks};
use crate::kernel::process::{ProcessState, Stop};
use crate::kernel::sys::ptrace;
use crate::kernel::task;
use crate::units::Bytes;

/// Maximum time that the held thread waits at its exit for threads that show no sign of ending.
const LIVE_THREAD_TIMEOUT: Duration = Duration::from_millis(20);
/// Maximum time that the held thread waits at its exit for threads that are ending.
const ENDING_THREAD_TIMEOUT: Duration = Duration::from_secs(2);

/// One traced thread of a process. The process changes only by the effects of ptrace(2):
/// `TracerPid` is set, no other process can trace it, a privileged program that it executes gets no
/// privileges, and a signal without a handler interrupts the thread's waits.
///
/// All calls must come from the thread that seized. The hold ends with that thread; dropping it
/// earlier leaves stops unanswered.
#[derive(Debug)]
pub struct Hold {
    process: Process,
    thread: Pid,
    stopped: bool,
}

/// Event of a held process.
#[derive(Debug)]
pub enum HoldEvent {
    /// The process continues.
    None,
    /// Group stop by this signal, as without a tracer.
    Stopped(i32),
    /// The process ends, and its memory is being released. The hold is over.
    Ends(Teardown),
    /// The hold is over, for this reason.
    Lost(Reason),
}

impl Hold {
    /// Minimum anonymous memory: the kernel frees less before a thread here has started.
    pub const MIN_BYTES: Bytes = Bytes(16 << 20);

    /// Seizes the first thread of `process` that has not ended.
    ///
    /// # Errors
    /// [`Reason::Denied`], [`Reason::Traced`]; [`Reason::Late`]: the process has ended.
    pub fn seize(process: &Process) -> Result<Self, Reason> {
        Self::seize_but(process, None)
    }

    fn seize_but(process: &Process, without: Option<Pid>) -> Result<Self, Reason> {
        let mut reason = Reason::Late;
        for thread in process.threads() {
            // A thread past its exit stop is useless, and would have to be waited for.
            if without == Some(thread) || is_ending(process, thread) {
                continue;
            }
            match ptrace::seize(thread, ptrace::PTRACE_O_TRACEEXIT) {
                Ok(()) if process.has(thread) => {
                    return Ok(Self::of(process, thread));
                }
                // The ID was reused, or execve(2) in the thread made it the first.
                Ok(()) => match Self::first(process) {
                    Some(hold) => return Ok(hold),
                    None => abandon(thread),
                },
                Err(Errno::SRCH) => {}
                Err(errno) => match standing(process, thread) {
                    None => {}
                    Some(standing) if standing.is_zombie() => {}
                    Some(standing) if standing.tracer == own() => {
                        return Ok(Self::of(process, thread));
                    }
                    Some(ProcessState { tracer: 0, .. }) => return Err(Reason::Denied(errno)),
                    Some(standing) => reason = Reason::Traced(standing.tracer),
                },
            }
        }
        Err(reason)
    }

    fn of(process: &Process, thread: Pid) -> Self {
        Self {
            process: process.clone(),
            thread,
            stopped: false,
        }
    }

    /// Returns a hold of the first thread, if this thread traces it.
    fn first(process: &Process) -> Option<Self> {
        let first = Pid::from_raw(i32::try_from(process.pid()).ok()?)?;
        let ours = standing(process, first)?.tracer == own();
        ours.then(|| Self::of(process, first))
    }

    fn thread(&self) -> u32 {
        id(self.thread)
    }

    /// Reports whether the process is in a group stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Answers the thread's stops as if it were not traced. The caller calls it upon each SIGCHLD.
    pub fn poll(&mut self) -> HoldEvent {
        loop {
            match ptrace::wait_any(self.thread).map(|status| status.map(Stop::of)) {
                Ok(None) => return HoldEvent::None,
                Ok(Some(Some(stop))) => match self.answer(stop) {
                    HoldEvent::None => {}
                    news => return news,
                },
                // Killed without a stop, or replaced by execve(2) in another thread.
                Ok(Some(None)) | Err(_) => return self.move_on(None),
            }
        }
    }

    fn answer(&mut self, stop: Stop) -> HoldEvent {
        self.stopped = matches!(stop, Stop::Group(_));
        match stop {
            Stop::Exit => self.at_exit(),
            // A failure means that the thread was killed: the next event shows it.
            Stop::Group(signal) => {
                let _ = stop.pass(self.thread);
                HoldEvent::Stopped(signal)
            }
            Stop::Signal(_) | Stop::Trap | Stop::Call => {
                let _ = stop.pass(self.thread);
                HoldEvent::None
            }
        }
    }

    /// Holds another thread than the one that has ended, or than `done`.
    fn move_on(&mut self, done: Option<Pid>) -> HoldEvent {
        let next = match Self::seize_but(&self.process, done) {
            Err(Reason::Late) if done.is_some_and(|done| self.is_replaced(done)) => {
                Self::seize(&self.process)
            }
            next => next,
        };
        match next {
            Ok(hold) => {
                *self = hold;
                HoldEvent::None
            }
            Err(reason) => HoldEvent::Lost(reason),
        }
    }

    /// Reports whether execve(2) in another thread took over the ID of `done`, the first thread,
    /// after its exit: the thread of that ID does not end.
    fn is_replaced(&self, done: Pid) -> bool {
        let started = Instant::now();
        while id(done) == self.process.pid() && !is_ending(&self.process, done) {
            if started.elapsed() > LIVE_THREAD_TIMEOUT {
                return true;
            }
            std::thread::sleep(LIVE_THREAD_TIMEOUT / 20);
        }
        false
    }

    fn at_exit(&mut self) -> HoldEvent {
        if !self.is_last() {
            // Detach before seizing another thread. That thread may be in execve(2), which waits
            // for the end of this one, and the seizure would wait for execve(2).
            let _ = Stop::Exit.detach(self.thread);
            return self.move_on(Some(self.thread));
        }
        let memory = task::memory(self.process.root(), self.thread());
        let memory = memory.ok().flatten().unwrap_or_default();
        let standing = standing(&self.process, self.thread).unwrap_or_default();
        let checked = if memory.anon < Self::MIN_BYTES {
            Err(Reason::Small)
        } else if standing.is_dumping {
            // Before 5.16 this stop comes before the core dump, which the hold would block.
            Err(Reason::Dumping)
        } else {
            locks::check(&self.process, self.thread)
        };
        HoldEvent::Ends(Teardown::begin(&self.process, self.thread, memory, checked))
    }

    /// Waits until all other threads have ended. Returns false where only this thread ends, or
    /// where the others take too long.
    fn is_last(&self) -> bool {
        let started = Instant::now();
        while !self.is_alone() {
            let waited = started.elapsed();
            if waited > LIVE_THREAD_TIMEOUT {
                let threads = self.process.threads();
                let mut others = threads.iter().filter(|thread| **thread != self.thread);
                if waited > ENDING_THREAD_TIMEOUT
                    || others.any(|thread| !is_condemned(&self.process, *thread))
                {
                    return false;
                }
            }
            let interval = (waited / 8).clamp(Duration::from_micros(20), LIVE_THREAD_TIMEOUT / 4);
            std::thread::sleep(interval);
        }
        true
    }

    fn is_alone(&self) -> bool {
        let Ok(standing) = ProcessState::read(self.process.root(), self.process.pid()) else {
            return true;
        };
        // The first thread remains as a zombie until all have ended.
        let dead = u32::from(standing.is_zombie() && self.thread() != self.process.pid());
        standing.threads <= 1 + dead
    }
}

fn standing(process: &Process, thread: Pid) -> Option<ProcessState> {
    ProcessState::read(process.root(), id(thread)).ok()
}

/// Reports whether `thread` is past its exit stop.
fn is_ending(process: &Process, thread: Pid) -> bool {
    task::is_exiting(process.root(), id(thread)).unwrap_or(true)
}

/// Reports whether `thread` is ending, or has a pending SIGKILL.
fn is_condemned(process: &Process, thread: Pid) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    standing(process, thread).is_none_or(|standing| standing.pending & KILL != 0)
        || is_ending(process, thread)
}

fn own() -> u32 {
    id(rustix::thread::gettid())
}

/// Detaches from a thread of another process. PTRACE_DETACH needs it stopped.
fn abandon(thread: Pid) {
    let _ = ptrace::interrupt(thread);
    for _ in 0..1000 {
        match ptrace::wait_any(thread).map(|status| status.map(Stop::of)) {
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Ok(Some(Some(stop))) => {
                let _ = stop.detach(thread);
                return;
            }
            Ok(Some(None)) | Err(_) => return,
        }
    }
}
