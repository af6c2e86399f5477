//! A file that has all of its content or was not touched, after a crash too: [`write()`].
//!
//! The content goes to a file of another name beside it, which then takes the name. It uses no other module; `knobs` writes
//! records and boot files with it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

/// What the name of a file ends with until its content is whole.
pub(crate) const NEW: &str = ".jumbo-new";

/// What becomes of a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// It gets the new content. The caller holds a lock that every writer of the file takes, and the content is on
    /// disk when the call returns.
    Replace,
    /// It stays, and the call fails with [`io::ErrorKind::AlreadyExists`].
    Keep,
}

/// Writes `content` to `path`; `mode` is that of a new file, less the umask.
///
/// # Errors
/// Those of open(2), write(2), fsync(2) and rename(2); `path` is as it was then.
pub fn write(path: &Path, content: &[u8], mode: u32, existing: Existing) -> io::Result<()> {
    fill(path, mode, existing, |file| file.write_all(content))
}

/// The same of what `content` writes.
///
/// # Errors
/// As [`write()`], and those of `content`.
pub(crate) fn fill(
    path: &Path,
    mode: u32,
    existing: Existing,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = match existing {
        Existing::Replace => clear(path),
        // Another process may be writing the same file.
        Existing::Keep => with_ending(path, &format!(".{}{NEW}", std::process::id())),
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(&temporary)?;
    let written = content(&mut file).and_then(|()| match existing {
        Existing::Replace => {
            file.sync_all()?;
            fs::rename(&temporary, path)
        }
        Existing::Keep => rename_new(&temporary, path),
    });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    match existing {
        Existing::Replace => written.and_then(|()| sync_folder_of(path)),
        Existing::Keep => written,
    }
}

/// Removes `path`; no file is no error. It is gone from the disk when this returns.
///
/// # Errors
/// Those of unlink(2) and fsync(2).
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.and_then(|()| sync_folder_of(path)),
    }
}

/// Removes the new content of `path` that a process left behind which was killed before the content had its name, and
/// gives where that would be.
pub(crate) fn clear(path: &Path) -> PathBuf {
    let temporary = with_ending(path, NEW);
    let _ = fs::remove_file(&temporary);
    temporary
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// rename(2) that replaces nothing; not every file system has that.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(from, to).and_then(|()| fs::remove_file(from))
        }
        done => Ok(done?),
    }
}

/// A name is on disk when its folder is.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_or_kept_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let text = || fs::read_to_string(&path).unwrap();
        write(&path, b"one", 0o600, Existing::Keep).unwrap();
        let kept = write(&path, b"two", 0o600, Existing::Keep).unwrap_err();
        assert_eq!(kept.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(text(), "one");
        fs::write(with_ending(&path, NEW), "left behind").unwrap();
        write(&path, b"three", 0o600, Existing::Replace).unwrap();
        assert_eq!(text(), "three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
    }
}
