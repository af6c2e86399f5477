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
use crate::signal::{end_by, next_termination};

/// Reader of this process's signals, and a progress bar on stderr. Signals are read instead of
/// delivered, so that none leaves a change unfinished.
pub(crate) struct Terminal {
    root: Root,
    signals: Signals,
    bar: Option<ProgressBar>,
    /// htlb_buddy_alloc_success before the step.
    allocated: u64,
    /// Signal that requested termination.
    ended_by: Option<i32>,
}

impl Terminal {
    pub(crate) fn new(root: &Root) -> io::Result<Self> {
        Ok(Self {
            root: root.clone(),
            signals: Signals::take()?,
            bar: None,
            allocated: allocated(root),
            ended_by: None,
        })
    }

    /// Terminates by the signal that requested it; else returns `otherwise`.
    pub(crate) fn end(self, otherwise: ExitCode) -> ExitCode {
        self.done().map_or(otherwise, end_by)
    }

    /// Lets the kernel deliver signals again. Returns the signal that requested termination.
    pub(crate) fn done(self) -> Option<i32> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.signals.release();
        self.ended_by
    }

    fn show(&mut self, doing: &Activity<'_>) {
        let (length, position, message) = match doing {
            Activity::Nothing => {
                self.allocated = allocated(&self.root);
                return;
            }
            Activity::Compacting => (0, 0, "the kernel compacts memory".to_owned()),
            Activity::Writing(step) => {
                let (all, made) = self.pages(step);
                (all, made.min(all), step.knob.to_string())
            }
        };
        // Created late: a short change needs no bar.
        let bar = self.bar.get_or_insert_with(bar);
        bar.set_length(length);
        bar.set_position(position);
        bar.set_message(message);
    }

    /// Number of pages of a step, and of those that the kernel has allocated. Since Linux 6.7 pages
    /// join the pool only at the end; htlb_buddy_alloc_success (6.1) counts them before.
    fn pages(&self, step: &Step) -> (u64, u64) {
        let (Form::Pages, Some(before), Some(to)) =
            (step.knob.form, step.before.number(), step.to.number())
        else {
            return (0, 0);
        };
        let now = step.knob.read(&self.root).ok();
        let joined = now.and_then(|now| now.number()).unwrap_or(before);
        let allocated = allocated(&self.root).saturating_sub(self.allocated);
        (to.abs_diff(before), allocated.max(joined.abs_diff(before)))
    }
}

fn allocated(root: &Root) -> u64 {
    let events = Events::read(root).ok();
    let count = events.and_then(|events| events.get("htlb_buddy_alloc_success"));
    count.unwrap_or(0)
}

impl Watcher for Terminal {
    fn poll(&mut self, doing: &Activity<'_>) -> ControlFlow<()> {
        self.show(doing);
        let asked = next_termination(&self.signals);
        // The undo that follows polls too.
        self.ended_by = asked.or(self.ended_by);
        match asked {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }
}
