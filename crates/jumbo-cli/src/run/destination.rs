//! Where a report file goes: [`check`] before the program starts, [`write`] when it has ended.
//!
//! Invariant: what exists is written to in place, as a shell's `>` does, and nothing is ever
//! renamed over it: it may be a device, a pipe, a link, or a file that another process holds open.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use jumbo_host::whole_file::{self, Existing};
use rustix::fs::{Access, AtFlags, CWD};

/// Links that the kernel follows in a path (MAXSYMLINKS).
const LINKS: usize = 40;

/// Whether a report can be written to `file`. Nothing is opened: that could wait for a pipe's
/// reader.
pub(super) fn check(file: &Path) -> io::Result<()> {
    let may = |path: &Path, access| rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS);
    match fs::metadata(file) {
        Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => Ok(may(file, Access::WRITE_OK)?),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) => match fs::read_link(file) {
            // A link to nothing: what it points to will be made.
            Ok(link) => check(&folder(file).join(link)),
            Err(_) => Ok(may(folder(file), Access::WRITE_OK | Access::EXEC_OK)?),
        },
    }
}

/// Writes `content` to `file`. A file that is not there yet appears complete or not at all.
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
    // A descriptor's file (/dev/stdout) holds what the program wrote; that must not be cut off.
    match regular && !leads_through_proc(file) {
        true => options.write(true).create(true).truncate(true),
        false => options.append(true),
    };
    options.open(file)?.write_all(content)
}

/// True where the path names a descriptor: /dev/stdout, /dev/fd/3, a link to those.
fn leads_through_proc(file: &Path) -> bool {
    let mut path = PathBuf::from(file);
    for _ in 0..LINKS {
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
