//! Carrying a plan out, and putting it back: [`carry_out`], [`undo`].
//!
//! Each knob is written once, however many pages that means: the kernel does a resize as a whole, and
//! what a resize costs beside its pages (a grace period of RCU with HVO) it costs once. A write is read
//! back, because the kernel answers a pool that grew by half of what was asked with success.
//!
//! A write sits in a thread of its own, so that it can be cut short. What is cut short or fails is put
//! back from its record at once; where that cannot be (memory that was given back is in other hands) the
//! record stays, for another try.

use std::ops::ControlFlow;
use std::time::Duration;

use rustix::fs::{Access, access};
use serde::Serialize;

use super::change::{Knob, Plan, Saved, Step, What};
use super::journal::{JournalError, Locked, Record};
use super::shortage::{self, Shortage};
use crate::kernel::memory::Events;
use crate::kernel::process::Interruptible;
use crate::kernel::{FileError, Root};
use crate::units::{NodeId, Pages};

/// How often the attendant is asked while the kernel works.
const TICK: Duration = Duration::from_millis(50);

/// How often memory is compacted anew for pages that did not come.
const ROUNDS: u32 = 4;

/// Who watches a change: shows how far it is, and says when to stop.
pub trait Attendant {
    /// Asked between the steps, and every 50 ms while the kernel works. `Break` asks for an end: once,
    /// so that putting back is not stopped by the same wish.
    fn attend(&mut self, doing: &Doing) -> ControlFlow<()>;
}

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Between two steps.
    Nothing,
    /// The kernel moves memory together.
    Compacting,
    /// A knob is written; the kernel has made so many pages for it.
    Writing(Step, Pages),
}

/// Nobody: nothing is shown, nothing stops.
impl Attendant for () {
    fn attend(&mut self, _: &Doing) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// How a plan went.
#[derive(Clone, Debug, Serialize)]
pub struct Carried {
    /// The steps with what was read back.
    pub steps: Vec<Step>,
    /// What was put back because somebody asked for an end; `None` where it was carried out.
    pub put_back: Option<Undone>,
    /// Why pages did not come, where some did not.
    pub shortage: Option<Shortage>,
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
    /// Why pages did not come, where some did not.
    pub shortage: Option<Shortage>,
}

/// Why a plan could not be carried out or undone.
#[derive(Debug, thiserror::Error)]
pub enum CarryError {
    /// A knob or file refused; nothing was changed.
    #[error(transparent)]
    Refused(FileError),
    /// A knob, a file or the record refused on the way.
    #[error("{error}; {outcome}")]
    Failed {
        /// Which, and why.
        error: Box<CarryError>,
        /// What became of the steps before it.
        outcome: String,
        /// True where everything is as it was.
        put_back: bool,
    },
    /// The record could not be written, or removed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The plan has no step and no file: there is nothing to do, and nothing to record.
    #[error("everything is as wished: there is nothing to do")]
    Nothing,
    /// The pool is not what the plan was made from, so what was before is not known; nothing was changed.
    #[error(
        "{knob}: {now} now, where the plan was made from {planned}: the pool changes meanwhile"
    )]
    Moved {
        /// The number.
        knob: Knob,
        /// What it was when the plan was made.
        planned: Pages,
        /// What it is.
        now: Pages,
    },
    /// A value is not what the change left.
    #[error("{what}: {now} now, where the change left {left}: somebody else has set it since")]
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
/// moved together first, and again as long as that brings pages.
///
/// # Errors
/// [`CarryError`]. Then everything is as before, or the record says what is not.
pub fn carry_out(
    root: &Root,
    locked: &Locked,
    plan: &Plan,
    command: &str,
    compact: bool,
    attendant: &mut dyn Attendant,
) -> Result<Carried, CarryError> {
    if plan.is_empty() {
        return Err(CarryError::Nothing);
    }
    check(root, plan).map_err(CarryError::Refused)?;
    stands_on(root, plan)?;
    let mut record = Record::of(plan, command, locked);
    locked.add(&mut record)?;
    let mut work = Work::new(root, attendant);
    if let Err(error) = work.all(&mut record, compact && plan.makes()) {
        return Err(work.give_up(locked, &record, compact, CarryError::Refused(error)));
    }
    if work.stop {
        let put_back = Some(work.put_back(locked, &record, compact)?);
        return Ok(Carried {
            steps: record.steps,
            put_back,
            shortage: None,
            notes: work.notes,
        });
    }
    record.finished = true;
    if let Err(error) = locked.put(&record) {
        return Err(work.give_up(locked, &record, compact, error.into()));
    }
    let shortage = shortage::of(root, &record.steps, compact);
    Ok(Carried {
        steps: record.steps,
        put_back: None,
        shortage,
        notes: work.notes,
    })
}

