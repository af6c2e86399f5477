//! The report file: [`check`] before the program starts, [`write()`] when it has ended.
//!
//! Invariant: an existing file is written in place, as by a shell's `>`, and never replaced by a
//! rename: it may be a device, a pipe, a link, or open in another process.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use jumbo_host::whole_file::{self, Existing};
use rustix::fs::{Access, AtFlags, CWD};

/// Maximum number of links that the kernel follows in a path.
const MAXSYMLINKS: usize = 40;

/// Checks that a report can be written to `file`, without opening it: open(2) may block on a pipe.
pub(super) fn check(file: &Path) -> io::Result<()> {
    let may = |path: &Path, access| rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS);
    match fs::metadata(file) {
        Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => Ok(may(file, Access::WRITE_OK)?),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) => match fs::read_link(file) {
            // A dangling link: its target will be created.
            Ok(link) => check(&folder(file).join(link)),
            Err(_) => Ok(may(folder(file), Access::WRITE_OK | Access::EXEC_OK)?),
        },
    }
}

/// Writes `content` to `file`. A new file appears complete or not at all.
pub(super) fn write(file: &Path, content: &[u8]) -> io::Result<()> {
    match fs::symlink_metadata(file) {
        Ok(_) => write_in_place(file, content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match whole_file::write(file, content, 0o666, Existing::Keep) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    write_in_place(file, content)
                }
                done => done,
            }
        }
        Err(error) => Err(error),
    }
}

fn write_in_place(file: &Path, content: &[u8]) -> io::Result<()> {
    let regular = match fs::metadata(file) {
        Ok(metadata) => metadata.is_file(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(error),
    };
    let mut options = OpenOptions::new();
    // A descriptor's file (/dev/stdout) has output of the program, which must not be truncated.
    match regular && !leads_through_proc(file) {
        true => options.write(true).create(true).truncate(true),
        false => options.append(true),
    };
    options.open(file)?.write_all(content)
}

/// Reports whether the path names a file descriptor: /dev/stdout, /dev/fd/3, or a link to those.
fn leads_through_proc(file: &Path) -> bool {
    let mut path = PathBuf::from(file);
    for _ in 0..MAXSYMLINKS {
        if fs::canonicalize(folder(&path)).is_ok_and(|folder| folder.starts_with("/proc")) {
            return true;
        }
        match fs::read_link(&path) {
            Ok(link) => path = folder(&path).join(link),
            Err(_) => return false,
        }
    }
    false
}

fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
