//! Writing what a plan says, and putting it back: [`apply()`], [`undo()`].
//!
//! Each knob is written once, however many pages that means: the kernel does a resize as a whole, and
//! what a resize costs beside its pages (a grace period of RCU with HVO) it costs once. A write is read
//! back, because the kernel answers a pool that grew by half of what was asked with success.
//!
//! A write sits in a thread of its own, so that it can be cut short. What is cut short or fails is put
//! back from its record at once; where that cannot be (memory that was given back is in other hands) the
//! record stays, for another try.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::journal::{JournalError, Locked, Record};
use super::knob::{Knob, Value};
use super::plan::{Plan, Saved, Step};
use crate::kernel::process::Interruptible;
use crate::kernel::{FileError, Root};

/// How often the watcher is asked while the kernel works.
const TICK: Duration = Duration::from_millis(50);

/// Who watches a change: shows how far it is, and says when to stop.
pub trait Watcher {
    /// Asked between the steps, and every 50 ms while the kernel works. `Break` asks for an end: once,
    /// so that putting back is not stopped by the same wish.
    fn poll(&mut self, activity: &Activity<'_>) -> ControlFlow<()>;
}

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity<'a> {
    /// Between two steps.
    Nothing,
    /// The kernel moves memory together.
    Compacting,
    /// A knob is written.
    Writing(&'a Step),
}

/// Nothing is shown, nothing stops.
impl Watcher for () {
    fn poll(&mut self, _: &Activity<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// How a plan went.
#[derive(Clone, Debug, Serialize)]
pub struct Applied {
    /// The steps with what was read back.
    pub steps: Vec<Step>,
    /// What was put back because the watcher asked for an end; `None` where all was written.
    pub put_back: Option<Undone>,
    /// What was tried and did not work, and is no failure.
    pub notes: Vec<String>,
}

/// How putting back went.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Undone {
    /// The writes; values that were as before are not in it.
    pub steps: Vec<Step>,
    /// The files that were put back.
    pub files: Vec<String>,
    /// True where everything is as it was: the record is gone.
    pub complete: bool,
}

/// Why a plan could not be made, applied or undone.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// A knob or file refused; nothing was changed.
    #[error(transparent)]
    Refused(#[from] FileError),
    /// A knob, a file or the record refused on the way.
    #[error("{error}; {outcome}")]
    Failed {
        /// Which, and why.
        error: Box<ApplyError>,
        /// What became of the steps before it.
        outcome: String,
        /// True where everything is as it was.
        put_back: bool,
    },
    /// A word that is not among those that the knob takes: there is no plan.
    #[error("{knob} does not take `{word}`: it takes {}", words.join(", "))]
    Word {
        /// The knob.
        knob: Knob,
        /// The word.
        word: String,
        /// The words it takes, as the kernel lists them.
        words: Vec<String>,
    },
    /// The record could not be written, or removed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The plan has no step and no file: there is nothing to do, and nothing to record.
    #[error("everything is as wished: there is nothing to do")]
    Nothing,
    /// A knob is not what the plan was made from, so what was before is not known; nothing was changed.
    #[error("{knob}: {now} now, where the plan was made from {planned}: it changes meanwhile")]
    Moved {
        /// The knob.
        knob: Knob,
        /// What it was when the plan was made.
        planned: Value,
        /// What it is.
        now: Value,
    },
    /// A value is not what the change left.
    #[error("{what}: {now} now, where the change left {left}: it was set by others since")]
    Changed {
        /// The knob, or file, in words.
        what: String,
        /// What the change left.
        left: String,
        /// What is there.
        now: String,
    },
}

/// Does what `plan` says, with a record of what was before in the journal. With `compact`, memory is
/// moved together before pages are made.
///
/// # Errors
/// [`ApplyError`]. Then everything is as before, or the record says what is not.
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
    stands_on(root, plan)?;
    let mut record = Record::of(plan, command);
    locked.add(&record)?;
    let mut work = Work::new(root, locked, compact, watcher);
    let mut done = work.all(&mut record).map_err(ApplyError::from);
    let mut put_back = None;
    if done.is_ok() && work.stop {
        put_back = Some(work.put_back(&record)?);
    } else if done.is_ok() {
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
    /// This error, and what became of the steps before it: whether all of it was put back, and that in words.
    fn and(self, put_back: bool, outcome: impl Into<String>) -> Self {
        Self::Failed {
            error: Box::new(self),
            outcome: outcome.into(),
            put_back,
        }
    }

    /// True where something may have been left changed.
    pub fn leaves_changes(&self) -> bool {
        matches!(self, Self::Failed { put_back, .. } if !put_back)
    }
}

/// Whether `plan` was made from what is: a record must say what really was before. A knob may have changed since, or
/// was read while it did; what does not rest is not the value either.
///
/// # Errors
/// [`ApplyError::Moved`]; [`ApplyError::Refused`] where a knob cannot be read.
pub(super) fn stands_on(root: &Root, plan: &Plan) -> Result<(), ApplyError> {
    let steps = plan.steps.iter().enumerate();
    // A knob that is written twice is now what it was before the first write.
    let is_first = |(at, step): &(usize, &Step)| {
        let mut earlier = plan.steps.iter().take(*at);
        earlier.all(|earlier| earlier.knob != step.knob)
    };
    let steps = steps.filter(is_first);
    let steps = steps.map(|(_, step)| (&step.knob, &step.before));
    let saved = plan.saved.iter().map(|saved| (&saved.knob, &saved.value));
    for (knob, planned) in steps.chain(saved) {
        let (now, rests) = knob.read_stable(root)?;
        if now != *planned || !rests {
            let (knob, planned) = (knob.clone(), planned.clone());
            return Err(ApplyError::Moved { knob, planned, now });
        }
    }
    Ok(())
}

/// Puts back what `record` says, and removes it where that worked. A change that was cut short is put
/// back from wherever it stands; one that was finished only where its values still stand, unless
/// `force`.
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
        stands(root, record)?;
    }
    for step in undo_steps(root, record)? {
        step.knob.writable(root)?;
    }
    if record.finished {
        // From here on its values may be anywhere, should this be cut short too.
        locked.reopen()?;
    }
    Work::new(root, locked, compact, watcher).put_back(record)
}

