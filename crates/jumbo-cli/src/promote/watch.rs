//! Signals and progress: [`Watch`].

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use jumbo_host::kernel::process::Process;
use jumbo_host::kernel::process::Signals;
use jumbo_host::promote::{Progress, Target, Watcher};
use rustix::event::{PollFd, PollFlags};

use crate::bench::bar;
use crate::signal::{next_termination, poll};
use crate::view;

/// Interval of checks, between two rounds, whether a process is left.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Reader of this process's signals, and a progress bar on stderr. Signals are read instead of
/// delivered, so that none ends jumbo while a thread of another process makes its call.
pub(super) struct Watch {
    signals: Signals,
    bar: ProgressBar,
    name: String,
    ended_by: Option<i32>,
}

impl Watch {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            signals: Signals::take()?,
            bar: bar(),
            name: String::new(),
            ended_by: None,
        })
    }

    pub(super) fn begin(&mut self, target: &Target) {
        self.bar.finish_and_clear();
        self.bar = bar();
        self.name = format!("MiB, {} {}", target.pid(), view::clean(target.name()));
    }

    /// Signal that requested termination.
    pub(super) fn ended_by(&self) -> Option<i32> {
        self.ended_by
    }

    /// Lets the kernel deliver signals again; returns the one that requested termination.
    pub(super) fn finish(self) -> Option<i32> {
        self.bar.finish_and_clear();
        self.signals.release();
        self.ended_by
    }

    /// Waits for `time`, for a termination signal, or until no process is left.
    pub(super) fn rest(&mut self, time: Duration, any_left: impl Fn() -> bool) {
        let started = Instant::now();
        self.bar.finish_and_clear();
        while started.elapsed() < time && any_left() {
            let left = time.saturating_sub(started.elapsed()).min(POLL_INTERVAL);
            let mut ready = [PollFd::from_borrowed_fd(
                self.signals.as_fd(),
                PollFlags::IN,
            )];
            let _ = poll(&mut ready, Some(left));
            if self.check_signals() {
                return;
            }
        }
    }

    /// Waits for `time`, for a termination signal, or for the end of a process.
    pub(super) fn wait_for(&mut self, process: &Process, time: Duration) {
        let mut ready = [
            PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut ready, Some(time));
        self.check_signals();
    }

    /// Reads pending signals; returns whether one requested termination.
    fn check_signals(&mut self) -> bool {
        self.ended_by = self.ended_by.or(next_termination(&self.signals));
        self.ended_by.is_some()
    }
}

impl Watcher for Watch {
    fn poll(&mut self, progress: &Progress) -> ControlFlow<()> {
        self.bar.set_length(progress.of.0 >> 20);
        self.bar.set_position(progress.done.0 >> 20);
        let pause = progress.pause.map(|pause| format!(", waits: {pause}"));
        self.bar
            .set_message(format!("{}{}", self.name, pause.unwrap_or_default()));
        match self.check_signals() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
