//! Any number of writes under one record: [`Steering`], what `jumbo pool auto` holds while it runs.
//!
//! The record is written before the first write and says what was before it, so that it covers all that
//! follow. It is not finished until the steering ends: a process that was killed leaves a change that
//! was cut short. The next steering goes on under that record, so that however often one is killed, the last one
//! puts back what was before the first.
//!
//! So that the next one knows a knob that was left from a knob that was changed since, the record says of each
//! knob its last value and, before each write, the new one: killed meanwhile, the knob is between them.

use std::time::Duration;

use super::apply::{ApplyError, Undone, Watcher, Work, stands_on, undo_steps};
use super::journal::{Locked, Record};
use super::knob::{Knob, Value};
use super::plan::{Plan, Saved, Step};
use crate::kernel::{FileError, Root};

/// One group of knobs in our hands. Dropping it puts back what was before; [`Steering::put_back`] says how that went.
#[derive(Debug)]
pub struct Steering<'a> {
    root: &'a Root,
    locked: &'a Locked,
    record: Record,
    goes_on_for: Option<u32>,
    /// It was said what is to become of the knobs.
    ended: bool,
}

/// How one write went.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// With the value read back, where it was written.
    pub step: Step,
    /// True where the watcher asked for an end meanwhile.
    pub stopped: bool,
    /// How long the kernel worked on it.
    pub took: Duration,
}

impl<'a> Steering<'a> {
    /// Records what `saved` says; with `go_on`, where the last change is that of a steering that was killed, and
    /// the `knobs` that will be written are as that one left them, what it was before that.
    ///
    /// # Errors
    /// [`ApplyError::Refused`] where the knobs cannot be written; [`ApplyError::Moved`] where they are not as
    /// `saved`; [`ApplyError::Journal`].
    pub fn begin(
        root: &'a Root,
        locked: &'a Locked,
        knobs: Vec<Knob>,
        saved: Vec<Saved>,
        command: &str,
        go_on: bool,
    ) -> Result<Self, ApplyError> {
        let mut plan = Plan::new(locked.group().clone());
        for knob in knobs {
            let now = knob.read(root)?;
            plan.steps.push(Step::new(knob, now.clone(), now));
        }
        plan.saved = saved;
        plan.writable(root)?;
        stands_on(root, &plan)?;
        let abandoned = match go_on {
            true => abandoned(root, locked)?,
            false => None,
        };
        let goes_on_for = abandoned.as_ref().map(|record| record.pid);
        let record = match abandoned {
            Some(mut record) => {
                record.go_on(command);
                locked.put(&record)?;
                record
            }
            None => {
                let mut record = Record::of(&plan, command, locked);
                record.steering = true;
                locked.add(&record)?;
                record
            }
        };
        Ok(Self {
            root,
            locked,
            record,
            goes_on_for,
            ended: false,
        })
    }

    /// The same for knobs whose values now are what has to be put back, whatever was left before.
    ///
    /// # Errors
    /// As [`Steering::begin`].
    pub fn of(
        root: &'a Root,
        locked: &'a Locked,
        knobs: Vec<Knob>,
        command: &str,
    ) -> Result<Self, ApplyError> {
        let saved = |knob: &Knob| {
            let (knob, value) = (knob.clone(), knob.read(root)?);
            Ok(Saved { knob, value })
        };
        let saved: Result<_, FileError> = knobs.iter().map(saved).collect();
        Self::begin(root, locked, knobs, saved?, command, false)
    }

    /// The process that was killed before it could put back what was before; that is done by this steering, at
    /// its end.
    pub fn goes_on_for(&self) -> Option<u32> {
        self.goes_on_for
    }

