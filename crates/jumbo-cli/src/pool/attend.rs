//! Signals and progress while pools change: [`Terminal`].

use std::io;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use jumbo::kernel::process::{Signals, die_by};
use jumbo::pool::host::carry::{Attendant, Doing};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Every signal of this process, read instead of delivered, so that a change is never left where it
/// stands; and a bar on stderr, on a terminal.
pub(super) struct Terminal {
    signals: Signals,
    bar: Option<ProgressBar>,
    /// The signal that asked for an end.
    ended_by: Option<i32>,
}

impl Terminal {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            signals: Signals::take()?,
            bar: None,
            ended_by: None,
        })
    }

    /// Waits, at most so long; true where a signal asked for an end.
    pub(super) fn pause(&mut self, at_most: Duration) -> io::Result<bool> {
        let until = Instant::now() + at_most;
        loop {
            if let Some(signal) = self.asked() {
                self.ended_by = Some(signal);
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(
                &mut [PollFd::new(&self.signals, PollFlags::IN)],
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Ends as the signal would have ended us that asked for it, so that a shell sees a script
    /// interrupted; `otherwise` where none did.
    pub(super) fn end(self, otherwise: ExitCode) -> ExitCode {
        let Some(signal) = self.ended_by else {
            self.done();
            return otherwise;
        };
        self.done();
        die_by(signal);
        ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
    }

    /// Has signals delivered again.
    pub(super) fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.signals.release();
    }

    /// The next signal that would end us.
    fn asked(&self) -> Option<i32> {
        while let Ok(Some(signal)) = self.signals.next() {
            match signal.number {
                libc::SIGCHLD | libc::SIGCONT | libc::SIGWINCH | libc::SIGURG | libc::SIGPIPE => {}
                libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => {
                    self.signals.stop_by(signal.number)
                }
                number => return Some(number),
            }
        }
        None
    }

    fn show(&mut self, doing: &Doing) {
        let (length, position, message) = match doing {
            Doing::Nothing => return,
            Doing::Compacting => (0, 0, "the kernel moves memory together".to_owned()),
            Doing::Writing(step, made) => {
                let all = step.to.0.abs_diff(step.before.0);
                (all, made.0.min(all), step.knob.to_string())
            }
        };
        // Only now: what takes less than a tick is over before it could be read.
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) =
                ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg} {elapsed}")
            {
                bar.set_style(style);
            }
            bar
        });
        bar.set_length(length);
        bar.set_position(position);
        bar.set_message(message);
    }
}

impl Attendant for Terminal {
    fn attend(&mut self, doing: &Doing) -> ControlFlow<()> {
        self.show(doing);
        match self.asked() {
            Some(signal) => {
                self.ended_by = Some(signal);
                ControlFlow::Break(())
            }
            None => ControlFlow::Continue(()),
        }
    }
}
