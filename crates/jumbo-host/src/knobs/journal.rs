//! The values before each change, kept until it is undone: [`Journal`].
//!
//! A folder for each [`Group`] has one file with at most three records, the latest last: all older
//! changes merged into one, the last finished change, and one that is under way or was interrupted.
//! `--undo` restores the latest, so two undos restore the values before any change of ours. The
//! file is written atomically before the first knob ([`whole_file`]): it survives SIGKILL at every
//! point, and an interrupted change has a record like any other.
//!
//! The folder is in /run, which a boot empties, as it resets the knobs. Where /run outlives the
//! boot (a container), the boot ID in the file differs.
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

use super::knob::Form;
use super::known::Group;
use super::plan::{Plan, Saved, Step};
use crate::kernel::{FileError, Root};
use crate::whole_file::{self, Existing};

/// The records of all groups.
#[derive(Clone, Debug)]
pub struct Journal {
    folder: PathBuf,
    boot: Option<String>,
}

/// Lock of one group of knobs. The kernel releases it when the process dies.
#[derive(Debug)]
pub struct Locked {
    journal: Journal,
    group: Group,
    _lock: File,
}

/// Content of a group's file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Changes {
    version: u32,
    /// Boot ID (proc_sys_kernel(5)).
    boot: Option<String>,
    /// The latest last.
    #[serde(default)]
    changes: Vec<Record>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The changed group.
    pub group: Group,
    /// The command that made the change.
    pub command: String,
    /// Process ID of the command.
    pub pid: u32,
    /// Time of the change, in nanoseconds since boot.
    pub since_boot_ns: u64,
    /// False from before the first write until after the last: values of an unfinished change may
    /// be those before, after, or between.
    pub finished: bool,
    /// The writes.
    pub steps: Vec<Step>,
    /// The values that restore the knobs.
    pub saved: Vec<Saved>,
    /// The values of the same knobs after the change, which may be more than the written ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<Saved>,
}

/// Errors of the journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file of the journal cannot be used, or is no record.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another user could forge records, whose values this process would write.
    #[error("will not use {}: {why}", path.display())]
    Unsafe {
        /// The folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Another process changes this group.
    #[error("{group} is being changed by process {holder}")]
    Busy {
        /// Name of the group.
        group: String,
        /// PID and command of the process.
        holder: String,
    },
}

impl Record {
    /// Returns an unfinished record of `plan`.
    pub(super) fn of(plan: &Plan, command: &str) -> Self {
        Self {
            group: plan.group.clone(),
            command: command.to_owned(),
            pid: std::process::id(),
            since_boot_ns: since_boot_ns(),
            finished: false,
            steps: plan.steps.clone(),
            saved: plan.saved.clone(),
            left: Vec::new(),
        }
    }

    /// Merges the next change into this one, which then restores the values before both.
    fn absorb(&mut self, later: Self) {
        let pages = |step: &Step| matches!(step.knob.form, Form::Pages | Form::Demote);
        if later.steps.iter().any(pages) {
            // The pages of a node change the pool's total, and vice versa.
            self.steps.retain(|step| !pages(step));
        }
        for step in later.steps {
            self.steps.retain(|own| own.knob != step.knob);
            self.steps.push(step);
        }
        for left in later.left {
            self.left.retain(|own| own.knob != left.knob);
            self.left.push(left);
        }
        for saved in later.saved {
            if self.saved.iter().all(|own| own.knob != saved.knob) {
                self.saved.push(saved);
            }
        }
        if !self.command.ends_with(FOLLOWED) {
            self.command.push_str(FOLLOWED);
        }
        self.finished &= later.finished;
    }
}

const VERSION: u32 = 4;

/// Suffix of the command of a merged record.
const FOLLOWED: &str = ", and what followed";

const FILE_NAME: &str = "changes.toml";
/// Maximum number of finished records in a file.
const MAX_FINISHED: usize = 2;

fn since_boot_ns() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Journal {
    /// Returns the journal of this user: in /run/jumbo/knobs for root, else in the user's runtime
    /// folder, as other users may own a knob. `None` without such a folder.
    pub fn of_user(root: &Root) -> Option<Self> {
        let folder = if rustix::process::geteuid().is_root() {
            root.path("run/jumbo/knobs")
        } else {
            let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
            Path::new(&own).join("jumbo/knobs")
        };
        Some(Self::at(root, folder))
    }

    /// Returns the journal in that folder.
    pub fn at(root: &Root, folder: PathBuf) -> Self {
        let boot = root.read("proc/sys/kernel/random/boot_id").ok();
        Self {
            folder,
            boot: boot.map(|id| id.trim().to_owned()),
        }
    }

    /// Locks a group, for `command`.
    ///
    /// # Errors
    /// [`JournalError::Busy`] where another process has the lock; others for an unusable folder.
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
        // A killed process may have left a temporary file.
        whole_file::clear(&folder.join(FILE_NAME));
        // For the message of other processes; optional.
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

    /// Returns the last change of any of these groups, without a lock.
    ///
    /// # Errors
    /// [`JournalError`] where the journal cannot be read or parsed.
    pub fn last(&self, groups: &[Group]) -> Result<Option<Record>, JournalError> {
        let mut last = Vec::new();
        for group in groups {
            last.extend(self.records(group)?.pop());
        }
        Ok(last.into_iter().max_by_key(|record| record.since_boot_ns))
    }

    /// Reads the records of this boot, the latest last; none where the folder is missing.
    fn records(&self, group: &Group) -> Result<Vec<Record>, JournalError> {
        Ok(self.read(group)?.changes)
    }

    fn read(&self, group: &Group) -> Result<Changes, JournalError> {
        let none = Changes {
            version: VERSION,
            boot: self.boot.clone(),
            changes: Vec::new(),
        };
        let folder = self.folder.join(&group.id);
        if folder.exists() {
            check_folder(&folder)?;
        }
        let path = folder.join(FILE_NAME);
        let text = match fs::read_to_string(&path) {
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(none),
            read => read.map_err(FileError::io("read", &path))?,
        };
        let invalid = |what| FileError::Content {
            path: path.clone(),
            what,
        };
        let changes: Changes = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if changes.version != VERSION {
            let what = format!("it is of version {}", changes.version);
            return Err(invalid(what).into());
        }
        Ok(match (&changes.boot, &self.boot) {
            (Some(then), Some(now)) if then != now => none,
            (None, _) => Changes {
                boot: none.boot,
                ..changes
            },
            // A process that cannot read the ID keeps it (/proc with subset=pid).
            _ => changes,
        })
    }
}