    /// Gives one of the knobs a new value.
    ///
    /// # Errors
    /// [`FileError`] where it cannot be written or read back.
    pub fn set(
        &mut self,
        knob: &Knob,
        to: impl Into<Value>,
        watcher: &mut dyn Watcher,
    ) -> Result<Written, FileError> {
        let mut step = Step::new(knob.clone(), knob.read(self.root)?, to);
        self.note(knob, |ours| ours.to = step.to.clone());
        let mut work = Work::new(self.root, self.locked, false, watcher);
        work.step(&mut step)?;
        let (stopped, took) = (work.stop, work.took);
        if let Some(after) = &step.after {
            self.note(knob, |ours| {
                (ours.after, ours.to) = (Some(after.clone()), after.clone());
            });
        }
        Ok(Written {
            step,
            stopped,
            took,
        })
    }

    /// For the next steering. One that cannot read it takes the knob for changed by another program.
    fn note(&mut self, knob: &Knob, what: impl FnOnce(&mut Step)) {
        let ours = self.record.steps.iter_mut().find(|ours| ours.knob == *knob);
        if let Some(ours) = ours {
            what(ours);
            let _ = self.locked.put(&self.record);
        }
    }

    /// Puts back what was before.
    ///
    /// # Errors
    /// [`ApplyError`]; the record stays.
    pub fn put_back(mut self, watcher: &mut dyn Watcher) -> Result<Undone, ApplyError> {
        self.restore(watcher)
    }

    fn restore(&mut self, watcher: &mut dyn Watcher) -> Result<Undone, ApplyError> {
        self.ended = true;
        for step in &mut self.record.steps {
            step.to = step.before.clone();
        }
        let _ = self.locked.put(&self.record);
        Work::new(self.root, self.locked, false, watcher).put_back(&self.record)
    }
}

impl Drop for Steering<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.restore(&mut ());
        }
    }
}

/// The record of a steering that was killed, where the knobs are as that one left them and can be put back.
fn abandoned(root: &Root, locked: &Locked) -> Result<Option<Record>, ApplyError> {
    let stands = |step: &Step| {
        let left = step.after.as_ref().unwrap_or(&step.before);
        let Ok(now) = step.knob.read(root) else {
            return false;
        };
        match (left.number(), step.to.number(), now.number()) {
            (Some(left), Some(to), Some(now)) => (left.min(to)..=left.max(to)).contains(&now),
            _ => now == *left || now == step.to,
        }
    };
    Ok(locked.last()?.filter(|record| {
        record.steering
            && !record.finished
            && record.steps.iter().all(stands)
            && undo_steps(root, record).is_ok()
    }))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    fn begin<'a>(fake: &'a Fake, command: &str) -> Steering<'a> {
        let saved = Saved {
            knob: Fake::knob(),
            value: Fake::knob().read(&fake.root).unwrap(),
        };
        let (knobs, saved) = (vec![Fake::knob()], vec![saved]);
        Steering::begin(&fake.root, &fake.locked, knobs, saved, command, true).unwrap()
    }

    fn begun(fake: &Fake) -> Steering<'_> {
        let mut steering = begin(fake, "test");
        let written = steering.set(&Fake::knob(), 2, &mut ()).unwrap();
        assert_eq!(written.step.after, Some(2.into()));
        steering
    }

    /// Whether the next steering goes on for one that was killed while it wrote 7 over 2, where the pool is `left`.
    fn goes_on(left: u64) -> bool {
        let fake = Fake::new();
        let mut first = begun(&fake);
        first.note(&Fake::knob(), |step| step.to = 7.into());
        fake.set_pages(&left.to_string());
        // Killed.
        std::mem::forget(first);
        begin(&fake, "next").goes_on_for().is_some()
    }

    #[test]
    fn a_write_that_was_cut_short_is_gone_on_with() {
        assert_eq!(
            [1, 2, 5, 7, 8].map(goes_on),
            [false, true, true, true, false]
        );
    }

    #[test]
    fn dropped_it_puts_back_what_was_before() {
        let fake = Fake::new();
        let steering = begun(&fake);
        assert!(fake.locked.last().unwrap().is_some());
        drop(steering);
        assert_eq!(fake.pages(), "0");
        assert!(fake.locked.last().unwrap().is_none());
    }
}
