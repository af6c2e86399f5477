//! Files that set options or settings of the kernel: [`read`].
//!
//! The options of a file name other files to be written, so root obeys no file that another user
//! can write. The folder alone does not tell: HOME may be another user's (sudo -E).

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::{getegid, geteuid};

/// Maximum size of a file.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a regular file that belongs to this user or to root, and that no other user can write. An
/// open FIFO would wait for a writer, and a device is endless.
pub(crate) fn read(file: &Path) -> io::Result<String> {
    let (file, found) = open(file)?;
    let (uid, gid, mode) = (found.uid(), found.gid(), found.mode());
    let is_of_group = mode & 0o020 != 0 && ![0, getegid().as_raw()].contains(&gid);
    let why = match () {
        () if ![0, geteuid().as_raw()].contains(&uid) => format!("another user owns it ({uid})"),
        () if mode & 0o002 != 0 => String::from("all users can write it"),
        () if is_of_group => format!("another group can write it ({gid})"),
        () => return text(file),
    };
    Err(io::Error::other(why))
}

/// Reads a regular file of any owner: those below /etc are the administrator's.
pub(crate) fn read_systems(file: &Path) -> io::Result<String> {
    text(open(file)?.0)
}

fn open(file: &Path) -> io::Result<(File, std::fs::Metadata)> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(flags.bits().cast_signed());
    let file = options.open(file)?;
    let found = file.metadata()?;
    match found.is_file() {
        true => Ok((file, found)),
        false => Err(io::Error::other("it is no regular file")),
    }
}

fn text(file: File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_BYTES {
        true => Err(io::Error::other("it has more than 1 MiB")),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    #[test]
    fn files_that_others_can_write_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "text").unwrap();
        assert_eq!(read(&file).unwrap(), "text");
        let refused = |why: &str| {
            let error = read(&file).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert_eq!(read_systems(&file).unwrap(), "text");
        };
        fs::set_permissions(&file, Permissions::from_mode(0o646)).unwrap();
        refused("all users");
        fs::set_permissions(&file, Permissions::from_mode(0o664)).unwrap();
        // Only root may change the owner.
        if chown(&file, None, Some(4711)).is_ok() {
            refused("another group can write it (4711)");
            chown(&file, Some(4711), None).unwrap();
            refused("another user owns it (4711)");
        }
        let fifo = folder.path().join("fifo");
        let kind = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
        for file in [&fifo, folder.path()] {
            assert!(
                read(file)
                    .unwrap_err()
                    .to_string()
                    .contains("no regular file")
            );
        }
    }
}
