//! What was before a change, kept until it is undone: [`Journal`].
//!
//! A folder for each page size holds one file a change, numbered; the last one is what `--undo` puts
//! back. A record is whole before the first knob is written: it goes to a file of another name, to the
//! disk, and only then to its own name. So it survives SIGKILL at every point, and a change that was cut
//! short leaves a record like any other.
//!
//! The folder is in /run, which is empty after a boot, and so are the pools that the records are about.
//! Where /run outlives the boot (a container) the boot's ID, which stands in each record, tells.
//!
//! Invariant: whoever writes a record or a knob of a size holds the lock of that size.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::boot::FileChange;
use super::change::{Plan, Saved, Step};
use crate::kernel::Root;
use crate::units::PageSize;

/// How many changes of one pool can be undone, one after the other.
const KEPT: usize = 32;

/// Where the records are.
#[derive(Clone, Debug)]
pub struct Journal {
    folder: PathBuf,
    boot: Option<String>,
}

/// The right to change one pool; given back when dropped, and by the kernel when the process dies.
#[derive(Debug)]
pub struct Locked {
    folder: PathBuf,
    boot: Option<String>,
    size: PageSize,
    _lock: File,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The form of the file.
    version: u32,
    /// Its place among the changes of its size.
    #[serde(skip)]
    number: u64,
    /// The pool.
    pub size: PageSize,
    /// Who made it, in words: the command.
    pub command: String,
    /// The process.
    pub pid: u32,
    /// The boot's ID (proc_sys_kernel(5)).
    boot: Option<String>,
    /// When, in nanoseconds since boot.
    pub since_boot_ns: u64,
    /// False from before the first write until after the last: what is not finished may be anywhere
    /// between before and after.
    pub finished: bool,
    /// One of a [`Steering`](super::Steering): its steps are the last write of each knob and not all of them.
    #[serde(default)]
    pub(super) steering: bool,
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
    /// A file of the journal.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Somebody else could change the records, and have us write what they like.
    #[error("will not use {}: {why}", path.display())]
    Unsafe {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process changes this pool.
    #[error("the pool of {size} pages is being changed by process {holder}")]
    Busy {
        /// The pool.
        size: PageSize,
        /// Its PID and command.
        holder: String,
    },
    /// A record that is none.
    #[error("cannot understand {}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

impl Record {
    /// A record of what `plan` will do, not finished.
    pub(super) fn of(plan: &Plan, command: &str, locked: &Locked) -> Self {
        Self {
            version: VERSION,
            number: 0,
            size: plan.size,
            command: command.to_owned(),
            pid: std::process::id(),
            boot: locked.boot.clone(),
            since_boot_ns: since_boot_ns(),
            finished: false,
            steering: false,
            steps: plan.steps.clone(),
            saved: plan.saved.clone(),
            files: plan.files.clone(),
        }
    }

    /// It is this process's from now on.
    pub(super) fn inherit(&mut self, command: &str) {
        command.clone_into(&mut self.command);
        self.pid = std::process::id();
        self.since_boot_ns = since_boot_ns();
    }
}

const VERSION: u32 = 1;

fn since_boot_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec)
        .saturating_mul(1_000_000_000)
        .saturating_add(part(now.tv_nsec))
}

