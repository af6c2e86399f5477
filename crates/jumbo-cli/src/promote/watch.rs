//! Signals and progress: [`Watch`].

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use jumbo_host::kernel::process::Signals;
use jumbo_host::promote::{Progress, Target, Watcher};
use jumbo_host::teardown::Process;
use rustix::event::{PollFd, PollFlags};

use crate::bench::bar;
use crate::signal::{next_termination, poll};
use crate::view;

/// The time between two looks for a process that is left, between two rounds.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Every signal of this process, read instead of delivered, so that no thread of another process is left
/// in a call of ours; and a bar on stderr, on a terminal.
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

    /// The next process.
    pub(super) fn begin(&mut self, target: &Target) {
        self.bar.finish_and_clear();
        self.bar = bar();
        self.name = format!("MiB, {} {}", target.pid(), view::clean(target.name()));
    }

    /// The signal that next_termination for an end.
    pub(super) fn ended_by(&self) -> Option<i32> {
        self.ended_by
    }

    /// Has signals delivered again; gives the one that next_termination for an end.
    pub(super) fn finish(self) -> Option<i32> {
        self.bar.finish_and_clear();
        self.signals.release();
        self.ended_by
    }

    /// Waits so long, for a signal that asks for an end, or until there is nothing left to wait for.
    pub(super) fn rest(&mut self, time: Duration, is_any_left: impl Fn() -> bool) {
        let started = Instant::now();
        self.bar.finish_and_clear();
        while started.elapsed() < time && is_any_left() {
            let left = time.saturating_sub(started.elapsed()).min(POLL_INTERVAL);
            let mut ready = [PollFd::from_borrowed_fd(
                self.signals.as_fd(),
                PollFlags::IN,
            )];
            let _ = poll(&mut ready, Some(left));
            if self.is_asked() {
                return;
            }
        }
    }

    /// Waits so long, for a signal that asks for an end, or for the end of a process.
    pub(super) fn wait_for(&mut self, process: &Process, time: Duration) {
        let mut ready = [
            PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut ready, Some(time));
        self.is_asked();
    }

    fn is_asked(&mut self) -> bool {
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
        match self.is_asked() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
