//! What was before a change, kept until it is undone: [`Journal`].
//!
//! A folder for each [`Group`] has one file with its changes, the latest last: all changes before the last one, which have
//! become one, the last one that was done, and while it is under way, or was cut short, another one. `--undo` puts back the
//! latest of them, so that two undos bring back what was before any change of ours. The file is whole before the first knob
//! is written ([`whole_file`]). So it survives SIGKILL at every point, and a change that was cut short leaves a record like
//! any other.
//!
//! The folder is in /run, which is empty after a boot, and so is what the records are about. Where /run outlives the
//! boot (a container) the boot's ID, which stands in the file, tells.
//!
//! Invariant: a process that writes a record or a knob of a group holds the lock of that group.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::boot::FileChange;
use super::knob::Form;
use super::known::Group;
use super::plan::{Plan, Saved, Step};
use crate::kernel::{FileError, Root};
use crate::whole_file::{self, Existing};

/// Where the records are.
#[derive(Clone, Debug)]
pub struct Journal {
    folder: PathBuf,
    boot: Option<String>,
}

/// The right to change one group of knobs; given back when dropped, and by the kernel when the process dies.
#[derive(Debug)]
pub struct Locked {
    journal: Journal,
    group: Group,
    _lock: File,
}

/// The file of a group.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Changes {
    /// Its form.
    version: u32,
    /// The boot's ID (proc_sys_kernel(5)).
    boot: Option<String>,
    /// The latest last.
    #[serde(default)]
    changes: Vec<Record>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// What was changed.
    pub group: Group,
    /// What made it, in words: the command.
    pub command: String,
    /// The process.
    pub pid: u32,
    /// When, in nanoseconds since boot.
    pub since_boot_ns: u64,
    /// False from before the first write until after the last: what is not finished may be anywhere
    /// between before and after.
    pub finished: bool,
    /// The writes.
    pub steps: Vec<Step>,
    /// What has to be written to have everything back.
    pub saved: Vec<Saved>,
    /// Files, with what was in them.
    #[serde(default)]
    pub files: Vec<FileChange>,
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file of the journal cannot be used, or is no record.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another user could change the records, and have us write what they say.
    #[error("will not use {}: {why}", path.display())]
    Unsafe {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process changes this group.
    #[error("{group} is being changed by process {holder}")]
    Busy {
        /// Its name.
        group: String,
        /// Its PID and command.
        holder: String,
    },
}

impl Record {
    /// A record of what `plan` will do, not finished.
    pub(super) fn of(plan: &Plan, command: &str) -> Self {
        Self {
            group: plan.group.clone(),
            command: command.to_owned(),
            pid: std::process::id(),
            since_boot_ns: since_boot_ns(),
            finished: false,
            steps: plan.steps.clone(),
            saved: plan.saved.clone(),
            files: plan.files.clone(),
        }
    }

    /// Makes `later`, a change on top of this one, a part of it: what is put back is what was before both.
    fn absorb(&mut self, later: Self) {
        let pages = |step: &Step| matches!(step.knob.form, Form::Pages | Form::Demote);
        if later.steps.iter().any(pages) {
            // Of one pool: its total is not what was left where a node was set since, nor the other way round.
            self.steps.retain(|step| !pages(step));
        }
        for step in later.steps {
            self.steps.retain(|own| own.knob != step.knob);
            self.steps.push(step);
        }
        for saved in later.saved {
            if self.saved.iter().all(|own| own.knob != saved.knob) {
                self.saved.push(saved);
            }
        }
        for file in later.files {
            match self.files.iter_mut().find(|own| own.file == file.file) {
                Some(own) => own.after = file.after,
                None => self.files.push(file),
            }
        }
        if !self.command.ends_with(FOLLOWED) {
            self.command.push_str(FOLLOWED);
        }
        self.finished &= later.finished;
    }
}

const VERSION: u32 = 3;

/// What the command of a record ends with that has absorbed others.
const FOLLOWED: &str = ", and what followed";

