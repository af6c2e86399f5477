//! Any number of writes under one record: [`Steering`], what a measurement holds while it runs.
//!
//! The record is written before the first write and says what was before it, so that it covers all that
//! follow. It is not finished until the steering ends: a process that was killed leaves a change that
//! was cut short, which `--undo` puts back from wherever it stands.

use std::time::Duration;

use super::apply::{ApplyError, Undone, Watcher, Work, stands_on};
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
    /// It was said what is to become of the knobs.
    ended: bool,
}

/// How one write went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// With the value read back, where it was written.
    pub step: Step,
    /// True where the watcher asked for an end meanwhile.
    pub stopped: bool,
    /// How long the kernel worked on it.
    pub elapsed: Duration,
}

impl<'a> Steering<'a> {
    /// Records what `saved` says of the `knobs` that will be written.
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
    ) -> Result<Self, ApplyError> {
        let mut plan = Plan::new(locked.group().clone());
        for knob in knobs {
            let now = knob.read(root)?;
            plan.steps.push(Step::new(knob, now.clone(), now));
        }
        plan.saved = saved;
        plan.writable(root)?;
        stands_on(root, &plan)?;
        let record = Record::of(&plan, command);
        locked.add(&record)?;
        Ok(Self {
            root,
            locked,
            record,
            ended: false,
        })
    }

    /// The same for knobs whose values now are what has to be put back.
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
        Self::begin(root, locked, knobs, saved?, command)
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
        let mut work = Work::new(self.root, self.locked, false, watcher);
        work.step(&mut step)?;
        let (stopped, elapsed) = (work.stop, work.elapsed);
        Ok(Written {
            step,
            stopped,
            elapsed,
        })
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

#[cfg(test)]
mod tests {
    use super::super::apply::undo;
    use super::super::fake::Fake;
    use super::*;

    fn begun(fake: &Fake) -> Steering<'_> {
        let knobs = vec![Fake::knob()];
        let mut steering = Steering::of(&fake.root, &fake.locked, knobs, "test").unwrap();
        let written = steering.set(&Fake::knob(), 2, &mut ()).unwrap();
        assert_eq!(written.step.after, Some(2.into()));
        steering
    }

    #[test]
    fn killed_it_leaves_a_change_that_undo_puts_back() {
        let fake = Fake::new();
        std::mem::forget(begun(&fake));
        let record = fake.locked.last().unwrap().unwrap();
        let undone = undo(&fake.root, &fake.locked, &record, false, false, &mut ());
        assert!(undone.unwrap().complete && fake.pages() == "0");
        assert!(fake.locked.last().unwrap().is_none());
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