impl CarryError {
    /// True where something may have been left changed.
    pub fn leaves_changes(&self) -> bool {
        matches!(
            self,
            Self::Failed {
                put_back: false,
                ..
            }
        )
    }

    /// It came while things were put back, of which the record is the last.
    fn while_put_back(self) -> Self {
        let put_back = matches!(self, Self::Journal(_));
        let outcome = if put_back {
            "everything was put back, and the record of it stands"
        } else {
            "not everything was put back, and `--undo` tries again"
        };
        Self::Failed {
            error: Box::new(self),
            outcome: outcome.to_owned(),
            put_back,
        }
    }
}

/// Whether `plan` was made from what is: a record must say what really was before.
///
/// # Errors
/// [`CarryError::Moved`]; [`CarryError::Refused`] where a knob cannot be read.
pub(super) fn stands_on(root: &Root, plan: &Plan) -> Result<(), CarryError> {
    match plan.moved(root).map_err(CarryError::Refused)? {
        None => Ok(()),
        Some((knob, planned, now)) => Err(CarryError::Moved { knob, planned, now }),
    }
}

/// Whether the knobs of `plan` could be written, so that nothing begins that must fail.
///
/// # Errors
/// [`FileError::Io`] as [`Knob::write`] would give it.
pub fn check(root: &Root, plan: &Plan) -> Result<(), FileError> {
    plan.steps
        .iter()
        .try_for_each(|step| writable(root, &step.knob))
}

/// Puts back what `record` says, and removes it where that worked. A change that was cut short is put
/// back from wherever it stands; one that was finished only where its values still stand, unless
/// `force`.
///
/// # Errors
/// [`CarryError`]; the record stays.
pub fn undo(
    root: &Root,
    locked: &Locked,
    record: &Record,
    compact: bool,
    force: bool,
    attendant: &mut dyn Attendant,
) -> Result<Undone, CarryError> {
    if !force {
        stands(root, record)?;
    }
    for step in undo_steps(root, record).map_err(CarryError::Refused)? {
        writable(root, &step.knob).map_err(CarryError::Refused)?;
    }
    if record.finished {
        // From here on its values may be anywhere, should this be cut short too.
        let mut begun = record.clone();
        begun.finished = false;
        locked.put(&begun)?;
    }
    Work::new(root, attendant).put_back(locked, record, compact)
}

/// The writes that put `record` back from where things stand: those that give memory back first, as
/// those that want some may need it.
///
/// # Errors
/// [`FileError`] where a knob cannot be read.
pub fn undo_steps(root: &Root, record: &Record) -> Result<Vec<Step>, FileError> {
    let mut steps = Vec::new();
    for Saved { knob, value } in &record.saved {
        let now = knob.read(root)?;
        if now != *value {
            steps.push(Step {
                knob: *knob,
                before: now,
                to: *value,
                after: None,
            });
        }
    }
    steps.sort_by_key(Step::grows);
    Ok(steps)
}