/// The name of the file.
const FILE: &str = "changes.toml";
/// How many changes that were done are kept apart.
const KEPT: usize = 2;

fn since_boot_ns() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Journal {
    /// The journal of this user on the kernel behind `root`: /run/jumbo/knobs for root, the user's own
    /// runtime folder for others, who may have been given a knob. `None` where they have no such folder.
    pub fn of_user(root: &Root) -> Option<Self> {
        let folder = if rustix::process::geteuid().is_root() {
            root.path("run/jumbo/knobs")
        } else {
            let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
            Path::new(&own).join("jumbo/knobs")
        };
        Some(Self::at(root, folder))
    }

    /// A journal in that folder.
    pub fn at(root: &Root, folder: PathBuf) -> Self {
        let boot = root.read("proc/sys/kernel/random/boot_id").ok();
        Self {
            folder,
            boot: boot.map(|id| id.trim().to_owned()),
        }
    }

    /// The right to change a group, for `command`.
    ///
    /// # Errors
    /// [`JournalError::Busy`] where another process has it; others where the folder cannot be used.
    pub fn lock(&self, group: &Group, command: &str) -> Result<Locked, JournalError> {
        let folder = self.folder.join(&group.id);
        for folder in [self.folder.parent(), Some(&self.folder), Some(&folder)] {
            folder.map_or(Ok(()), make_folder)?;
        }
        let path = folder.join("lock");
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(NOFOLLOW)
            .open(&path)
            .map_err(FileError::io("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = lock.read_to_string(&mut holder);
                let holder = holder.trim().to_owned();
                let group = group.name.clone();
                return Err(JournalError::Busy { group, holder });
            }
            Err(TryLockError::Error(source)) => {
                return Err(FileError::io("lock", &path)(source).into());
            }
        }
        // What a process left behind that was killed while it wrote a record.
        whole_file::clear(&folder.join(FILE));
        // For the process that is refused; that it cannot be written does no harm.
        let _ = lock.set_len(0);
        let _ = lock.rewind();
        let _ = writeln!(lock, "{} (`{command}`)", std::process::id());
        let locked = Locked {
            journal: self.clone(),
            group: group.clone(),
            _lock: lock,
        };
        locked.last()?;
        Ok(locked)
    }

    /// The last change of any of these groups. Nothing is locked: this is for looking, and for finding out which
    /// lock to take.
    ///
    /// # Errors
    /// [`JournalError`] where the journal cannot be read or understood.
    pub fn last(&self, groups: &[Group]) -> Result<Option<Record>, JournalError> {
        let mut last = Vec::new();
        for group in groups {
            last.extend(self.records(group)?.pop());
        }
        Ok(last.into_iter().max_by_key(|record| record.since_boot_ns))
    }

    /// The records of this boot, the latest last; none where the folder is not there.
    fn records(&self, group: &Group) -> Result<Vec<Record>, JournalError> {
        let folder = self.folder.join(&group.id);
        if folder.exists() {
            check_folder(&folder)?;
        }
        let path = folder.join(FILE);
        let text = match fs::read_to_string(&path) {
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(FileError::io("read", &path))?,
        };
        let strange = |what| FileError::Content {
            path: path.clone(),
            what,
        };
        let changes: Changes = toml::from_str(&text).map_err(|error| strange(error.to_string()))?;
        if changes.version != VERSION {
            let what = format!("it is of version {}", changes.version);
            return Err(strange(what).into());
        }
        Ok(match changes.boot == self.boot {
            true => changes.changes,
            false => Vec::new(),
        })
    }
}

impl Locked {
    /// What may be changed.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The last change that was not undone.
    ///
    /// # Errors
    /// [`JournalError`] where it cannot be read or understood.
    pub fn last(&self) -> Result<Option<Record>, JournalError> {
        Ok(self.journal.records(&self.group)?.pop())
    }

    /// Makes the record the latest; it is on disk when this returns.
    pub(super) fn add(&self, record: &Record) -> Result<(), JournalError> {
        self.change(|changes| {
            fold(changes);
            changes.push(record.clone());
        })
    }

