//! Atomic writes of files, also across a crash: [`write()`].
//!
//! The content goes to a temporary file in the same folder, which is then renamed. `knobs` writes
//! records and boot files so.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

const TEMPORARY_EXTENSION: &str = "jumbo-new";

/// Treatment of an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// The content is replaced, and on disk when the call returns. The caller holds a lock that
    /// every writer of the file takes.
    Replace,
    /// The file stays, and the call fails with [`io::ErrorKind::AlreadyExists`].
    Keep,
}

/// Writes `content` to `path`; `mode` is that of a new file, less the umask.
///
/// # Errors
/// Errors of open(2), write(2), fsync(2) and rename(2); `path` is unchanged then.
pub fn write(path: &Path, content: &[u8], mode: u32, existing: Existing) -> io::Result<()> {
    fill(path, mode, existing, |file| file.write_all(content))
}

/// Like [`write()`], with a function that writes the content.
///
/// # Errors
/// Errors of [`write()`] and of `content`.
pub(crate) fn fill(
    path: &Path,
    mode: u32,
    existing: Existing,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = match existing {
        Existing::Replace => clear(path),
        // Another process may be writing the same file.
        Existing::Keep => {
            path.with_added_extension(format!("{}.{TEMPORARY_EXTENSION}", std::process::id()))
        }
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

/// Removes `path`, if it exists. The removal is on disk when the function returns.
///
/// # Errors
/// Errors of unlink(2) and fsync(2).
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.and_then(|()| sync_folder_of(path)),
    }
}

/// Removes the temporary file that a killed writer of `path` left behind, and returns its path.
pub(crate) fn clear(path: &Path) -> PathBuf {
    let temporary = path.with_added_extension(TEMPORARY_EXTENSION);
    let _ = fs::remove_file(&temporary);
    temporary
}

/// Renames with RENAME_NOREPLACE, or with link(2) on file systems that lack it.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(from, to).and_then(|()| fs::remove_file(from))
        }
        done => Ok(done?),
    }
}

/// Syncs the folder of `path`, which has its name.
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
    fn existing_file_is_replaced_or_kept_without_temporary_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let text = || fs::read_to_string(&path).unwrap();
        write(&path, b"one", 0o600, Existing::Keep).unwrap();
        let kept = write(&path, b"two", 0o600, Existing::Keep).unwrap_err();
        assert_eq!(kept.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(text(), "one");
        fs::write(clear(&path), "left behind").unwrap();
        write(&path, b"three", 0o600, Existing::Replace).unwrap();
        assert_eq!(text(), "three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
    }
}