/// Whether the values that a finished change left still stand.
///
/// # Errors
/// [`CarryError::Changed`] where they do not; [`CarryError::Refused`] where that cannot be read.
pub fn stands(root: &Root, record: &Record) -> Result<(), CarryError> {
    if !record.finished {
        return Ok(());
    }
    for step in &record.steps {
        let now = step.knob.read(root).map_err(CarryError::Refused)?;
        let left = step.after.unwrap_or(step.to);
        if now != left {
            return Err(CarryError::Changed {
                what: step.knob.to_string(),
                left: left.to_string(),
                now: now.to_string(),
            });
        }
    }
    for file in &record.files {
        let now = root.read(&file.file).ok();
        if now != file.after {
            let in_words = |text: &Option<String>| {
                text.as_deref().map_or("no file".to_owned(), |text| {
                    format!("`{}`", text.trim_end())
                })
            };
            return Err(CarryError::Changed {
                what: format!("{}", root.path(&file.file).display()),
                left: in_words(&file.after),
                now: in_words(&now),
            });
        }
    }
    Ok(())
}

fn writable(root: &Root, knob: &Knob) -> Result<(), FileError> {
    let path = root.path(knob.file());
    access(&path, Access::WRITE_OK).map_err(|errno| FileError::Io {
        operation: "write",
        path,
        source: errno.into(),
    })
}

/// Writing, with somebody attending.
pub(super) struct Work<'a> {
    root: &'a Root,
    attendant: &'a mut dyn Attendant,
    /// Somebody asked for an end.
    pub(super) stop: bool,
    notes: Vec<String>,
}

impl<'a> Work<'a> {
    pub(super) fn new(root: &'a Root, attendant: &'a mut dyn Attendant) -> Self {
        Self {
            root,
            attendant,
            stop: false,
            notes: Vec::new(),
        }
    }

    fn all(&mut self, record: &mut Record, compact: bool) -> Result<(), FileError> {
        for step in &mut record.steps {
            if self.asked_to_stop(&Doing::Nothing) {
                return Ok(());
            }
            self.step(step, compact)?;
        }
        for file in &record.files {
            if self.asked_to_stop(&Doing::Nothing) {
                return Ok(());
            }
            file.apply(self.root)?;
        }
        self.asked_to_stop(&Doing::Nothing);
        Ok(())
    }

    pub(super) fn put_back(
        &mut self,
        locked: &Locked,
        record: &Record,
        compact: bool,
    ) -> Result<Undone, CarryError> {
        let undone = self.try_put_back(locked, record, compact);
        undone.map_err(CarryError::while_put_back)
    }

    fn try_put_back(
        &mut self,
        locked: &Locked,
        record: &Record,
        compact: bool,
    ) -> Result<Undone, CarryError> {
        self.stop = false;
        let mut undone = Undone::default();
        let steps = undo_steps(self.root, record).map_err(CarryError::Refused)?;
        for mut step in steps {
            if !self.stop {
                self.step(&mut step, compact).map_err(CarryError::Refused)?;
            }
            undone.steps.push(step);
        }
        for file in &record.files {
            file.clear_up(self.root);
            if self.root.read(&file.file).ok() != file.before {
                file.revert(self.root).map_err(CarryError::Refused)?;
                undone.files.push(file.file.clone());
            }
        }
        undone.complete = undone.steps.iter().all(|step| step.after == Some(step.to));
        if undone.complete {
            locked.remove(record)?;
        } else {
            undone.shortage = shortage::of(self.root, &undone.steps, compact);
        }
        Ok(undone)
    }

    /// Puts back what was done before `error`, and says what became of that.
    pub(super) fn give_up(
        &mut self,
        locked: &Locked,
        record: &Record,
        compact: bool,
        error: CarryError,
    ) -> CarryError {
        let (outcome, put_back) = match self.put_back(locked, record, compact) {
            Ok(undone) if undone.complete => ("everything was put back".to_owned(), true),
            Ok(_) => (
                "what was done before it could not all be put back, and `--undo` tries again"
                    .to_owned(),
                false,
            ),
            Err(second) => {
                let put_back = !second.leaves_changes();
                (second.to_string(), put_back)
            }
        };
        CarryError::Failed {
            error: Box::new(error),
            outcome,
            put_back,
        }
    }