/// The writes that put `record` back from where things stand, in the order in which the kernel takes them: those that give
/// memory back first, as those that want some may need it.
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

/// Whether the values that a finished change left still stand.
///
/// # Errors
/// [`ApplyError::Changed`] where they do not; [`ApplyError::Refused`] where that cannot be read.
pub fn stands(root: &Root, record: &Record) -> Result<(), ApplyError> {
    if !record.finished {
        return Ok(());
    }
    for (at, step) in record.steps.iter().enumerate() {
        let later = record.steps.iter().skip(at + 1);
        if later
            .map(|later| &later.knob)
            .any(|knob| *knob == step.knob)
        {
            // What the change left is its last write.
            continue;
        }
        let now = step.knob.read(root)?;
        let left = step.after.as_ref().unwrap_or(&step.to);
        if now != *left {
            return Err(ApplyError::Changed {
                what: step.knob.to_string(),
                left: left.to_string(),
                now: now.to_string(),
            });
        }
    }
    for file in &record.files {
        let now = root.read(&file.file).ok();
        if now != file.after {
            let in_words = |text: &Option<String>| match text {
                Some(text) => format!("`{}`", text.trim_end()),
                None => "no file".to_owned(),
            };
            return Err(ApplyError::Changed {
                what: root.path(&file.file).display().to_string(),
                left: in_words(&file.after),
                now: in_words(&now),
            });
        }
    }
    Ok(())
}