impl Journal {
    /// The journal of this user on the kernel behind `root`: /run/jumbo/pool for root, the user's own
    /// runtime folder for others, who may have been given a knob. `None` where they have no such folder.
    pub fn of_user(root: &Root) -> Option<Self> {
        let folder = if rustix::process::geteuid().is_root() {
            root.path("run/jumbo/pool")
        } else {
            let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
            Path::new(&own).join("jumbo/pool")
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

    /// The right to change the pool of `size` pages, for `command`.
    ///
    /// # Errors
    /// [`JournalError::Busy`] where another process has it; others where the folder cannot be used.
    pub fn lock(&self, size: PageSize, command: &str) -> Result<Locked, JournalError> {
        for folder in [self.folder.parent(), Some(&*self.folder)]
            .into_iter()
            .flatten()
        {
            make_folder(folder)?;
        }
        let folder = self.folder_of(size);
        make_folder(&folder)?;
        let path = folder.join("lock");
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(NOFOLLOW)
            .open(&path)
            .map_err(error("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = lock.read_to_string(&mut holder);
                let holder = holder.trim().to_owned();
                return Err(JournalError::Busy { size, holder });
            }
            Err(TryLockError::Error(source)) => return Err(error("lock", &path)(source)),
        }
        // What a process left behind that was killed while it wrote a record.
        for name in list(&folder)? {
            if name.ends_with(NEW) {
                let _ = fs::remove_file(folder.join(name));
            }
        }
        // For whoever is refused; that it cannot be written harms nobody.
        let _ = lock.set_len(0);
        let _ = lock.rewind();
        let _ = writeln!(lock, "{} (`{command}`)", std::process::id());
        Ok(Locked {
            folder,
            boot: self.boot.clone(),
            size,
            _lock: lock,
        })
    }

    /// The last change of the pool of `size` pages, or of any pool. Nothing is locked: this is for
    /// looking, and for finding out which lock to take.
    ///
    /// # Errors
    /// [`JournalError`] where the journal cannot be read or understood.
    pub fn last(&self, size: Option<PageSize>) -> Result<Option<Record>, JournalError> {
        let folders = match size {
            Some(size) => vec![self.folder_of(size)],
            None => list(&self.folder)?
                .into_iter()
                .map(|name| self.folder.join(name))
                .collect(),
        };
        let mut last: Option<Record> = None;
        for folder in folders {
            let found = newest(&folder, self.boot.as_deref())?;
            last = last
                .into_iter()
                .chain(found)
                .max_by_key(|record| record.since_boot_ns);
        }
        Ok(last)
    }

    fn folder_of(&self, size: PageSize) -> PathBuf {
        self.folder.join(format!("hugepages-{}kB", size.kib()))
    }
}

impl Locked {
    /// The pool.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// The last change that was not undone.
    ///
    /// # Errors
    /// [`JournalError`] where it cannot be read or understood.
    pub fn last(&self) -> Result<Option<Record>, JournalError> {
        newest(&self.folder, self.boot.as_deref())
    }

    /// Makes the record the last one; it is on disk when this returns.
    pub(super) fn add(&self, record: &mut Record) -> Result<(), JournalError> {
        let mut numbers = numbers(&self.folder)?;
        record.number = numbers.last().map_or(1, |last| last + 1);
        self.put(record)?;
        numbers.push(record.number);
        let surplus = numbers.len().saturating_sub(KEPT);
        for number in numbers.drain(..surplus) {
            let _ = fs::remove_file(self.folder.join(name(number)));
        }
        Ok(())
    }

    /// Writes the record anew.
    pub(super) fn put(&self, record: &Record) -> Result<(), JournalError> {
        let path = self.folder.join(name(record.number));
        let text = toml::to_string(record).map_err(|error| JournalError::Content {
            path: path.clone(),
            what: error.to_string(),
        })?;
        replace(&path, &text, 0o600).map_err(error("write", &path))
    }

    /// Forgets the record: it is undone.
    pub(super) fn remove(&self, record: &Record) -> Result<(), JournalError> {
        let path = self.folder.join(name(record.number));
        fs::remove_file(&path)
            .and_then(|()| sync_folder(&self.folder))
            .map_err(error("remove", &path))
    }
}

/// What the name of a file ends with until its content is whole.
const NEW: &str = ".jumbo-new";

/// Removes the new content of `path` that a process left behind which was killed before it had its name, and gives
/// where that would be.
pub(super) fn clear(path: &Path) -> PathBuf {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(NEW);
    let temporary = PathBuf::from(temporary);
    let _ = fs::remove_file(&temporary);
    temporary
}

/// Gives `path` a new content that is either all there or not at all, also after a crash.
pub(super) fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let temporary = clear(path);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(NOFOLLOW)
        .open(&temporary)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.and_then(|()| sync_folder(folder))
}

/// A name is on disk when its folder is.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();

fn name(number: u64) -> String {
    format!("{number:08}.toml")
}

fn error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_owned();
    move |source| JournalError::Io {
        operation,
        path,
        source,
    }
}

/// A folder that only this user can change.
fn make_folder(folder: &Path) -> Result<(), JournalError> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error("create", folder)(source));
        }
        _ => {}
    }
    check_folder(folder)
}

fn check_folder(folder: &Path) -> Result<(), JournalError> {
    let metadata = fs::symlink_metadata(folder).map_err(error("look at", folder))?;
    let refuse = |why: String| JournalError::Unsafe {
        path: folder.to_owned(),
        why,
    };
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_dir() {
        return Err(refuse("it is no folder".to_owned()));
    }
    if metadata.uid() != own {
        return Err(refuse(format!("it belongs to user {}", metadata.uid())));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(refuse(format!(
            "others may write it (mode {:o})",
            metadata.mode() & 0o7777
        )));
    }
    Ok(())
}

/// The names in a folder; none where it is not there.
fn list(folder: &Path) -> Result<Vec<String>, JournalError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(error("list", folder)(source)),
    };
    check_folder(folder)?;
    let name = |entry: io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    entries
        .map(name)
        .collect::<Result<_, _>>()
        .map_err(error("list", folder))
}

