//! Any number of writes under one record: [`Steering`], what `jumbo pool auto` holds while it runs.
//!
//! The record is written before the first write and says what was before it, so that it covers all that
//! follow. It is not finished until the steering ends: a process that was killed leaves a change that
//! was cut short. The next steering goes on under that record, so that however often one is killed, the last one
//! puts back what was before the first.
//!
//! So that the next one knows a pool that was left from a pool that somebody changed since, the record says of each
//! knob its last value and, before each write, the new one: killed meanwhile, the pool is between them.

use serde::Serialize;

use super::carry::{Attendant, CarryError, Undone, Work, check, stands_on, undo_steps};
use super::change::{Knob, Plan, Saved, Step, What, saved};
use super::journal::{Locked, Record};
use super::shortage::{self, Shortage};
use crate::kernel::hugetlb::Pool;
use crate::kernel::{FileError, Root};
use crate::units::Pages;

/// One pool in our hands. Dropping it puts back what was before; [`Steering::put_back`] says how that went.
#[derive(Debug)]
pub struct Steering<'a> {
    root: &'a Root,
    locked: &'a Locked,
    record: Record,
    heir_of: Option<u32>,
    /// It was said what is to become of the pool.
    ended: bool,
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Written {
    /// The value read back.
    pub after: Pages,
    /// True where somebody asked for an end meanwhile.
    pub stopped: bool,
    /// Why pages did not come, where some did not.
    pub shortage: Option<Shortage>,
}

impl<'a> Steering<'a> {
    /// Records what `pool` is; with `inherit`, where the last change is that of a steering that was killed, and
    /// the pool still is as that one left it, what it was before that.
    ///
    /// # Errors
    /// [`CarryError::Refused`] where its knobs cannot be written; [`CarryError::Moved`] where `pool` is not what
    /// it is now; [`CarryError::Journal`].
    pub fn begin(
        root: &'a Root,
        locked: &'a Locked,
        pool: &Pool,
        command: &str,
        inherit: bool,
    ) -> Result<Self, CarryError> {
        let knob = |what| Knob {
            size: pool.size,
            what,
            node: None,
        };
        let overcommit = Saved {
            knob: knob(What::Overcommit),
            value: pool.overcommit,
        };
        let step = |knob, value| Step {
            knob,
            before: value,
            to: value,
            after: None,
        };
        let plan = Plan {
            size: pool.size,
            steps: vec![
                step(knob(What::Overcommit), pool.overcommit),
                step(knob(What::Persistent), pool.persistent()),
            ],
            effect: Default::default(),
            saved: std::iter::once(overcommit).chain(saved(pool)).collect(),
            files: Vec::new(),
        };
        check(root, &plan).map_err(CarryError::Refused)?;
        stands_on(root, &plan)?;
        let abandoned = if inherit {
            abandoned(root, locked)?
        } else {
            None
        };
        let heir_of = abandoned.as_ref().map(|record| record.pid);
        let record = if let Some(mut record) = abandoned {
            record.inherit(command);
            locked.put(&record)?;
            record
        } else {
            let mut record = Record::of(&plan, command, locked);
            record.steering = true;
            locked.add(&mut record)?;
            record
        };
        Ok(Self {
            root,
            locked,
            record,
            heir_of,
            ended: false,
        })
    }

    /// The process that was killed before it could put back what was before; that is done by this steering, at
    /// its end.
    pub fn heir_of(&self) -> Option<u32> {
        self.heir_of
    }

    /// Gives one of the pool's numbers a new value.
    ///
    /// # Errors
    /// [`FileError`] where it cannot be written or read back.
    pub fn set(
        &mut self,
        what: What,
        to: Pages,
        attendant: &mut dyn Attendant,
    ) -> Result<Written, FileError> {
        let knob = Knob {
            size: self.record.size,
            what,
            node: None,
        };
        let mut step = Step {
            knob,
            before: knob.read(self.root)?,
            to,
            after: None,
        };
        self.note(knob, |ours| ours.to = to);
        let mut work = Work::new(self.root, attendant);
        work.step(&mut step, false)?;
        let stopped = work.stop;
        if let Some(after) = step.after {
            self.note(knob, |ours| (ours.after, ours.to) = (Some(after), after));
        }
        let short = !stopped && step.missing() > Pages(0);
        Ok(Written {
            after: step.after.unwrap_or(step.before),
            stopped,
            shortage: short
                .then(|| shortage::of(self.root, &[step], false))
                .flatten(),
        })
    }

    /// For the next steering. One that cannot read it takes the pool for changed by somebody else.
    fn note(&mut self, knob: Knob, what: impl FnOnce(&mut Step)) {
        let ours = self.record.steps.iter_mut().find(|ours| ours.knob == knob);
        if let Some(ours) = ours {
            what(ours);
            let _ = self.locked.put(&self.record);
        }
    }

    /// Leaves the pool as it is now, for `--undo` to put back.
    ///
    /// # Errors
    /// [`CarryError::Failed`] where that cannot be recorded: what was before is put back then.
    pub fn keep(mut self) -> Result<(), CarryError> {
        self.ended = true;
        let kept = self.try_keep();
        kept.map_err(|error| {
            Work::new(self.root, &mut ()).give_up(self.locked, &self.record, false, error)
        })
    }

