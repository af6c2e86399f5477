//! Writes a plan, and restores the values before it: [`apply()`], [`undo()`].
//!
//! Each knob is written once for all pages: a resize has a fixed cost (a grace period of RCU with
//! HVO). Each write is read back, because the kernel reports success for partial growth.
//!
//! A write runs in a thread of its own, so that it can be interrupted. A write that is interrupted
//! or fails is undone from its record at once. Where that fails (freed memory is in use elsewhere)
//! the record stays, for another try.

use std::ops::ControlFlow;
use std::time::Duration;

use serde::Serialize;

use super::journal::{JournalError, Locked, Record};
use super::knob::{Knob, Value};
use super::plan::{Plan, Saved, Step};
use crate::kernel::process::Interruptible;
use crate::kernel::{FileError, Root};

/// Interval between calls of the watcher while the kernel works.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Observer of a change, which can end it.
pub trait Watcher {
    /// Called between steps, and every 50 ms while the kernel works. `Break` requests an end. It is
    /// returned once per request, so that it does not interrupt the undo too.
    fn poll(&mut self, activity: &Activity<'_>) -> ControlFlow<()>;
}

/// Current activity of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity<'a> {
    /// Between two steps.
    Nothing,
    /// The kernel compacts memory.
    Compacting,
    /// A knob is written.
    Writing(&'a Step),
}

/// Shows nothing, and never requests an end.
impl Watcher for () {
    fn poll(&mut self, _: &Activity<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Result of [`apply()`].
#[derive(Clone, Debug, Serialize)]
pub struct Applied {
    /// The steps with the values read back.
    pub steps: Vec<Step>,
    /// The undo that followed the watcher's request for an end; `None` where all was written.
    pub put_back: Option<Undone>,
    /// Failures of optional parts.
    pub notes: Vec<String>,
}

/// Result of an undo.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Undone {
    /// The writes; knobs that had their value already are left out.
    pub steps: Vec<Step>,
    /// Everything is restored, and the record removed.
    pub complete: bool,
}

/// Errors of planning, applying and undoing.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// A knob is unusable; nothing was changed.
    #[error(transparent)]
    Refused(#[from] FileError),
    /// A knob or the record failed midway.
    #[error("{error}; {outcome}")]
    Failed {
        /// The failure.
        error: Box<ApplyError>,
        /// Outcome of undoing the earlier steps, in words.
        outcome: String,
        /// Everything is restored.
        put_back: bool,
    },
    /// A word that the knob does not take: there is no plan.
    #[error("{knob} does not take `{word}`: it takes {}", words.join(", "))]
    Word {
        /// The knob.
        knob: Knob,
        /// The word.
        word: String,
        /// The allowed words, as the kernel lists them.
        words: Vec<String>,
    },
    /// The record could not be written, or removed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The plan has no step.
    #[error("there is nothing to do")]
    Nothing,
    /// A knob has changed since the plan was made; nothing was written.
    #[error("{knob}: {now} now, where the plan was made from {planned}: it changes meanwhile")]
    Moved {
        /// The knob.
        knob: Knob,
        /// The value when the plan was made.
        planned: Value,
        /// The current value.
        now: Value,
    },
    /// A value has changed since it was written.
    #[error("{what}: {now} now, where the change left {left}: it was set by others since")]
    Changed {
        /// The knob, in words.
        what: String,
        /// The value that was written.
        left: String,
        /// The current value.
        now: String,
    },
}

/// Records and writes `plan`. With `compact`, compacts memory before it grows a pool.
///
/// # Errors
/// [`ApplyError`]. Then everything is restored, or the record remains.
pub fn apply(
    root: &Root,
    locked: &Locked,
    plan: &Plan,
    command: &str,
    compact: bool,
    watcher: &mut dyn Watcher,
) -> Result<Applied, ApplyError> {
    if plan.is_empty() {
        return Err(ApplyError::Nothing);
    }
    plan.writable(root)?;
    check_current(root, plan)?;
    let mut record = Record::of(plan, command);
    locked.add(&record)?;
    let mut work = Work::new(root, locked, compact, watcher);
    let mut done = work.all(&mut record).map_err(ApplyError::from);
    let mut put_back = None;
    if done.is_ok() && work.stop {
        put_back = Some(work.put_back(&record)?);
    } else if done.is_ok() {
        let now = |Saved { knob, .. }: &Saved| {
            let (knob, value) = (knob.clone(), knob.read(root).ok()?);
            Some(Saved { knob, value })
        };
        record.left = record.saved.iter().filter_map(now).collect();
        done = locked.finish(&mut record).map_err(ApplyError::from);
    }
    if let Err(error) = done {
        return Err(work.give_up(&record, error));
    }
    Ok(Applied {
        steps: record.steps,
        put_back,
        notes: work.notes,
    })
}

impl ApplyError {
    /// Adds the outcome of undoing the earlier steps: whether all is restored, and a description.
    fn and(self, put_back: bool, outcome: impl Into<String>) -> Self {
        Self::Failed {
            error: Box::new(self),
            outcome: outcome.into(),
            put_back,
        }
    }

