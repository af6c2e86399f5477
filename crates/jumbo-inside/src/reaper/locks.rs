//! Locks and leases that belong to an open file, and so to its mappings: [`any_listed`], [`any_of_descriptors`],
//! [`is_locked`].
//!
//! flock(2), and F_OFD_SETLK and F_SETLEASE of fcntl(2). Locks of F_SETLK belong to the process, and end with
//! it. /proc/locks (proc_locks(5)) tells those of all files, also of one whose descriptor was closed when it
//! was mapped; but none whose taker has ended, or is in a PID namespace that is not seen from here. What
//! /proc/PID/fdinfo tells of the caller's own descriptors is whole, also for a lock that another process took.
//!
//! To open /proc/locks takes ten milliseconds and more: the kernel waits until no CPU is amid a change of a lock
//! (`percpu_down_write` in `locks_start`).

use core::mem::MaybeUninit;
use rustix::fd::{AsFd, BorrowedFd};

use rustix::fs::RawDir;
use rustix::io::{Errno, Result};
use rustix::path::DecInt;

use crate::proc::{self, File};

/// The descriptors of the calling thread: what they are, and what is to be said of each. Linux 3.17.
const NAMES: &core::ffi::CStr = c"/proc/thread-self/fd";
const DETAILS: &core::ffi::CStr = c"/proc/thread-self/fdinfo";

/// How a line of the details begins that tells of a lock; Linux 4.1. What follows is as in /proc/locks.
const LOCK: &[u8] = b"lock:";

/// Whether `asked` says so of any of the locked files of all processes, some of which are passed at a time. Slow.
///
/// # Errors
/// /proc cannot be read, or what `asked` returns.
pub(super) fn any_listed(asked: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
    let mut batch = Batch::new(asked);
    Ok(proc::each_line(proc::open(c"/proc/locks")?, |line| batch.add(line))? || batch.ask()?)
}

/// The same of the files that the calling thread has descriptors of.
///
/// # Errors
/// As for [`any_listed`].
pub(super) fn any_of_descriptors(asked: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
    let mut batch = Batch::new(asked);
    Ok(each_of_descriptors(|line| batch.add(line))? || batch.ask()?)
}

/// Whether the open file that a descriptor of the calling thread's stands for is locked. Where /proc does not
/// tell, it is.
pub fn is_locked(descriptor: BorrowedFd<'_>) -> bool {
    let lines = || {
        let name = DecInt::from_fd(descriptor);
        let file = proc::open_at(proc::open(DETAILS)?, name.as_c_str())?;
        proc::each_line(file, |line| Ok(own(line).and_then(locked_file).is_some()))
    };
    lines().unwrap_or(true)
}

/// Files that are asked about together, since each time is a look at all mappings.
struct Batch<Asked> {
    files: [File; 32],
    count: usize,
    asked: Asked,
}

impl<Asked: FnMut(&[File]) -> Result<bool>> Batch<Asked> {
    const fn new(asked: Asked) -> Self {
        Self {
            files: [((0, 0), 0); 32],
            count: 0,
            asked,
        }
    }

    fn add(&mut self, line: &[u8]) -> Result<bool> {
        if let (Some(file), Some(place)) = (locked_file(line), self.files.get_mut(self.count)) {
            *place = file;
            self.count += 1;
        }
        if self.count < self.files.len() {
            return Ok(false);
        }
        self.ask()
    }

    fn ask(&mut self) -> Result<bool> {
        let files = self.files.get(..core::mem::take(&mut self.count));
        let files = files.unwrap_or_default();
        Ok(!files.is_empty() && (self.asked)(files)?)
    }
}