    fn try_keep(&mut self) -> Result<(), CarryError> {
        for step in &mut self.record.steps {
            step.to = step.knob.read(self.root).map_err(CarryError::Refused)?;
            step.after = Some(step.to);
        }
        // Of the nodes too, which the steps do not name.
        let missing = undo_steps(self.root, &self.record).map_err(CarryError::Refused)?;
        if missing.is_empty() {
            return Ok(self.locked.remove(&self.record)?);
        }
        self.record.finished = true;
        Ok(self.locked.put(&self.record)?)
    }

    /// Puts back what was before.
    ///
    /// # Errors
    /// [`CarryError`]; the record stays.
    pub fn put_back(mut self, attendant: &mut dyn Attendant) -> Result<Undone, CarryError> {
        self.restore(attendant)
    }

    fn restore(&mut self, attendant: &mut dyn Attendant) -> Result<Undone, CarryError> {
        self.ended = true;
        for step in &mut self.record.steps {
            step.to = step.before;
        }
        let _ = self.locked.put(&self.record);
        Work::new(self.root, attendant).put_back(self.locked, &self.record, false)
    }
}

impl Drop for Steering<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.restore(&mut ());
        }
    }
}

/// The record of a steering that was killed, where the pool is as that one left it and can be put back.
fn abandoned(root: &Root, locked: &Locked) -> Result<Option<Record>, CarryError> {
    let stands = |step: &Step| {
        let left = step.after.unwrap_or(step.before);
        let between = left.min(step.to)..=left.max(step.to);
        step.knob.read(root).is_ok_and(|now| between.contains(&now))
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
    use std::path::{Path, PathBuf};

    use super::super::journal::Journal;
    use super::*;
    use crate::kernel::hugetlb;
    use crate::units::PageSize;

    /// The files of a pool without pages.
    fn empty_pool(folder: &Path) -> PathBuf {
        let files = folder.join(hugetlb::FOLDER).join("hugepages-2048kB");
        std::fs::create_dir_all(&files).unwrap();
        for name in ["nr", "free", "resv", "surplus", "nr_overcommit"] {
            std::fs::write(files.join(format!("{name}_hugepages")), "0\n").unwrap();
        }
        files
    }

    /// Whether the next steering goes on for one that was killed while it wrote 7 over 2, where the pool is `left`.
    fn inherited(left: u64) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let files = empty_pool(folder.path());
        let root = Root::at(folder.path());
        let journal = Journal::at(&root, folder.path().join("jumbo/pool"));
        let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
        let pool = || hugetlb::pools(&root).unwrap().unwrap().remove(0);
        let mut first = Steering::begin(&root, &locked, &pool(), "first", true).unwrap();
        first.set(What::Persistent, Pages(2), &mut ()).unwrap();
        let knob = first.record.steps[1].knob;
        first.note(knob, |step| step.to = Pages(7));
        std::fs::write(files.join("nr_hugepages"), format!("{left}\n")).unwrap();
        // Killed.
        std::mem::forget(first);
        let next = Steering::begin(&root, &locked, &pool(), "next", true).unwrap();
        next.heir_of().is_some()
    }

    #[test]
    fn a_write_that_was_cut_short_is_gone_on_with() {
        assert_eq!(
            [1, 2, 5, 7, 8].map(inherited),
            [false, true, true, true, false]
        );
    }

    #[test]
    fn what_cannot_be_recorded_as_kept_is_put_back() {
        let folder = tempfile::tempdir().unwrap();
        let knob = empty_pool(folder.path()).join("nr_hugepages");
        let root = Root::at(folder.path());
        let journal = Journal::at(&root, folder.path().join("jumbo/pool"));
        let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
        let pool = hugetlb::pools(&root).unwrap().unwrap().remove(0);
        let mut steering = Steering::begin(&root, &locked, &pool, "test", true).unwrap();
        steering.set(What::Persistent, Pages(2), &mut ()).unwrap();
        // As on a full disk: no record is written any more.
        let record = "jumbo/pool/hugepages-2048kB/00000001.toml.jumbo-new";
        std::fs::create_dir(folder.path().join(record)).unwrap();
        let error = steering.keep().unwrap_err();
        assert!(!error.leaves_changes(), "{error}");
        assert_eq!(std::fs::read_to_string(knob).unwrap(), "0");
        assert!(locked.last().unwrap().is_none());
    }

    #[test]
    fn dropped_it_puts_back_what_was_before() {
        let folder = tempfile::tempdir().unwrap();
        let knob = empty_pool(folder.path()).join("nr_hugepages");
        let root = Root::at(folder.path());
        let journal = Journal::at(&root, folder.path().join("jumbo/pool"));
        let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
        let pool = hugetlb::pools(&root).unwrap().unwrap().remove(0);
        let mut steering = Steering::begin(&root, &locked, &pool, "test", true).unwrap();
        let written = steering.set(What::Persistent, Pages(2), &mut ()).unwrap();
        assert_eq!(written.after, Pages(2));
        assert!(locked.last().unwrap().is_some());
        drop(steering);
        assert_eq!(std::fs::read_to_string(knob).unwrap(), "0");
        assert!(locked.last().unwrap().is_none());
    }
}
