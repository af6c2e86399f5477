//! Any number of writes under one record: [`Steering`], for the duration of a measurement.
//!
//! The record is written before the first write and has the values before it, so it covers all that
//! follow. It stays unfinished until the steering ends: `--undo` restores the knobs of a process
//! that was killed, whatever their values are.

use super::apply::{ApplyError, Undone, Work, check_current};
use super::journal::{Locked, Record};
use super::knob::{Knob, Value};
use super::plan::{Plan, Saved, Step};
use crate::kernel::{FileError, Root};

/// Exclusive control of one group of knobs. Dropping it restores them, without a result;
/// [`Steering::put_back`] returns one.
#[derive(Debug)]
pub struct Steering<'a> {
    root: &'a Root,
    locked: &'a Locked,
    record: Record,
    /// The restoration was tried.
    ended: bool,
}

impl<'a> Steering<'a> {
    /// Records `saved`, the values that restore the `knobs` that will be written.
    ///
    /// # Errors
    /// [`ApplyError::Refused`] where the knobs cannot be written; [`ApplyError::Moved`] where their
    /// values are not those of `saved`; [`ApplyError::Journal`].
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
        check_current(root, &plan)?;
        let record = Record::of(&plan, command);
        locked.add(&record)?;
        Ok(Self {
            root,
            locked,
            record,
            ended: false,
        })
    }

    /// Records the current values of `knobs` as those that restore them.
    ///
    /// # Errors
    /// Errors of [`Steering::begin`].
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

    /// Writes one of the knobs, and reads it back.
    ///
    /// # Errors
    /// [`FileError`] where it cannot be written or read back.
    pub fn set(&mut self, knob: &Knob, to: impl Into<Value>) -> Result<Step, FileError> {
        let mut step = Step::new(knob.clone(), knob.read(self.root)?, to);
        Work::new(self.root, self.locked, false, &mut ()).step(&mut step)?;
        Ok(step)
    }

    /// Restores the knobs.
    ///
    /// # Errors
    /// [`ApplyError`]; the record stays.
    pub fn put_back(mut self) -> Result<Undone, ApplyError> {
        self.restore()
    }

    fn restore(&mut self) -> Result<Undone, ApplyError> {
        self.ended = true;
        Work::new(self.root, self.locked, false, &mut ()).put_back(&self.record)
    }
}

impl Drop for Steering<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.restore();
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
        let written = steering.set(&Fake::knob(), 2).unwrap();
        assert_eq!(written.after, Some(2.into()));
        steering
    }

    #[test]
    fn undo_restores_after_a_kill() {
        let fake = Fake::new();
        std::mem::forget(begun(&fake));
        let record = fake.locked.last().unwrap().unwrap();
        let undone = undo(&fake.root, &fake.locked, &record, false, false, &mut ());
        assert!(undone.unwrap().complete && fake.pages() == "0");
        assert!(fake.locked.last().unwrap().is_none());
    }

    #[test]
    fn drop_restores() {
        let fake = Fake::new();
        let steering = begun(&fake);
        assert!(fake.locked.last().unwrap().is_some());
        drop(steering);
        assert_eq!(fake.pages(), "0");
        assert!(fake.locked.last().unwrap().is_none());
    }
}