    /// One knob: written, read back, and once more after each compaction that helped.
    pub(super) fn step(&mut self, step: &mut Step, compact: bool) -> Result<(), FileError> {
        let compact = compact && step.grows();
        if compact {
            self.compact(step.knob.node);
        }
        if self.stop {
            return Ok(());
        }
        let mut had = step.before;
        for round in 1.. {
            self.write(step)?;
            let after = step.knob.read(self.root)?;
            step.after = Some(after);
            let more = after < step.to && after > had && round < ROUNDS;
            if self.stop || !compact || !more {
                break;
            }
            had = after;
            self.compact(step.knob.node);
            if self.stop {
                break;
            }
        }
        Ok(())
    }

    fn write(&mut self, step: &Step) -> Result<(), FileError> {
        let (root, knob, to) = (self.root.clone(), step.knob, step.to);
        let made = Made::from_now_on(self.root, step);
        self.patiently(
            move || knob.write(&root, to),
            |root| Doing::Writing(*step, made.so_far(root)),
        )
    }

    /// That memory cannot be compacted is a pity and no failure.
    fn compact(&mut self, node: Option<NodeId>) {
        let file = match node {
            Some(node) => format!("sys/devices/system/node/node{node}/compact"),
            None => "proc/sys/vm/compact_memory".to_owned(),
        };
        let root = self.root.clone();
        let done = self.patiently(move || root.write(file, "1"), |_| Doing::Compacting);
        if let Err(error) = done {
            self.notes
                .push(format!("memory was not compacted: {error}"));
        }
    }

    /// Work in the kernel that may take long.
    fn patiently(
        &mut self,
        work: impl FnOnce() -> Result<(), FileError> + Send + 'static,
        doing: impl Fn(&Root) -> Doing,
    ) -> Result<(), FileError> {
        let path = || self.root.path("proc/self");
        let no_thread = |source| FileError::Io {
            operation: "start a thread in",
            path: path(),
            source,
        };
        let mut work = Interruptible::start(work).map_err(no_thread)?;
        loop {
            work = match work.wait(TICK) {
                Ok(Some(result)) => return result,
                Ok(None) => return Err(no_thread(std::io::ErrorKind::Other.into())),
                Err(work) => work,
            };
            self.asked_to_stop(&doing(self.root));
            if self.stop {
                work.interrupt();
            }
        }
    }

    fn asked_to_stop(&mut self, doing: &Doing) -> bool {
        self.stop |= self.attendant.attend(doing).is_break();
        self.stop
    }
}

/// How many pages the kernel has made for a step. Since Linux 6.7 they join the pool all at once at the
/// end, so the pool does not tell; what the page allocator gave (6.1) does.
struct Made {
    given: Option<u64>,
    step: Step,
}

impl Made {
    fn from_now_on(root: &Root, step: &Step) -> Self {
        Self {
            given: Self::given(root),
            step: *step,
        }
    }

    fn given(root: &Root) -> Option<u64> {
        Events::read(root).ok()?.get("htlb_buddy_alloc_success")
    }

