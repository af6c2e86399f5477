//! [`Hold`]: a thread of a process, seized so that the process stops before it gives up its memory.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;

use super::process::id;
use super::{Process, Reason, Teardown, locks};
use crate::kernel::process::{Standing, Stop};
use crate::kernel::sys::ptrace;
use crate::kernel::task;
use crate::units::Bytes;

/// How long the thread that is held waits at its end for others that do not seem to end.
const PATIENCE: Duration = Duration::from_millis(20);
/// And for others that are about to.
const LIMIT: Duration = Duration::from_secs(2);

/// One traced thread of a process. Nothing of the process changes by it but what ptrace(2) brings about:
/// `TracerPid` is set, no other process can trace it, a privileged program that it executes gets no
/// privileges, and a signal without a handler interrupts what the thread waits in.
///
/// All calls are to be made from the thread that seized. The hold ends when that ends; dropping it early
/// leaves stops unanswered.
#[derive(Debug)]
pub struct Hold {
    process: Process,
    thread: Pid,
    stopped: bool,
}

/// What came of a held process.
#[derive(Debug)]
pub enum HoldEvent {
    /// It goes on, whatever it was.
    None,
    /// It was stopped by this signal, as it would be without us.
    Stopped(i32),
    /// It ends: its memory is being given back. The hold is over.
    Ends(Teardown),
    /// The hold is over, and why.
    Lost(Reason),
}

impl Hold {
    /// Memory below this is gone sooner than a thread of ours has begun.
    pub const MIN_BYTES: Bytes = Bytes(16 << 20);

    /// Seizes a thread of `process`: the first, or where that has ended the next.
    ///
    /// # Errors
    /// [`Reason::Denied`], [`Reason::Traced`]; [`Reason::Late`]: it has ended.
    pub fn seize(process: &Process) -> Result<Self, Reason> {
        Self::seize_but(process, None)
    }

    fn seize_but(process: &Process, without: Option<Pid>) -> Result<Self, Reason> {
        let mut reason = Reason::Late;
        for thread in process.threads() {
            // Beyond its stop a thread is of no use, and would have to be waited for.
            if without == Some(thread) || is_ending(process, thread) {
                continue;
            }
            match ptrace::seize(thread) {
                Ok(()) if process.has(thread) => {
                    return Ok(Self::of(process, thread));
                }
                // Its ID was another's by the time it was seized, or execve(2) in it made it the first.
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
                    Some(Standing { tracer: 0, .. }) => return Err(Reason::Denied(errno)),
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

    /// The hold of the first thread, if that is ours.
    fn first(process: &Process) -> Option<Self> {
        let first = Pid::from_raw(i32::try_from(process.pid()).ok()?)?;
        let ours = standing(process, first)?.tracer == own();
        ours.then(|| Self::of(process, first))
    }

    /// The ID of the thread that is held.
    fn thread(&self) -> u32 {
        id(self.thread)
    }

    /// True while the process is in a group stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Answers the thread's stops as if it were not traced. To be called upon each SIGCHLD.
    pub fn poll(&mut self) -> HoldEvent {
        loop {
            match ptrace::wait_any(self.thread).map(|status| status.map(Stop::of)) {
                Ok(None) => return HoldEvent::None,
                Ok(Some(Some(stop))) => match self.answer(stop) {
                    HoldEvent::None => {}
                    news => return news,
                },
                // It was killed without a stop, or execve(2) in another thread took its place.
                Ok(Some(None)) | Err(_) => return self.move_on(None),
            }
        }
    }

    /// Answers a stop of the thread.
    fn answer(&mut self, stop: Stop) -> HoldEvent {
        self.stopped = matches!(stop, Stop::Group(_));
        match stop {
            Stop::Exit => self.at_exit(),
            // Where it fails the thread was killed meanwhile, and the next news tells.
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

    /// Holds another thread than the one that is gone, or than `done`.
    fn move_on(&mut self, done: Option<Pid>) -> HoldEvent {
        let next = match Self::seize_but(&self.process, done) {
            Err(Reason::Late) if done.is_some_and(|done| self.is_another_by_now(done)) => {
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

    /// True where a thread that executed a program took the place and the ID of `done`, the first thread, which
    /// was let go at its end: the process lives, and the thread of that ID does not come to an end.
    fn is_another_by_now(&self, done: Pid) -> bool {
        let started = Instant::now();
        while id(done) == self.process.pid() && !is_ending(&self.process, done) {
            if started.elapsed() > PATIENCE {
                return true;
            }
            std::thread::sleep(PATIENCE / 20);
        }
        false
    }

    fn at_exit(&mut self) -> HoldEvent {
        if !self.is_last() {
            // First of all: where another thread is in execve(2), that waits for the end of this one, and a process that
            // seizes it waits for execve(2).
            let _ = Stop::Exit.detach(self.thread);
            return self.move_on(Some(self.thread));
        }
        let memory = task::memory(self.process.root(), self.thread());
        let memory = memory.ok().flatten().unwrap_or_default();
        let standing = standing(&self.process, self.thread).unwrap_or_default();
        let checked = if memory.anon < Self::MIN_BYTES {
            Err(Reason::Small)
        } else if standing.is_dumping {
            // Before 5.16 this stop comes before the core, which needs us out of its way.
            Err(Reason::Dumping)
        } else {
            locks::check(&self.process, self.thread)
        };
        HoldEvent::Ends(Teardown::begin(&self.process, self.thread, memory, checked))
    }

    /// Waits until all other threads have ended; false where they live on, so that it is not the process
    /// that ends but one thread of it, or where they take too long.
    fn is_last(&self) -> bool {
        let started = Instant::now();
        while !self.is_alone() {
            let waited = started.elapsed();
            if waited > PATIENCE {
                let threads = self.process.threads();
                let mut others = threads.iter().filter(|thread| **thread != self.thread);
                if waited > LIMIT || others.any(|thread| !is_condemned(&self.process, *thread)) {
                    return false;
                }
            }
            std::thread::sleep((waited / 8).clamp(Duration::from_micros(20), PATIENCE / 4));
        }
        true
    }

    fn is_alone(&self) -> bool {
        let Ok(standing) = Standing::read(self.process.root(), self.process.pid()) else {
            return true;
        };
        // The first thread stays as a zombie until all have ended.
        let dead = u32::from(standing.is_zombie() && self.thread() != self.process.pid());
        standing.threads <= 1 + dead
    }
}

fn standing(process: &Process, thread: Pid) -> Option<Standing> {
    Standing::read(process.root(), id(thread)).ok()
}

/// True where `thread` is beyond the point at which it would stop for us.
fn is_ending(process: &Process, thread: Pid) -> bool {
    task::is_exiting(process.root(), id(thread)).unwrap_or(true)
}

/// True where `thread` ends, or is to be killed as soon as it runs.
fn is_condemned(process: &Process, thread: Pid) -> bool {
    const KILL: u64 = 1 << (libc::SIGKILL - 1);
    standing(process, thread).is_none_or(|standing| standing.pending & KILL != 0)
        || is_ending(process, thread)
}

fn own() -> u32 {
    id(rustix::thread::gettid())
}

/// Lets go of a thread that is none of the process's. It runs, so it has to be stopped for that.
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
