//! Signals and progress while knobs change: [`Terminal`].

use std::io;
use std::ops::ControlFlow;
use std::process::ExitCode;

use indicatif::ProgressBar;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::Events;
use jumbo_host::kernel::process::Signals;
use jumbo_host::knobs::{Activity, Form, Step, Watcher};

use crate::bench::bar;
use crate::signal::{asked, end_by};

/// Every signal of this process, read instead of delivered, so that a change is never left where it
/// stands; and a bar on stderr, on a terminal.
pub(crate) struct Terminal {
    root: Root,
    signals: Signals,
    bar: Option<ProgressBar>,
    /// The pages that the page allocator had given to pools before the step.
    given: u64,
    /// The signal that asked for an end.
    ended_by: Option<i32>,
}

impl Terminal {
    pub(crate) fn new(root: &Root) -> io::Result<Self> {
        Ok(Self {
            root: root.clone(),
            signals: Signals::take()?,
            bar: None,
            given: given(root),
            ended_by: None,
        })
    }

    /// Ends as the signal would have ended us that asked for it; `otherwise` where none did.
    pub(crate) fn end(self, otherwise: ExitCode) -> ExitCode {
        let signal = self.ended_by;
        self.done();
        signal.map_or(otherwise, end_by)
    }

    /// Has signals delivered again.
    pub(crate) fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.signals.release();
    }

    fn show(&mut self, doing: &Activity<'_>) {
        let (length, position, message) = match doing {
            Activity::Nothing => {
                self.given = given(&self.root);
                return;
            }
            Activity::Compacting => (0, 0, "the kernel moves memory together".to_owned()),
            Activity::Writing(step) => {
                let (all, made) = self.pages(step);
                (all, made.min(all), step.knob.to_string())
            }
        };
        // Only now: what takes less than a tick is over before it could be read.
        let bar = self.bar.get_or_insert_with(bar);
        bar.set_length(length);
        bar.set_position(position);
        bar.set_message(message);
    }

    /// How many pages a step is about, and how many of them the kernel has made. Since Linux 6.7
    /// they join the pool all at once at the end, so the pool does not tell; what the page
    /// allocator gave (6.1) does.
    fn pages(&self, step: &Step) -> (u64, u64) {
        let (Form::Pages, Some(before), Some(to)) =
            (step.knob.form, step.before.number(), step.to.number())
        else {
            return (0, 0);
        };
        let now = step.knob.read(&self.root).ok();
        let joined = now.and_then(|now| now.number()).unwrap_or(before);
        let given = given(&self.root).saturating_sub(self.given);
        (to.abs_diff(before), given.max(joined.abs_diff(before)))
    }
}

fn given(root: &Root) -> u64 {
    let events = Events::read(root).ok();
    let given = events.and_then(|events| events.get("htlb_buddy_alloc_success"));
    given.unwrap_or(0)
}

impl Watcher for Terminal {
    fn poll(&mut self, doing: &Activity<'_>) -> ControlFlow<()> {
        self.show(doing);
        self.ended_by = asked(&self.signals);
        match self.ended_by {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }
}
