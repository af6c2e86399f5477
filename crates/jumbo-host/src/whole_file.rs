//! Writes of files: atomic ones, also across a crash ([`write()`]), and of existing files in place
//! ([`write_in_place`]).
//!
//! The content of an atomic write goes to a temporary file in the same folder, which is then
//! renamed. `knobs` writes records and boot files so.
//!
//! Invariant: a new file is made with O_EXCL, and no symbolic link of another user is followed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, openat, readlinkat, renameat_with};
use rustix::io::Errno;

const TEMPORARY_EXTENSION: &str = "jumbo-new";
const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();
/// Maximum number of links that the kernel follows in a path.
const MAXSYMLINKS: usize = 40;

/// Treatment of an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// The content is replaced, and on disk when the call returns. The caller holds a lock that
    /// every writer of the file takes.
    Replace,
    /// The content is replaced. Other processes may write the file meanwhile: the last one counts.
    Publish,
    /// The file stays, and the call fails with [`io::ErrorKind::AlreadyExists`].
    Keep,
}

/// Writes `content` to `path`; `mode` is that of a new file, less the umask.
///
/// # Errors
/// Errors of open(2), write(2), fsync(2) and rename(2), and of [`behind_links`]; an existing path that
/// is no regular file. `path` is unchanged then.
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
    let path = &match existing {
        Existing::Keep => path.to_owned(),
        Existing::Replace | Existing::Publish => replaceable(path)?,
    };
    let temporary = match existing {
        Existing::Replace => clear(path),
        Existing::Publish | Existing::Keep => own_temporary(path),
    };
    let mut file = create(&temporary, mode)?;
    let written = content(&mut file).and_then(|()| match existing {
        Existing::Replace => {
            file.sync_all()?;
            fs::rename(&temporary, path)
        }
        Existing::Publish => fs::rename(&temporary, path),
        Existing::Keep => rename_new(&temporary, path),
    });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    match existing {
        Existing::Replace => written.and_then(|()| sync_folder_of(path)),
        Existing::Publish | Existing::Keep => written,
    }
}

/// Tests that the folder of `path` takes new files.
///
/// # Errors
/// Errors of open(2) and unlink(2).
pub fn probe(path: &Path) -> io::Result<()> {
    let temporary = own_temporary(path);
    create(&temporary, 0o600)?;
    fs::remove_file(temporary)
}

/// Writes `content` to `path` as a shell's `>` does: an existing file stays, and may be a device, a
/// pipe, or open in another process. A new file appears complete or not at all.
///
/// # Errors
/// Errors of [`behind_links`], [`write()`], open(2), write(2) and ftruncate(2).
pub fn write_in_place(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let path = &behind_links(path)?;
    let mut options = OpenOptions::new();
    options.write(true);
    if is_descriptor(path) {
        // It may have output of the program.
        return options.append(true).open(path)?.write_all(content);
    }
    let mut overwrite = || {
        let mut file = options.custom_flags(NOFOLLOW).open(path)?;
        file.write_all(content)?;
        // Not truncated first: a program may read it now.
        match file.metadata()?.is_file() {
            true => file.set_len(content.len() as u64),
            false => Ok(()),
        }
    };
    let is = |done: &io::Result<()>, kind| done.as_ref().is_err_and(|error| error.kind() == kind);
    let done = overwrite();
    if !is(&done, io::ErrorKind::NotFound) {
        return done;
    }
    let done = write(path, content, mode, Existing::Keep);
    match is(&done, io::ErrorKind::AlreadyExists) {
        true => overwrite(),
        false => done,
    }
}

