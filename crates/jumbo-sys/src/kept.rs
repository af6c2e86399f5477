//! Files that are read again and again: [`open`]. A process that confines itself keeps them open:
//! [`keep`], [`shut`].
//!
//! The process beside the program (`watch::sibling`) may open no file once it is confined. Before,
//! it reads each file that it will need, and [`open`] keeps the descriptor in a table by the file's
//! path. From then on [`open`] returns these alone. A file that is missing in the table is an error,
//! and [`has_missed`] reports it: another process may find the file before it confines itself.
//!
//! The table is in the memory that the process shares with the program. Its thread pointer tells
//! whose it is.
#![expect(unsafe_code, reason = "borrows descriptors that stay open")]

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use rustix::fd::{AsFd, AsRawFd as _, BorrowedFd, IntoRawFd as _, OwnedFd};
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::{Errno, Result};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::thread_pointer;

/// Most files that are kept: each level of a cgroup has four, in two places.
const MAX_FILES: usize = 128;

/// A kept file: the hash of its path, and its descriptor or the negative errno of open(2).
struct Kept {
    path: AtomicU64,
    answer: AtomicI32,
}

static FILES: [Kept; MAX_FILES] = [const {
    Kept {
        path: AtomicU64::new(0),
        answer: AtomicI32::new(0),
    }
}; MAX_FILES];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Thread pointer of the process that keeps files; 0: none.
static KEEPER: AtomicUsize = AtomicUsize::new(0);
static IS_SHUT: AtomicBool = AtomicBool::new(false);
static HAS_MISSED: AtomicBool = AtomicBool::new(false);

/// Raises the soft limit of descriptors (RLIMIT_NOFILE) to the hard one; children inherit it.
pub fn raise_descriptors() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    let _ = setrlimit(Resource::Nofile, files);
}

/// An open file, at its start.
#[derive(Debug)]
pub enum File {
    /// Closed in the end.
    Own(OwnedFd),
    /// Stays open.
    Kept(BorrowedFd<'static>),
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(file) => file.as_fd(),
            Self::Kept(file) => file.as_fd(),
        }
    }
}

/// Opens a file for reading.
///
/// # Errors
/// Those of open(2). `EMFILE`: the caller is confined, and keeps no such file.
pub fn open(path: &CStr) -> Result<File> {
    match is_keeper() {
        true => kept(path),
        false => open_anew(path).map(File::Own),
    }
}

fn open_anew(path: &CStr) -> Result<OwnedFd> {
    // openat(2), as the dynamic loader: a filter may not allow open(2).
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::openat(rustix::fs::CWD, path, flags, Mode::empty())
}

fn is_keeper() -> bool {
    KEEPER.load(Ordering::Relaxed) == thread_pointer()
}

fn kept(path: &CStr) -> Result<File> {
    let (hash, count) = (hash(path), COUNT.load(Ordering::Relaxed));
    let is_same = |kept: &&Kept| kept.path.load(Ordering::Relaxed) == hash;
    if let Some(kept) = FILES.iter().take(count).find(is_same) {
        return file(kept.answer.load(Ordering::Relaxed));
    }
    let Some(free) = FILES.get(count) else {
        return Err(Errno::MFILE);
    };
    if IS_SHUT.load(Ordering::Relaxed) {
        HAS_MISSED.store(true, Ordering::Relaxed);
        return Err(Errno::MFILE);
    }
    let answer = match open_anew(path) {
        Ok(file) => file.into_raw_fd(),
        Err(errno) => -errno.raw_os_error(),
    };
    free.path.store(hash, Ordering::Relaxed);
    free.answer.store(answer, Ordering::Relaxed);
    COUNT.store(count + 1, Ordering::Relaxed);
    file(answer)
}

/// Returns a kept file, at its start.
fn file(answer: i32) -> Result<File> {
    if answer < 0 {
        return Err(Errno::from_raw_os_error(-answer));
    }
    // SAFETY: the process that keeps it never closes it, and has a descriptor table of its own.
    let file = unsafe { BorrowedFd::borrow_raw(answer) };
    rustix::fs::seek(file, SeekFrom::Start(0))?;
    Ok(File::Kept(file))
}

/// FNV-1a: <http://www.isthe.com/chongo/tech/comp/fnv/>.
fn hash(path: &CStr) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    path.to_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Begins to keep the files that the caller opens. It has a descriptor table of its own, and a thread
/// pointer that no other live thread has.
pub fn keep() {
    forget();
    KEEPER.store(thread_pointer(), Ordering::Relaxed);
}

/// Ends the opening of files by the caller, which [`keep`]s them.
pub fn shut() {
    IS_SHUT.store(true, Ordering::Relaxed);
}

/// Forgets the files. The previous process that kept them has ended, or was the caller.
pub fn forget() {
    for word in [&IS_SHUT, &HAS_MISSED] {
        word.store(false, Ordering::Relaxed);
    }
    COUNT.store(0, Ordering::Relaxed);
    KEEPER.store(0, Ordering::Relaxed);
}

/// Reports whether the caller may open no file.
pub fn is_shut() -> bool {
    IS_SHUT.load(Ordering::Relaxed) && is_keeper()
}

/// Reports whether the caller may open no file, and has missed one.
pub fn has_missed() -> bool {
    is_shut() && HAS_MISSED.load(Ordering::Relaxed)
}

/// Returns the descriptor as an argument of a system call.
pub(super) fn argument(file: &File) -> usize {
    file.as_fd().as_raw_fd().unsigned_abs() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &CStr) -> Result<String> {
        let mut buffer = [0; 64];
        let length = rustix::io::read(open(path)?, &mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    #[test]
    fn a_process_that_is_shut_reads_the_files_that_it_has_kept() {
        let other = std::thread::spawn(|| {
            let (comm, none) = (c"/proc/thread-self/comm", c"/proc/none");
            keep();
            rustix::thread::set_name(c"before").unwrap();
            assert_eq!(text(comm).unwrap(), "before\n");
            assert_eq!(text(none), Err(Errno::NOENT));
            shut();
            rustix::thread::set_name(c"after").unwrap();
            assert_eq!(text(comm).unwrap(), "after\n");
            assert_eq!(text(none), Err(Errno::NOENT));
            assert!(is_shut() && !has_missed());
            assert_eq!(text(c"/proc/self/statm"), Err(Errno::MFILE));
            assert!(has_missed());
            // Other threads open files as before.
            let elsewhere = std::thread::spawn(|| (is_shut(), text(c"/proc/self/statm").is_ok()));
            assert_eq!(elsewhere.join().unwrap(), (false, true));
            forget();
            assert!(text(c"/proc/self/statm").is_ok());
        });
        other.join().unwrap();
    }
}