    /// All of it is done: the record, the latest, says so.
    pub(super) fn finish(&self, record: &mut Record) -> Result<(), JournalError> {
        record.finished = true;
        self.change(|changes| {
            changes.pop();
            changes.push(record.clone());
            fold(changes);
        })
    }

    /// What the latest record says may be anywhere again.
    pub(super) fn reopen(&self) -> Result<(), JournalError> {
        self.change(|changes| {
            if let Some(last) = changes.last_mut() {
                last.finished = false;
            }
        })
    }

    /// Forgets the latest record: it is undone.
    pub(super) fn forget_last(&self) -> Result<(), JournalError> {
        self.change(|changes| drop(changes.pop()))
    }

    /// Writes the file anew.
    fn change(&self, change: impl FnOnce(&mut Vec<Record>)) -> Result<(), JournalError> {
        let path = self.journal.folder.join(&self.group.id).join(FILE);
        let mut changes = self.journal.records(&self.group)?;
        change(&mut changes);
        if changes.is_empty() {
            return Ok(whole_file::remove(&path).map_err(FileError::io("remove", &path))?);
        }
        let boot = self.journal.boot.clone();
        let text = toml::to_string(&Changes {
            version: VERSION,
            boot,
            changes,
        });
        let text = text.map_err(|error| FileError::Content {
            path: path.clone(),
            what: error.to_string(),
        })?;
        let written = whole_file::write(&path, text.as_bytes(), 0o600, Existing::Replace);
        Ok(written.map_err(FileError::io("write", &path))?)
    }
}

/// Makes all changes but the last of them one.
fn fold(changes: &mut Vec<Record>) {
    while changes.len() > KEPT {
        let second = changes.remove(1);
        changes[0].absorb(second);
    }
}

const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();

/// A folder that only this user can change.
fn make_folder(folder: &Path) -> Result<(), JournalError> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(FileError::io("create", folder))?,
    }
    check_folder(folder)
}

fn check_folder(folder: &Path) -> Result<(), JournalError> {
    let metadata = fs::symlink_metadata(folder).map_err(FileError::io("look at", folder))?;
    let (user, mode) = (metadata.uid(), metadata.mode());
    let why = if !metadata.is_dir() {
        "it is no folder".to_owned()
    } else if user != rustix::process::geteuid().as_raw() {
        format!("it belongs to user {user}")
    } else if mode & 0o022 != 0 {
        format!("others may write it (mode {:o})", mode & 0o7777)
    } else {
        return Ok(());
    };
    let path = folder.to_owned();
    Err(JournalError::Unsafe { path, why })
}

#[cfg(test)]
mod tests {
    use super::super::knob::Knob;
    use super::*;
    use crate::units::{NodeId, PageSize};
    use std::os::unix::fs::PermissionsExt as _;

    const SIZE: PageSize = PageSize::SIZE_2M;

    fn journal(folder: &tempfile::TempDir) -> Journal {
        Journal::at(&Root::at(folder.path()), folder.path().join("jumbo/knobs"))
    }

    /// A child that another test has just forked holds the lock of one that was dropped, until it executes its program.
    fn lock(folder: &tempfile::TempDir) -> Locked {
        loop {
            match journal(folder).lock(&Group::pool(SIZE), "test") {
                Err(JournalError::Busy { .. }) => std::thread::yield_now(),
                locked => return locked.unwrap(),
            }
        }
    }

    fn plan(from: u64, to: u64) -> Plan {
        let file = FileChange {
            file: "etc/some.conf".to_owned(),
            before: (from > 0).then(|| format!("{from}\n")),
            after: Some(format!("a \"{to}\"\n'''c'''\n")),
        };
        let mut plan = Plan::new(Group::pool(SIZE));
        let mut step = Step::new(Knob::persistent(SIZE, None), from, to);
        step.after = Some(to.into());
        plan.steps.push(step);
        plan.saved.push(Saved {
            knob: Knob::persistent(SIZE, Some(NodeId(3))),
            value: from.into(),
        });
        plan.files.push(file);
        plan
    }

