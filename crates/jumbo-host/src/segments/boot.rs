//! Files that are primed at each boot, by a systemd unit: [`persist`] and [`forget`].
//!
//! The unit is a whole file of ours, with a line for each file. It runs before the services that would read the files in small
//! folios (`Before=basic.target`), and one file that cannot be primed does not keep the others from it.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::Error;
use crate::kernel::Root;
use crate::whole_file::{self, Existing};

const FOLDER: &str = "etc/systemd/system";
const UNIT: &str = "jumbo-text-prime.service";
const WANTS: &str = "basic.target.wants";
const SYSTEMD: [&str; 2] = ["usr/lib/systemd/systemd", "lib/systemd/systemd"];

const HEAD: &str = "\
# Written by `jumbo text prime --persist`; `--forget` removes it.
[Unit]
Description=Program text in huge folios
Documentation=man:jumbo-text-prime(1)
DefaultDependencies=no
After=local-fs.target
Before=basic.target shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
# A disk or a host that does not answer does not hold the boot up.
TimeoutStartSec=60
";
const TAIL: &str = "
[Install]
WantedBy=basic.target
";

/// Has these files primed at each boot by the program `jumbo`, beside those that are so already; gives where that is written.
///
/// # Errors
/// [`Error::Io`]: [`io::ErrorKind::Unsupported`] where the host has no systemd.
pub fn persist(root: &Root, jumbo: &Path, files: &[PathBuf]) -> Result<PathBuf, Error> {
    let unit = root.path(FOLDER).join(UNIT);
    if !SYSTEMD.iter().any(|path| root.path(path).exists()) {
        let none = io::Error::new(
            io::ErrorKind::Unsupported,
            "this host has no systemd to read it at boot",
        );
        return Err(Error::io("write", &unit)(none));
    }
    change(root, |lines| {
        lines.retain(|line| !files.iter().any(|file| is_of(line, file)));
        let line =
            |file: &PathBuf| format!("ExecStart=-{} text prime {}", quoted(jumbo), quoted(file));
        lines.extend(files.iter().map(line));
    })?;
    Ok(unit)
}

/// Has these files, or with none all, not primed at boot any more; gives how many were.
///
/// # Errors
/// [`Error::Io`].
pub fn forget(root: &Root, files: &[PathBuf]) -> Result<usize, Error> {
    let mut gone = 0;
    change(root, |lines| {
        let before = lines.len();
        lines.retain(|line| !files.is_empty() && !files.iter().any(|file| is_of(line, file)));
        gone = before - lines.len();
    })?;
    Ok(gone)
}

/// Changes the lines of the unit; without any it goes.
fn change(root: &Root, lines: impl FnOnce(&mut Vec<String>)) -> Result<(), Error> {
    let folder = root.path(FOLDER);
    let (unit, link) = (folder.join(UNIT), folder.join(WANTS).join(UNIT));
    let written = || {
        // Writers of the unit come one after the other.
        fs::create_dir_all(folder.join(WANTS))?;
        let lock = fs::File::open(&folder)?;
        flock(&lock, FlockOperation::LockExclusive)?;
        let before = match fs::read_to_string(&unit) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let starts = before.lines().filter(|line| line.starts_with("ExecStart="));
        let mut starts: Vec<String> = starts.map(str::to_owned).collect();
        lines(&mut starts);
        if starts.is_empty() {
            whole_file::remove(&link)?;
            return whole_file::remove(&unit);
        }
        let text = format!("{HEAD}{}\n{TAIL}", starts.join("\n"));
        whole_file::write(&unit, text.as_bytes(), 0o644, Existing::Replace)?;
        // As `systemctl enable` makes it.
        match symlink(Path::new("..").join(UNIT), &link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    };
    written().map_err(Error::io("write", &unit))
}

/// Whether a line is about this file, whichever `jumbo` it starts.
fn is_of(line: &str, file: &Path) -> bool {
    line.ends_with(&format!(" text prime {}", quoted(file)))
}

/// As a word of a command line that systemd takes as it is (systemd.service(5)).
fn quoted(path: &Path) -> String {
    let mut word = String::from("\"");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'%' => word.push_str("%%"),
            b'$' => word.push_str("$$"),
            b'"' | b'\\' => word.extend(['\\', char::from(*byte)]),
            b' '..=b'~' => word.push(char::from(*byte)),
            other => word.push_str(&format!("\\x{other:02x}")),
        }
    }
    word.push('"');
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_added_to_the_unit_and_taken_from_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        let files = ["/usr/bin/a b", "/opt/100%/$x\"\n"].map(PathBuf::from);
        let jumbo = Path::new("/usr/bin/jumbo");
        let refused = persist(&root, jumbo, &files).unwrap_err().to_string();
        assert!(refused.contains("no systemd"), "{refused}");
        fs::create_dir_all(root.path("lib/systemd")).unwrap();
        fs::write(root.path(SYSTEMD[1]), "").unwrap();
        let unit = persist(&root, jumbo, &files[..1]).unwrap();
        persist(&root, Path::new("/opt/jumbo"), &files).unwrap();
        let text = fs::read_to_string(&unit).unwrap();
        let starts = text.lines().filter(|line| line.starts_with("Exec"));
        assert_eq!(
            starts.collect::<Vec<_>>(),
            [
                r#"ExecStart=-"/opt/jumbo" text prime "/usr/bin/a b""#,
                r#"ExecStart=-"/opt/jumbo" text prime "/opt/100%%/$$x\"\x0a""#,
            ]
        );
        let link = root.path(FOLDER).join(WANTS).join(UNIT);
        assert_eq!(fs::read_to_string(&link).unwrap(), text);
        assert_eq!(forget(&root, &files[1..]).unwrap(), 1);
        assert_eq!(forget(&root, &files[1..]).unwrap(), 0);
        assert!(unit.exists());
        assert_eq!(forget(&root, &[]).unwrap(), 1);
        assert!(!unit.exists() && fs::symlink_metadata(link).is_err());
    }
}