/// Follows the symbolic links at `path` to a file, which may be missing. A descriptor's path stays:
/// /dev/stdout, /dev/fd/3.
///
/// # Errors
/// A link of another user: it may lead to any file of this user. Errors of open(2).
pub fn behind_links(path: &Path) -> io::Result<PathBuf> {
    let own = rustix::process::geteuid().as_raw();
    let mut path = path.to_owned();
    for _ in 0..MAXSYMLINKS {
        if is_descriptor(&path) {
            return Ok(path);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = match openat(CWD, &path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(path),
            link => File::from(link?),
        };
        let found = link.metadata()?;
        if !found.is_symlink() {
            return Ok(path);
        }
        if ![0, own].contains(&found.uid()) {
            let (path, uid) = (path.display(), found.uid());
            let why = format!("{path} is a symbolic link of another user ({uid})");
            return Err(io::Error::other(why));
        }
        let target = readlinkat(&link, c"", Vec::new())?.into_bytes();
        path = folder_of(&path).join(OsString::from_vec(target));
    }
    Err(Errno::LOOP.into())
}

/// Returns the regular file that a rename may replace, or a new one, behind the links at `path`.
fn replaceable(path: &Path) -> io::Result<PathBuf> {
    let path = behind_links(path)?;
    let is_file = match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        found => found?.is_file(),
    };
    match is_file && !is_descriptor(&path) {
        true => Ok(path),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Reports whether the path names a file descriptor or a device: only root has links in /dev.
fn is_descriptor(path: &Path) -> bool {
    let folder = fs::canonicalize(folder_of(path));
    folder.is_ok_and(|folder| folder.starts_with("/proc") || folder == Path::new("/dev"))
}

/// Path of a temporary file for `path`, which other processes may be writing too.
fn own_temporary(path: &Path) -> PathBuf {
    let extension = format!("{}.{TEMPORARY_EXTENSION}", std::process::id());
    let temporary = path.with_added_extension(extension);
    // A killed process with the same PID may have left it.
    let _ = fs::remove_file(&temporary);
    temporary
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(mode);
    options.custom_flags(NOFOLLOW).open(path)
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
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

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

    #[test]
    fn concurrent_writers_publish_whole_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jumbo.prom");
        // A file of another writer, and one left by a writer with this PID.
        fs::write(folder.path().join("jumbo.prom.jumbo-new"), "").unwrap();
        fs::write(own_temporary(&path), "part").unwrap();
        for text in ["one\n", "two\n"] {
            write(&path, text.as_bytes(), 0o644, Existing::Publish).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let missing = folder.path().join("no/file");
        assert!(write(&missing, b"", 0o644, Existing::Publish).is_err());
    }

    /// A link at a temporary name, and one of another user at the name itself.
    #[test]
    fn planted_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("victim"), "data").unwrap();
        for name in [
            "page.jumbo-new",
            &format!("page.{}.jumbo-new", std::process::id()),
        ] {
            symlink(at("victim"), at(name)).unwrap();
        }
        probe(&at("page")).unwrap();
        for existing in [Existing::Replace, Existing::Publish] {
            write(&at("page"), b"text", 0o644, existing).unwrap();
        }
        symlink("/proc/self/fd/1", at("descriptor")).unwrap();
        for special in ["/dev/full", "/dev/stdout", "descriptor", "."] {
            let error = write(&at(special), b"text", 0o644, Existing::Publish).unwrap_err();
            assert_eq!(error.to_string(), "it is no regular file", "{special}");
        }
        symlink("own", at("link")).unwrap();
        symlink(at("victim"), at("own")).unwrap();
        assert_eq!(behind_links(&at("link")).unwrap(), at("victim"));
        write_in_place(&at("link"), b"new", 0o644).unwrap();
        assert_eq!(fs::read_to_string(at("victim")).unwrap(), "new");
        // Only root may change the owner.
        if lchown(at("own"), Some(4711), None).is_ok() {
            let error = write_in_place(&at("link"), b"lost", 0o644).unwrap_err();
            assert!(
                error.to_string().contains("of another user (4711)"),
                "{error}"
            );
            assert_eq!(fs::read_to_string(at("victim")).unwrap(), "new");
        }
    }
}