    /// A record of a change, begun.
    fn begun(locked: &Locked, from: u64, to: u64) -> Record {
        let record = Record::of(&plan(from, to), "jumbo");
        locked.add(&record).unwrap();
        record
    }

    fn count(locked: &Locked) -> usize {
        locked.journal.records(&locked.group).unwrap().len()
    }

    #[test]
    fn records_are_a_stack() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, locked) = (journal(&folder), lock(&folder));
        let last = |size| journal.last(&[Group::hvo(), Group::pool(size)]).unwrap();
        assert_eq!(last(SIZE), None);
        for to in [2, 3] {
            begun(&locked, 1, to);
            let record = locked.last().unwrap().unwrap();
            assert_eq!(record.steps[0].to, to.into());
            assert_eq!(last(SIZE).as_ref(), Some(&record));
        }
        assert_eq!((last(PageSize::SIZE_1G), count(&locked)), (None, 2));
        locked.forget_last().unwrap();
        assert_eq!(last(SIZE).unwrap().steps[0].to, 2.into());
        let file = locked.journal.folder.join(&locked.group.id).join(FILE);
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn all_but_the_last_become_one_and_none_while_the_last_may_be_put_back() {
        let folder = tempfile::tempdir().unwrap();
        let locked = lock(&folder);
        for to in 1..9 {
            let mut record = begun(&locked, to - 1, to);
            assert_eq!(count(&locked) as u64, to.min(3));
            locked.finish(&mut record).unwrap();
            assert_eq!(count(&locked) as u64, to.min(2));
        }
        let last = locked.last().unwrap().unwrap();
        assert_eq!(last.saved[0].value, 7.into());
        locked.forget_last().unwrap();
        let first = locked.last().unwrap().unwrap();
        assert_eq!(
            (&first.saved[0].value, &first.steps[0].to),
            (&0.into(), &7.into())
        );
        assert_eq!((first.saved.len(), first.steps.len()), (1, 1));
        assert_eq!(first.command, "jumbo, and what followed");
        assert_eq!(first.files[0].before, None);
        assert!(first.files[0].after.as_ref().unwrap().contains('7'));
    }

    #[test]
    fn one_at_a_time_and_the_other_is_told_which() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        let held = journal.lock(&Group::pool(SIZE), "jumbo pool grow 2M 1");
        let refused = journal.lock(&Group::pool(SIZE), "other").unwrap_err();
        let text = refused.to_string();
        assert!(
            text.contains(&std::process::id().to_string()) && text.contains("pool grow"),
            "{text}"
        );
        assert!(journal.lock(&Group::thp(), "other").is_ok());
        drop(held);
        assert!(journal.lock(&Group::pool(SIZE), "other").is_ok());
    }

    #[test]
    fn the_next_one_clears_what_was_cut_short() {
        let folder = tempfile::tempdir().unwrap();
        let locked = lock(&folder);
        begun(&locked, 1, 2);
        let left = locked.journal.folder.join("pool-2M/changes.toml.jumbo-new");
        fs::write(&left, "version = ").unwrap();
        drop(locked);
        let locked = lock(&folder);
        assert!(!left.exists() && locked.last().unwrap().is_some());
    }

    #[test]
    fn a_record_of_another_boot_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let locked = lock(&folder);
        begun(&locked, 1, 2);
        drop(locked);
        let boot = folder.path().join("proc/sys/kernel/random");
        fs::create_dir_all(&boot).unwrap();
        fs::write(boot.join("boot_id"), "another\n").unwrap();
        assert_eq!(lock(&folder).last().unwrap(), None);
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        drop(lock(&folder));
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(folder.path().join("jumbo/knobs/pool-2M"), open).unwrap();
        let refused = journal.lock(&Group::pool(SIZE), "test").unwrap_err();
        assert!(refused.to_string().contains("mode 777"), "{refused}");
        assert!(matches!(
            journal.last(&[Group::pool(SIZE)]),
            Err(JournalError::Unsafe { .. })
        ));
    }
}