    /// Reports whether some change may remain.
    pub fn leaves_changes(&self) -> bool {
        matches!(self, Self::Failed { put_back, .. } if !put_back)
    }
}

/// Checks that the values that `plan` was made from are current and stable: the record must have
/// the real values before the change.
///
/// # Errors
/// [`ApplyError::Moved`]; [`ApplyError::Refused`] where a knob cannot be read.
pub(super) fn check_current(root: &Root, plan: &Plan) -> Result<(), ApplyError> {
    // Only the first write of a knob has its current value.
    let is_first = |(at, step): &(usize, &Step)| {
        let mut earlier = plan.steps.iter().take(*at);
        earlier.all(|earlier| earlier.knob != step.knob)
    };
    let steps = plan.steps.iter().enumerate().filter(is_first);
    let steps = steps.map(|(_, step)| (&step.knob, &step.before));
    let saved = plan.saved.iter().map(|saved| (&saved.knob, &saved.value));
    for (knob, planned) in steps.chain(saved) {
        let (now, is_stable) = knob.read_stable(root)?;
        if now != *planned || !is_stable {
            let (knob, planned) = (knob.clone(), planned.clone());
            return Err(ApplyError::Moved { knob, planned, now });
        }
    }
    Ok(())
}

/// Restores the values of `record`, and removes it. An unfinished change is undone from any state,
/// a finished one only while its values are unchanged, unless `force`.
///
/// # Errors
/// [`ApplyError`]; the record stays.
pub fn undo(
    root: &Root,
    locked: &Locked,
    record: &Record,
    compact: bool,
    force: bool,
    watcher: &mut dyn Watcher,
) -> Result<Undone, ApplyError> {
    if !force {
        check_unchanged(root, record)?;
    }
    for step in undo_steps(root, record)? {
        step.knob.writable(root)?;
    }
    if record.finished {
        // The undo may be interrupted too, and leave any values.
        locked.reopen()?;
    }
    Work::new(root, locked, compact, watcher).put_back(record)
}

/// Returns the writes that restore the values of `record`; those that free memory come first.
///
/// # Errors
/// [`FileError`] where a knob cannot be read.
pub fn undo_steps(root: &Root, record: &Record) -> Result<Vec<Step>, FileError> {
    let mut steps = Vec::new();
    for Saved { knob, value } in &record.saved {
        let now = knob.read(root)?;
        if now != *value {
            steps.push(Step::new(knob.clone(), now, value.clone()));
        }
    }
    steps.sort_by_key(Step::turn);
    Ok(steps)
}

/// Checks that the values of a finished change are unchanged.
///
/// # Errors
/// [`ApplyError::Changed`]; [`ApplyError::Refused`] where a knob cannot be read.
pub fn check_unchanged(root: &Root, record: &Record) -> Result<(), ApplyError> {
    if !record.finished {
        return Ok(());
    }
    // Only the last write of a knob is still in effect.
    let is_last = |(at, step): &(usize, &Step)| {
        let mut later = record.steps.iter().skip(at + 1);
        later.all(|later| later.knob != step.knob)
    };
    let steps = record.steps.iter().enumerate().filter(is_last);
    let steps = steps.map(|(_, step)| (&step.knob, step.after.as_ref().unwrap_or(&step.to)));
    let others = record.left.iter().map(|left| (&left.knob, &left.value));
    for (knob, left) in steps.chain(others) {
        let now = knob.read(root)?;
        if now != *left {
            return Err(ApplyError::Changed {
                what: knob.to_string(),
                left: left.to_string(),
                now: now.to_string(),
            });
        }
    }
    Ok(())
}

/// Writer with a watcher.
pub(super) struct Work<'a> {
    root: &'a Root,
    locked: &'a Locked,
    /// Compact memory before a pool grows.
    compact: bool,
    watcher: &'a mut dyn Watcher,
    /// The watcher requested an end.
    stop: bool,
    notes: Vec<String>,
}

impl<'a> Work<'a> {
    pub(super) fn new(
        root: &'a Root,
        locked: &'a Locked,
        compact: bool,
        watcher: &'a mut dyn Watcher,
    ) -> Self {
        Self {
            root,
            locked,
            compact,
            watcher,
            stop: false,
            notes: Vec::new(),
        }
    }

    fn all(&mut self, record: &mut Record) -> Result<(), FileError> {
        for step in &mut record.steps {
            if self.asked_to_stop(&Activity::Nothing) {
                return Ok(());
            }
            self.step(step)?;
        }
        self.asked_to_stop(&Activity::Nothing);
        Ok(())
    }

    pub(super) fn put_back(&mut self, record: &Record) -> Result<Undone, ApplyError> {
        self.try_put_back(record).map_err(|error| match error {
            // The record is removed last.
            ApplyError::Journal(_) => {
                error.and(true, "everything was put back, and the record of it stands")
            }
            _ => error.and(
                false,
                "not everything was put back, and `--undo` tries again",
            ),
        })
    }

