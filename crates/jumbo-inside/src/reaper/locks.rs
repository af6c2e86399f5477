//! Locks and leases of open files, which mappings keep: [`any_listed`], [`any_of_descriptors`],
//! [`is_locked`].
//!
//! They are those of flock(2), and of F_OFD_SETLK and F_SETLEASE of fcntl(2); locks of F_SETLK end
//! with the process. /proc/locks (proc_locks(5)) lists the locks of all files, also of a mapped one
//! without a descriptor, but none whose owner has ended or is in a PID namespace that is not
//! visible here. /proc/PID/fdinfo is complete for the caller's own descriptors.
//!
//! Opening /proc/locks takes ten milliseconds and more: the kernel waits until no CPU changes a
//! lock (`percpu_down_write` in `locks_start`).

use core::mem::MaybeUninit;
use rustix::fd::{AsFd, BorrowedFd};

use rustix::fs::RawDir;
use rustix::io::{Errno, Result};
use rustix::path::DecInt;

use jumbo_sys::maps::File;
use jumbo_sys::proc;

/// Links of the calling thread's descriptors; Linux 3.17.
const LINKS: &core::ffi::CStr = c"/proc/thread-self/fd";
/// Details of the calling thread's descriptors; Linux 3.17.
const DETAILS: &core::ffi::CStr = c"/proc/thread-self/fdinfo";

/// Key of a lock in the details (Linux 4.1); the value is a line as in /proc/locks.
const LOCK: &[u8] = b"lock:";

/// Reports whether `matches` holds for any locked file of all processes; it takes several at a
/// time. Slow.
///
/// # Errors
/// /proc is not readable, or the error of `matches`.
pub(super) fn any_listed(matches: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
    let mut batch = FileBatch::new(matches);
    Ok(proc::each_line(proc::open(c"/proc/locks")?, |line| batch.add(line))? || batch.check()?)
}

/// Variant of [`any_listed`] for files of the calling thread's descriptors.
///
/// # Errors
/// As for [`any_listed`].
pub(super) fn any_of_descriptors(matches: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
    let mut batch = FileBatch::new(matches);
    Ok(each_of_descriptors(|line| batch.add(line))? || batch.check()?)
}

/// Reports whether the open file of a descriptor is locked. True if /proc is not readable.
pub fn is_locked(descriptor: BorrowedFd<'_>) -> bool {
    let lines = || {
        let name = DecInt::from_fd(descriptor);
        let file = proc::open_at(proc::open(DETAILS)?, name.as_c_str())?;
        proc::each_line(file, |line| {
            Ok(lock_of(line).and_then(locked_file).is_some())
        })
    };
    lines().unwrap_or(true)
}

/// Files to check together, since each check reads all mappings.
struct FileBatch<Matches> {
    files: [File; 32],
    count: usize,
    matches: Matches,
}

impl<Matches: FnMut(&[File]) -> Result<bool>> FileBatch<Matches> {
    const fn new(matches: Matches) -> Self {
        Self {
            files: [((0, 0), 0); 32],
            count: 0,
            matches,
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
        self.check()
    }

    fn check(&mut self) -> Result<bool> {
        let files = self.files.get(..core::mem::take(&mut self.count));
        let files = files.unwrap_or_default();
        Ok(!files.is_empty() && (self.matches)(files)?)
    }
}

/// Calls `each` with the locks of all descriptors with a path, until it returns true. Skips
/// descriptors that another thread closes meanwhile.
fn each_of_descriptors(mut each: impl FnMut(&[u8]) -> Result<bool>) -> Result<bool> {
    let (links, details) = (proc::open(LINKS)?, proc::open(DETAILS)?);
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(links.as_fd(), &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let number = entry.file_name();
        // Sockets and pipes, of which a server may have many, have no path. `.` and `..` are no
        // links.
        let mut start = [0u8; 1];
        if rustix::fs::readlinkat_raw(&links, number, &mut start[..]).is_err() || start != *b"/" {
            continue;
        }
        let file = match proc::open_at(&details, number) {
            Err(Errno::NOENT) => continue,
            file => file?,
        };
        if proc::each_line(file, |line| lock_of(line).map_or(Ok(false), &mut each))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the lock in a line of the details.
fn lock_of(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(LOCK)
}

/// Returns the file of a line of /proc/locks, if the lock belongs to an open file.
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

    fn any(mut matches: impl FnMut(&[File]) -> Result<bool>) -> Result<bool> {
        Ok(any_listed(&mut matches)? || any_of_descriptors(matches)?)
    }

    #[test]
    fn only_locks_of_open_files_count() {
        let flock = locked_file(b"1: FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF");
        assert_eq!(flock, Some(((0xfe, 0x0a), 5678)));
        let ofd = locked_file(b"12: OFDLCK ADVISORY  READ -1 00:19:7 100 200");
        assert_eq!(ofd, Some(((0, 0x19), 7)));
        let lease = locked_file(b"3: LEASE  ACTIVE    READ  12 00:19:8 0 EOF");
        assert_eq!(lease, Some(((0, 0x19), 8)));
        let detail = lock_of(b"lock:\t1: FLOCK  ADVISORY  WRITE 0 00:2b:9 0 EOF").unwrap();
        assert_eq!(locked_file(detail), Some(((0, 0x2b), 9)));
        assert_eq!(lock_of(b"mnt_id:\t29"), None);
        for other in [
            "1: POSIX  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: -> FLOCK  ADVISORY  WRITE 1234 fe:0a:5678 0 EOF",
            "1: FLOCK",
            "",
        ] {
            assert_eq!(locked_file(other.as_bytes()), None, "{other}");
        }
    }

    /// Uses more files than a batch holds.
    #[test]
    fn every_locked_file_is_checked() {
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

    /// /proc/locks omits the lock, whose owner has ended.
    #[test]
    fn a_lock_of_a_child_is_detected() {
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