fn numbers(folder: &Path) -> Result<Vec<u64>, JournalError> {
    let names = list(folder)?;
    let number = |name: &String| name.strip_suffix(".toml")?.parse().ok();
    let mut numbers: Vec<_> = names.iter().filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The last record of this boot.
fn newest(folder: &Path, boot: Option<&str>) -> Result<Option<Record>, JournalError> {
    let Some(number) = numbers(folder)?.pop() else {
        return Ok(None);
    };
    let path = folder.join(name(number));
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        // Undone by somebody else a moment ago.
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(error("read", &path)(source)),
    };
    let content = |what: String| JournalError::Content {
        path: path.clone(),
        what,
    };
    let mut record: Record = toml::from_str(&text).map_err(|error| content(error.to_string()))?;
    if record.version != VERSION {
        return Err(content(format!("it is of version {}", record.version)));
    }
    record.number = number;
    Ok((record.boot.as_deref() == boot).then_some(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::host::change::{Knob, What};
    use crate::units::{NodeId, Pages};
    use std::os::unix::fs::PermissionsExt as _;

    fn journal(folder: &tempfile::TempDir) -> Journal {
        Journal::at(&Root::at(folder.path()), folder.path().join("jumbo/pool"))
    }

    fn plan(to: u64) -> Plan {
        let knob = |node| Knob {
            size: PageSize::SIZE_2M,
            what: What::Persistent,
            node,
        };
        Plan {
            size: PageSize::SIZE_2M,
            steps: vec![Step {
                knob: knob(None),
                before: Pages(1),
                to: Pages(to),
                after: Some(Pages(to)),
            }],
            effect: Default::default(),
            saved: vec![Saved {
                knob: knob(Some(NodeId(3))),
                value: Pages(1),
            }],
            files: vec![FileChange {
                file: "etc/some.conf".to_owned(),
                before: None,
                after: Some("a \"b\"\n'''c'''\n".to_owned()),
            }],
        }
    }

    #[test]
    fn records_are_a_stack() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        assert_eq!(journal.last(None).unwrap(), None);
        let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
        let mut records = [2, 3].map(|to| Record::of(&plan(to), "jumbo pool set", &locked));
        for record in &mut records {
            locked.add(record).unwrap();
        }
        assert_eq!(locked.last().unwrap().as_ref(), Some(&records[1]));
        assert_eq!(journal.last(None).unwrap().as_ref(), Some(&records[1]));
        assert_eq!(journal.last(Some(PageSize::SIZE_1G)).unwrap(), None);
        records[1].finished = true;
        locked.put(&records[1]).unwrap();
        assert_eq!(locked.last().unwrap().as_ref(), Some(&records[1]));
        locked.remove(&records[1]).unwrap();
        assert_eq!(locked.last().unwrap().as_ref(), Some(&records[0]));
        let file = locked.folder.join(name(1));
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn old_records_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let locked = journal(&folder).lock(PageSize::SIZE_2M, "test").unwrap();
        for to in 2..50 {
            locked
                .add(&mut Record::of(&plan(to), "jumbo", &locked))
                .unwrap();
        }
        assert_eq!(numbers(&locked.folder).unwrap().len(), KEPT);
        assert_eq!(locked.last().unwrap().unwrap().steps[0].to, Pages(49));
    }

    #[test]
    fn one_at_a_time_and_the_other_is_told_who() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        let held = journal
            .lock(PageSize::SIZE_2M, "jumbo pool auto 2M")
            .unwrap();
        let refused = journal.lock(PageSize::SIZE_2M, "other").unwrap_err();
        let text = refused.to_string();
        assert!(
            text.contains(&std::process::id().to_string()) && text.contains("pool auto"),
            "{text}"
        );
        assert!(journal.lock(PageSize::SIZE_1G, "other").is_ok());
        drop(held);
        assert!(journal.lock(PageSize::SIZE_2M, "other").is_ok());
    }

    #[test]
    fn the_next_one_clears_what_was_cut_short() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        let locked = journal.lock(PageSize::SIZE_2M, "test").unwrap();
        locked
            .add(&mut Record::of(&plan(2), "jumbo", &locked))
            .unwrap();
        let left = locked.folder.join(format!("{}{NEW}", name(2)));
        fs::write(&left, "version = ").unwrap();
        drop(locked);
        let locked = journal.lock(PageSize::SIZE_2M, "next").unwrap();
        assert!(!left.exists() && locked.last().unwrap().is_some());
    }

    #[test]
    fn a_record_of_another_boot_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let locked = journal(&folder).lock(PageSize::SIZE_2M, "test").unwrap();
        locked
            .add(&mut Record::of(&plan(2), "jumbo", &locked))
            .unwrap();
        drop(locked);
        let boot = folder.path().join("proc/sys/kernel/random");
        fs::create_dir_all(&boot).unwrap();
        fs::write(boot.join("boot_id"), "another\n").unwrap();
        assert_eq!(journal(&folder).last(None).unwrap(), None);
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let journal = journal(&folder);
        drop(journal.lock(PageSize::SIZE_2M, "test").unwrap());
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(folder.path().join("jumbo/pool"), open).unwrap();
        let refused = journal.lock(PageSize::SIZE_2M, "test").unwrap_err();
        assert!(refused.to_string().contains("mode 777"), "{refused}");
        assert!(matches!(
            journal.last(None),
            Err(JournalError::Unsafe { .. })
        ));
    }
}
