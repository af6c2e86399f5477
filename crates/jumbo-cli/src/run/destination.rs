//! The report file: [`check`] before the program starts, `whole_file::write_in_place` when it has
//! ended.

use std::fs;
use std::io;
use std::path::Path;

use jumbo_host::whole_file;
use rustix::fs::{Access, AtFlags, CWD};

/// Checks that a report can be written to `file`, without opening it: open(2) may block on a pipe.
pub(super) fn check(file: &Path) -> io::Result<()> {
    let may = |path: &Path, access| rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS);
    let file = whole_file::behind_links(file)?;
    match fs::metadata(&file) {
        Ok(metadata) if metadata.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(_) => Ok(may(&file, Access::WRITE_OK)?),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) => {
            let folder = file
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            Ok(may(folder, Access::WRITE_OK | Access::EXEC_OK)?)
        }
    }
}