impl Locked {
    /// Returns the locked group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Returns the last change that was not undone.
    ///
    /// # Errors
    /// [`JournalError`] where the journal cannot be read or parsed.
    pub fn last(&self) -> Result<Option<Record>, JournalError> {
        Ok(self.journal.records(&self.group)?.pop())
    }

    /// Appends the record; it is on disk when this returns.
    pub(super) fn add(&self, record: &Record) -> Result<(), JournalError> {
        self.change(|changes| {
            merge(changes);
            changes.push(record.clone());
        })
    }

    /// Marks the record, the latest, as finished.
    pub(super) fn finish(&self, record: &mut Record) -> Result<(), JournalError> {
        record.finished = true;
        self.change(|changes| {
            changes.pop();
            changes.push(record.clone());
            merge(changes);
        })
    }

    /// Marks the latest record as unfinished.
    pub(super) fn reopen(&self) -> Result<(), JournalError> {
        self.change(|changes| {
            if let Some(last) = changes.last_mut() {
                last.finished = false;
            }
        })
    }

    /// Removes the latest record, once it is undone.
    pub(super) fn forget_last(&self) -> Result<(), JournalError> {
        self.change(|changes| drop(changes.pop()))
    }

    /// Rewrites the file; removes it when no record is left.
    fn change(&self, change: impl FnOnce(&mut Vec<Record>)) -> Result<(), JournalError> {
        let path = self.journal.folder.join(&self.group.id).join(FILE_NAME);
        let mut file = self.journal.read(&self.group)?;
        change(&mut file.changes);
        if file.changes.is_empty() {
            return Ok(whole_file::remove(&path).map_err(FileError::io("remove", &path))?);
        }
        let text = toml::to_string(&file).map_err(|error| FileError::Content {
            path: path.clone(),
            what: error.to_string(),
        })?;
        let written = whole_file::write(&path, text.as_bytes(), 0o600, Existing::Replace);
        Ok(written.map_err(FileError::io("write", &path))?)
    }
}

/// Merges all records but the last into one.
fn merge(changes: &mut Vec<Record>) {
    while changes.len() > MAX_FINISHED {
        let second = changes.remove(1);
        changes[0].absorb(second);
    }
}

const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();

/// Creates a folder that only this user can change, or checks an existing one.
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

    /// Locks the group. A child that another test forks keeps a dropped lock until execve(2).
    fn lock(folder: &tempfile::TempDir) -> Locked {
        loop {
            match journal(folder).lock(&Group::pool(SIZE), "test") {
                Err(JournalError::Busy { .. }) => std::thread::yield_now(),
                locked => return locked.unwrap(),
            }
        }
    }

    fn plan(from: u64, to: u64) -> Plan {
        let mut plan = Plan::new(Group::pool(SIZE));
        let mut step = Step::new(Knob::persistent(SIZE, None), from, to);
        step.after = Some(to.into());
        plan.steps.push(step);
        plan.saved.push(Saved {
            knob: Knob::persistent(SIZE, Some(NodeId(3))),
            value: from.into(),
        });
        plan
    }

    /// Adds an unfinished record.
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
        let file = locked.journal.folder.join(&locked.group.id).join(FILE_NAME);
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn finished_records_but_the_last_are_merged() {
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
    }

    #[test]
    fn second_lock_is_refused_with_the_holder() {
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
    fn lock_removes_temporary_files() {
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
    fn records_of_another_boot_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let locked = lock(&folder);
        begun(&locked, 1, 2);
        drop(locked);
        let boot = folder.path().join("proc/sys/kernel/random");
        fs::create_dir_all(&boot).unwrap();
        fs::write(boot.join("boot_id"), "another\n").unwrap();
        // The ID of the first record was unknown.
        let locked = lock(&folder);
        begun(&locked, 2, 3);
        drop(locked);
        // It is kept where it cannot be read.
        let id = boot.join("boot_id");
        let hidden = boot.join("hidden");
        fs::rename(&id, &hidden).unwrap();
        let locked = lock(&folder);
        begun(&locked, 3, 4);
        drop(locked);
        fs::write(&id, "third\n").unwrap();
        assert_eq!(lock(&folder).last().unwrap(), None);
        fs::rename(&hidden, &id).unwrap();
        assert!(lock(&folder).last().unwrap().is_some());
    }

    #[test]
    fn folder_that_others_can_write_is_refused() {
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