    fn try_put_back(&mut self, record: &Record) -> Result<Undone, ApplyError> {
        self.stop = false;
        let mut undone = Undone::default();
        for mut step in undo_steps(self.root, record)? {
            if !self.stop {
                self.step(&mut step)?;
            }
            undone.steps.push(step);
        }
        let is_back = |step: &Step| step.after.as_ref() == Some(&step.to);
        undone.complete = undone.steps.iter().all(is_back);
        if undone.complete {
            self.locked.forget_last()?;
        }
        Ok(undone)
    }

    /// Undoes the steps before `error`, and adds the outcome.
    fn give_up(&mut self, record: &Record, error: ApplyError) -> ApplyError {
        const PART: &str =
            "what was done before it could not all be put back, and `--undo` tries again";
        match self.put_back(record) {
            Ok(undone) if undone.complete => error.and(true, "everything was put back"),
            Ok(_) => error.and(false, PART),
            Err(second) => error.and(!second.leaves_changes(), second.to_string()),
        }
    }

    /// Writes one knob, and reads it back.
    pub(super) fn step(&mut self, step: &mut Step) -> Result<(), FileError> {
        if self.compact && step.grows() {
            self.compact(step);
        }
        if !self.stop {
            let (root, file) = (self.root.clone(), step.knob.file.clone());
            let to = step.text();
            self.run(move || root.write(file, &to), &Activity::Writing(step))?;
            step.after = Some(step.knob.read(self.root)?);
        }
        Ok(())
    }

    /// Compacts memory for a pool. A failure is only noted.
    fn compact(&mut self, step: &Step) {
        let (root, file) = (self.root.clone(), step.knob.compaction());
        let done = self.run(move || root.write(file, "1"), &Activity::Compacting);
        if let Err(error) = done {
            let note = format!("memory was not compacted: {error}");
            self.notes.push(note);
        }
    }

    /// Runs `work`, a long system call, in a thread that the watcher can interrupt.
    fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
        activity: &Activity<'_>,
    ) -> Result<T, FileError> {
        let process = self.root.path("proc/self");
        let no_thread = |source| FileError::io("start a thread in", &process)(source);
        let mut work = Interruptible::start(work).map_err(no_thread)?;
        loop {
            work = match work.wait(POLL_INTERVAL) {
                Ok(Some(result)) => return result,
                Ok(None) => return Err(no_thread(std::io::ErrorKind::Other.into())),
                Err(work) => work,
            };
            self.asked_to_stop(activity);
            if self.stop {
                work.interrupt();
            }
        }
    }

    fn asked_to_stop(&mut self, activity: &Activity<'_>) -> bool {
        self.stop |= self.watcher.poll(activity).is_break();
        self.stop
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    fn apply_to(
        fake: &Fake,
        plan: &Plan,
        watcher: &mut dyn Watcher,
    ) -> Result<Applied, ApplyError> {
        apply(&fake.root, &fake.locked, plan, "test", false, watcher)
    }

    /// Calls a function at each poll.
    struct Then<F>(F);

    impl<F: FnMut()> Watcher for Then<F> {
        fn poll(&mut self, _: &Activity<'_>) -> ControlFlow<()> {
            (self.0)();
            ControlFlow::Continue(())
        }
    }

    #[test]
    fn stale_and_empty_plans_are_not_recorded() {
        let fake = Fake::new();
        let apply = |plan: &Plan| apply_to(&fake, plan, &mut ());
        assert!(matches!(apply(&fake.plan(0)), Err(ApplyError::Nothing)));
        let mut torn = fake.plan(5);
        torn.saved[0].value = 3.into();
        let moved = apply(&torn).unwrap_err().to_string();
        assert!(
            moved.contains("0 now, where the plan was made from 3"),
            "{moved}"
        );
        assert!(fake.locked.last().unwrap().is_none());
        assert!(apply(&fake.plan(5)).is_ok() && fake.locked.last().unwrap().is_some());
    }

    #[test]
    fn failed_record_undoes_the_change() {
        let fake = Fake::new();
        let failed = apply_to(&fake, &fake.plan(5), &mut Then(|| fake.fill()));
        let error = failed.unwrap_err();
        assert!(!error.leaves_changes(), "{error}");
        assert!(
            error.to_string().ends_with("; everything was put back"),
            "{error}"
        );
        assert_eq!(fake.pages(), "0");
        assert!(fake.locked.last().unwrap().is_none());
    }

    #[test]
    fn failed_undo_is_reported_and_keeps_the_record() {
        let fake = Fake::new();
        let corrupt = || {
            fake.fill();
            if fake.pages() == "5" {
                fake.set_pages("no number");
            }
        };
        let error = apply_to(&fake, &fake.plan(5), &mut Then(corrupt)).unwrap_err();
        assert!(error.leaves_changes(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("changes.toml: File exists") && text.contains("not everything"),
            "{text}"
        );
        assert!(!fake.locked.last().unwrap().unwrap().finished);
    }
}