/// Calls `each` with the locks of all descriptors that stand for a file with a path, until it says that it has
/// seen enough. What another thread closes meanwhile is passed over.
fn each_of_descriptors(mut each: impl FnMut(&[u8]) -> Result<bool>) -> Result<bool> {
    let (names, details) = (proc::open(NAMES)?, proc::open(DETAILS)?);
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(names.as_fd(), &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let number = entry.file_name();
        // Sockets and pipes have none, and a server may have many of them. `.` and `..` are no links.
        let mut start = [0u8; 1];
        if rustix::fs::readlinkat_raw(&names, number, &mut start[..]).is_err() || start != *b"/" {
            continue;
        }
        let file = match proc::open_at(&details, number) {
            Err(Errno::NOENT) => continue,
            file => file?,
        };
        if proc::each_line(file, |line| own(line).map_or(Ok(false), &mut each))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What a line of the details says of a lock.
fn own(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(LOCK)
}

/// The file of a line of /proc/locks whose lock belongs to an open file.
fn locked_file(line: &[u8]) -> Option<File> {
    let mut words = line
        .split(|byte| [b' ', b'\t'].contains(byte))
        .filter(|word| !word.is_empty());
    let kind = words.nth(1)?;
    if ![b"FLOCK".as_slice(), b"OFDLCK", b"LEASE"].contains(&kind) {
        return None;
    }
    let mut numbers = words.nth(3)?.split(|byte| *byte == b':');
    let mut number = |radix: u32| {
        let digits = core::str::from_utf8(numbers.next()?).ok()?;
        u64::from_str_radix(digits, radix).ok()
    };
    Some(((number(16)?, number(16)?), number(10)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(mut asked: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
        Ok(any_listed(&mut asked)? || any_of_descriptors(asked)?)
    }

    #[test]
    fn locks_of_open_files_are_told_from_those_of_processes() {
        let flock = locked_file(b"1: FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF");
        assert_eq!(flock, Some(((0xfe, 0x0a), 5678)));
        let ofd = locked_file(b"12: OFDLCK ADVISORY  READ -1 00:19:7 100 200");
        assert_eq!(ofd, Some(((0, 0x19), 7)));
        let lease = locked_file(b"3: LEASE  ACTIVE    READ  12 00:19:8 0 EOF");
        assert_eq!(lease, Some(((0, 0x19), 8)));
        let detail = own(b"lock:\t1: FLOCK  ADVISORY  WRITE 0 00:2b:9 0 EOF").unwrap();
        assert_eq!(locked_file(detail), Some(((0, 0x2b), 9)));
        assert_eq!(own(b"mnt_id:\t29"), None);
        for other in [
            "1: POSIX  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: -> FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: FLOCK",
            "",
        ] {
            assert_eq!(locked_file(other.as_bytes()), None, "{other}");
        }
    }

    /// More files than are asked about at once.
    #[test]
    fn every_locked_file_is_asked_about() {
        let files: Vec<_> = (0..70).map(|_| tempfile::tempfile().unwrap()).collect();
        let seen = || {
            let mut seen = std::collections::HashSet::new();
            let none = any(|files| {
                seen.extend(files.iter().map(|(_, inode)| *inode));
                Ok(false)
            });
            assert!(!none.unwrap());
            seen
        };
        for file in &files {
            assert!(!is_locked(file.as_fd()));
            rustix::fs::flock(file, rustix::fs::FlockOperation::LockExclusive).unwrap();
            assert!(is_locked(file.as_fd()));
        }
        let seen = seen();
        for file in &files {
            let stat = rustix::fs::fstat(file).unwrap();
            assert!(seen.contains(&stat.st_ino), "{file:?}");
        }
        assert!(any(|_| Ok(true)).unwrap());
    }

    /// Who took it has ended: /proc/locks is silent.
    #[test]
    fn a_lock_that_a_child_took_is_seen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let shared = file.reopen().unwrap();
        let child = std::process::Command::new("flock")
            .args(["--exclusive", "0"])
            .stdin(shared.try_clone().unwrap())
            .status();
        assert!(child.unwrap().success());
        assert!(is_locked(shared.as_fd()) && !is_locked(file.as_file().as_fd()));
        let inode = rustix::fs::fstat(&shared).unwrap().st_ino;
        assert!(any(|files| Ok(files.iter().any(|(_, found)| *found == inode))).unwrap());
    }
}
