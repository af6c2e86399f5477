//! Work of the thread: [`Job`].

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use core::time::Duration;

use super::{Stop, program};
use crate::sync::now;
use jumbo_sys as sys;

#[derive(Debug)]
pub(crate) struct Job {
    /// Index among the jobs.
    pub(super) index: usize,
    /// Scans; returns the time until the next scan, or `None` when done.
    scan: fn(&Stop) -> Option<Duration>,
    /// Receives the reason why no thread runs the job.
    pub(super) without: fn(Without),
    /// Process of the job; 0: none.
    pub(super) process: AtomicI32,
    /// Time of the next scan: [`now`] in nanoseconds, or [`NEVER`].
    due: AtomicU64,
    /// The job opens files that it finds late.
    pub(super) opens_files: bool,
    /// Waits for a process that may open files.
    pub(super) is_deferred: AtomicBool,
}

/// Time of a job while it runs.
const NEVER: u64 = u64::MAX;

/// Reason why there is no thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    Filter,
    /// No memory or no task available.
    Room,
    /// Kernel without a needed facility.
    Kernel,
    /// The thread had to end.
    Ended,
}

impl Job {
    pub(crate) const fn new(
        index: usize,
        scan: fn(&Stop) -> Option<Duration>,
        without: fn(Without),
    ) -> Self {
        Self {
            index,
            scan,
            without,
            process: AtomicI32::new(0),
            due: AtomicU64::new(0),
            opens_files: false,
            is_deferred: AtomicBool::new(false),
        }
    }

    /// The same job, which opens files that it finds late: see [`Job::is_deferred`].
    pub(crate) const fn opening_files(mut self) -> Self {
        self.opens_files = true;
        self
    }

    /// Reports whether the caller, which runs the job, may open no file. Then a process that the
    /// program makes soon runs the job first.
    pub(crate) fn is_deferred(&self) -> bool {
        let is_shut = sys::is_shut();
        self.is_deferred.fetch_or(is_shut, Ordering::Relaxed);
        is_shut
    }

    /// Runs the job if it is due; returns the time until the next run.
    pub(super) fn run(&self, stop: &Stop) -> Option<Duration> {
        if self.process.load(Ordering::Relaxed) != program() {
            return None;
        }
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        let left = due.saturating_sub(now());
        if !left.is_zero() {
            return Some(left);
        }
        // A concurrent `begin` from here on makes it due.
        self.due.store(NEVER, Ordering::SeqCst);
        if let Some(wait) = (self.scan)(stop) {
            self.hasten(wait);
        } else {
            self.process.store(0, Ordering::SeqCst);
            if self.due.load(Ordering::SeqCst) == NEVER {
                return None;
            }
            self.process.store(program(), Ordering::SeqCst);
        }
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        Some(due.saturating_sub(now()))
    }

    pub(super) fn set_due(&self, wait: Duration) {
        let due = now().saturating_add(wait).as_nanos();
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        self.due.store(due, Ordering::SeqCst);
    }

    /// Makes the job due after `wait` at the latest; true if that is sooner than before.
    pub(super) fn hasten(&self, wait: Duration) -> bool {
        let is_new = self.process.load(Ordering::Relaxed) != program();
        let due = Duration::from_nanos(self.due.load(Ordering::Relaxed));
        let is_sooner = is_new || now().saturating_add(wait) < due;
        if is_sooner {
            self.set_due(wait);
        }
        self.process.store(program(), Ordering::SeqCst);
        is_sooner
    }
}