/// Writing, with a watcher.
pub(super) struct Work<'a> {
    root: &'a Root,
    locked: &'a Locked,
    /// Memory is moved together before pages are made.
    compact: bool,
    watcher: &'a mut dyn Watcher,
    /// The watcher asked for an end.
    pub(super) stop: bool,
    /// How long the kernel worked on the last write.
    pub(super) elapsed: Duration,
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
            elapsed: Duration::ZERO,
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
        for file in &record.files {
            if self.asked_to_stop(&Activity::Nothing) {
                return Ok(());
            }
            file.put(self.root, file.after.as_deref())?;
        }
        self.asked_to_stop(&Activity::Nothing);
        Ok(())
    }

    pub(super) fn put_back(&mut self, record: &Record) -> Result<Undone, ApplyError> {
        self.try_put_back(record).map_err(|error| match error {
            // The record is the last that is put back.
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
        for file in &record.files {
            file.clear_up(self.root);
            if self.root.read(&file.file).ok() != file.before {
                file.put(self.root, file.before.as_deref())?;
                undone.files.push(file.file.clone());
            }
        }
        let is_back = |step: &Step| step.after.as_ref() == Some(&step.to);
        undone.complete = undone.steps.iter().all(is_back);
        if undone.complete {
            self.locked.forget_last()?;
        }
        Ok(undone)
    }

    /// Puts back what was done before `error`, and says what became of that.
    fn give_up(&mut self, record: &Record, error: ApplyError) -> ApplyError {
        const PART: &str =
            "what was done before it could not all be put back, and `--undo` tries again";
        match self.put_back(record) {
            Ok(undone) if undone.complete => error.and(true, "everything was put back"),
            Ok(_) => error.and(false, PART),
            Err(second) => error.and(!second.leaves_changes(), second.to_string()),
        }
    }

    /// One knob: written, and read back.
    pub(super) fn step(&mut self, step: &mut Step) -> Result<(), FileError> {
        if self.compact && step.grows() {
            self.compact(step);
        }
        if !self.stop {
            let (root, file) = (self.root.clone(), step.knob.file.clone());
            let to = step.text();
            let write = move || {
                let clock = Instant::now();
                root.write(file, &to)?;
                Ok(clock.elapsed())
            };
            self.elapsed = self.patiently(write, &Activity::Writing(step))?;
            step.after = Some(step.knob.read(self.root)?);
        }
        Ok(())
    }

    /// That memory cannot be compacted is a pity and no failure.
    fn compact(&mut self, step: &Step) {
        let (root, file) = (self.root.clone(), step.knob.compaction());
        let done = self.patiently(move || root.write(file, "1"), &Activity::Compacting);
        if let Err(error) = done {
            let note = format!("memory was not compacted: {error}");
            self.notes.push(note);
        }
    }

    /// Work in the kernel that may take long.
    fn patiently<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
        activity: &Activity<'_>,
    ) -> Result<T, FileError> {
        let process = self.root.path("proc/self");
        let no_thread = |source| FileError::io("start a thread in", &process)(source);
        let mut work = Interruptible::start(work).map_err(no_thread)?;
        loop {
            work = match work.wait(TICK) {
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

    /// Does something once the knobs are written.
    struct Then<F>(F);

    impl<F: FnMut()> Watcher for Then<F> {
        fn poll(&mut self, _: &Activity<'_>) -> ControlFlow<()> {
            (self.0)();
            ControlFlow::Continue(())
        }
    }

    #[test]
    fn what_was_not_so_or_is_so_already_is_not_recorded() {
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
    fn what_cannot_be_recorded_as_done_is_put_back() {
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
    fn what_cannot_be_put_back_either_is_said_and_stays_recorded() {
        let fake = Fake::new();
        let spoil = || {
            fake.fill();
            if fake.pages() == "5" {
                fake.set_pages("no number");
            }
        };
        let error = apply_to(&fake, &fake.plan(5), &mut Then(spoil)).unwrap_err();
        assert!(error.leaves_changes(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("changes.toml: File exists") && text.contains("not everything"),
            "{text}"
        );
        assert!(!fake.locked.last().unwrap().unwrap().finished);
    }
}
