//! A file that has all of its content or was not touched, after a crash too: [`write()`].
//!
//! The content goes to a file of another name beside it, which then takes the name. It uses no other module; `knobs` writes
//! records and boot files with it.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// What the name of a file ends with until its content is whole.
pub(crate) const NEW: &str = ".jumbo-new";

/// What becomes of a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    let mut temporary = tempfile::Builder::new();
    let name = path.file_name().unwrap_or_default();
    temporary
        .prefix(name)
        .suffix(NEW)
        .permissions(Permissions::from_mode(mode));
    if existing == Existing::Replace {
        // Else another process may be writing the same file.
        clear(path);
        temporary.rand_bytes(0);
    }
    let mut file = temporary.tempfile_in(folder_of(path))?;
    content(file.as_file_mut())?;
    let named = match existing {
        Existing::Replace => {
            file.as_file().sync_all()?;
            file.persist(path)
        }
        Existing::Keep => file.persist_noclobber(path),
    };
    named.map_err(|error| error.error)?;
    match existing {
        Existing::Replace => File::open(folder_of(path))?.sync_all(),
        Existing::Keep => Ok(()),
    }
}

/// Removes `path`; no file is no error. It is gone from the disk when this returns.
///
/// # Errors
/// Those of unlink(2) and fsync(2).
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // A name is on disk when its folder is.
        done => done.and_then(|()| File::open(folder_of(path))?.sync_all()),
    }
}

/// Removes the new content of `path` that a process left behind which was killed before the content had its name.
pub(crate) fn clear(path: &Path) {
    let _ = fs::remove_file(with_ending(path));
}

fn with_ending(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(NEW);
    PathBuf::from(name)
}

fn folder_of(path: &Path) -> &Path {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
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
        fs::write(with_ending(&path), "left behind").unwrap();
        write(&path, b"three", 0o600, Existing::Replace).unwrap();
        assert_eq!(text(), "three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
    }
}