    fn so_far(&self, root: &Root) -> Pages {
        if self.step.knob.what != What::Persistent {
            return Pages(0);
        }
        let given = Self::given(root).zip(self.given);
        let given = given.map_or(0, |(now, before)| now.saturating_sub(before));
        let joined = self.step.knob.read(root).unwrap_or(self.step.before);
        Pages(given.max(joined.0.abs_diff(self.step.before.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal::Journal;
    use super::super::{Amount, Wish};
    use super::*;
    use crate::kernel::hugetlb;
    use crate::units::PageSize;

    /// A pool in a folder, and the right to change it.
    struct Fake {
        folder: tempfile::TempDir,
        root: Root,
        locked: Locked,
    }

    impl Fake {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let root = Root::at(folder.path());
            let pool = root.path(hugetlb::FOLDER).join("hugepages-2048kB");
            std::fs::create_dir_all(&pool).unwrap();
            for name in ["nr", "free", "resv", "surplus", "nr_overcommit"] {
                std::fs::write(pool.join(format!("{name}_hugepages")), "0\n").unwrap();
            }
            let journal = Journal::at(&root, folder.path().join("jumbo/pool"));
            let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
            Self {
                folder,
                root,
                locked,
            }
        }

        fn plan(&self, to: u64) -> Plan {
            let pools = hugetlb::pools(&self.root).unwrap().unwrap();
            let wish = Wish {
                persistent: Some(Amount::To(Pages(to))),
                overcommit: None,
                node: None,
            };
            Plan::new(&pools[0], &wish).unwrap()
        }

        fn carry(&self, plan: &Plan, attendant: &mut dyn Attendant) -> Result<Carried, CarryError> {
            carry_out(&self.root, &self.locked, plan, "test", false, attendant)
        }

        fn knob(&self) -> std::path::PathBuf {
            let folder = self.root.path(hugetlb::FOLDER);
            folder.join("hugepages-2048kB/nr_hugepages")
        }

        /// Has no record written any more, as on a full disk.
        fn fill(&self) {
            let record = "jumbo/pool/hugepages-2048kB/00000001.toml.jumbo-new";
            let _ = std::fs::create_dir(self.folder.path().join(record));
        }
    }

    /// Does something once the knobs are written.
    struct Then<F>(F);

    impl<F: FnMut()> Attendant for Then<F> {
        fn attend(&mut self, _: &Doing) -> ControlFlow<()> {
            (self.0)();
            ControlFlow::Continue(())
        }
    }

    #[test]
    fn what_was_not_so_or_is_so_already_is_not_recorded() {
        let fake = Fake::new();
        let carry = |plan: &Plan| fake.carry(plan, &mut ());
        assert!(matches!(carry(&fake.plan(0)), Err(CarryError::Nothing)));
        let mut torn = fake.plan(5);
        torn.saved[0].value = Pages(3);
        let moved = carry(&torn);
        assert!(
            matches!(
                &moved,
                Err(CarryError::Moved {
                    planned: Pages(3),
                    now: Pages(0),
                    ..
                })
            ),
            "{moved:?}"
        );
        assert!(fake.locked.last().unwrap().is_none());
        assert!(carry(&fake.plan(5)).is_ok() && fake.locked.last().unwrap().is_some());
    }

    #[test]
    fn what_cannot_be_recorded_as_done_is_put_back() {
        let fake = Fake::new();
        let failed = fake.carry(&fake.plan(5), &mut Then(|| fake.fill()));
        let error = failed.unwrap_err();
        assert!(!error.leaves_changes(), "{error}");
        assert!(
            error.to_string().ends_with("; everything was put back"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(fake.knob()).unwrap(), "0");
        assert!(fake.locked.last().unwrap().is_none());
    }

    #[test]
    fn what_cannot_be_put_back_either_is_said_and_stays_recorded() {
        let fake = Fake::new();
        let failed = fake.carry(
            &fake.plan(5),
            &mut Then(|| {
                fake.fill();
                if std::fs::read_to_string(fake.knob()).unwrap() == "5" {
                    std::fs::write(fake.knob(), "no number").unwrap();
                }
            }),
        );
        let error = failed.unwrap_err();
        assert!(error.leaves_changes(), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("00000001.toml: File exists") && text.contains("not everything"),
            "{text}"
        );
        assert!(!fake.locked.last().unwrap().unwrap().finished);
    }
}
