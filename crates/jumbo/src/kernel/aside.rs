//! Files of /proc that another process can hold back, read by a child of this process: [`text`], [`texts`], [`part`].
//!
//! A process's command line, mappings and memory are read with its memory map locked, and out of its memory. A thread
//! that keeps the lock holds the reader up, and so does a mapping of a file whose file system never answers: then not
//! even SIGKILL ends the reader. So a child reads. One that gets nowhere is killed and not waited for, and what it was
//! to read counts as held back: [`FileError::is_held_back`]. A process's own files are read in place.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::process::fork;
use super::{FileError, Root, root};

/// How long a reader may sleep without having read anything. It sleeps where another thread has the lock for a moment.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same, once a file has been held back: where there are many the sum has to have a bound.
const SHORT: Duration = Duration::from_millis(100);
/// How often the parent looks what the reader does.
const SLICE: Duration = Duration::from_millis(20);
/// What a reader passes on at a time.
const CHUNK: usize = 16 << 10;
/// Before each chunk: its length, and where that is 0 the errno that the file ended with.
type Head = [u32; 2];

/// What is to be read.
enum Source {
    /// A file to its end.
    File(CString),
    /// So many bytes of an open file, from here on.
    Part(RawFd, u64, usize),
}

/// The text of `proc/PID/FILE`, as [`Root::read`].
///
/// # Errors
/// [`FileError::Io`].
pub(crate) fn text(root: &Root, pid: u32, file: &str) -> Result<String, FileError> {
    if pid == std::process::id() {
        return root.read(format!("proc/{pid}/{file}"));
    }
    let mut texts = texts(root, &[pid], file);
    texts
        .pop()
        .unwrap_or_else(|| Err(unread(root.path("proc"), Errno::IO.into())))
}

/// [`text`] of each of these processes.
pub(crate) fn texts(root: &Root, pids: &[u32], file: &str) -> Vec<Result<String, FileError>> {
    let paths: Vec<PathBuf> = (pids.iter())
        .map(|pid| root.path(format!("proc/{pid}/{file}")))
        .collect();
    let sources = paths.iter().map(|path| {
        let path = std::path::absolute(path)?;
        Ok(Source::File(CString::new(path.as_os_str().as_bytes())?))
    });
    let read = match sources.collect::<io::Result<Vec<_>>>() {
        Ok(sources) => read(&sources),
        Err(error) => vec![Err(error)],
    };
    (paths.into_iter().zip(read))
        .map(|(path, bytes)| match bytes {
            Ok(bytes) => Ok(root::lossy(bytes)),
            Err(source) => Err(unread(path, source)),
        })
        .collect()
}

/// `length` bytes of an open file at `offset`.
///
/// # Errors
/// The errno of pread(2); [`io::ErrorKind::UnexpectedEof`] where there are fewer.
pub(crate) fn part(file: &File, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    // Off the standard descriptors, which the reader puts its own on.
    let file = rustix::io::fcntl_dupfd_cloexec(file, 3)?;
    let mut parts = read(&[Source::Part(file.as_raw_fd(), offset, length)]);
    let bytes = parts.pop().unwrap_or_else(|| Err(Errno::IO.into()))?;
    match bytes.len() == length {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn unread(path: PathBuf, source: io::Error) -> FileError {
    FileError::Io {
        operation: "read",
        path,
        source,
    }
}

/// What each source holds, or why that was not to be had.
fn read(sources: &[Source]) -> Vec<io::Result<Vec<u8>>> {
    let mut read = Vec::new();
    let mut patience = PATIENCE;
    while let Some(rest) = sources.get(read.len()..).filter(|rest| !rest.is_empty()) {
        let reader = match Reader::start(rest) {
            Ok(reader) => reader,
            Err(error) => {
                // There is no process to be had: for none of them.
                let again = || io::Error::new(error.kind(), error.to_string());
                read.extend(rest.iter().map(|_| Err(again())));
                break;
            }
        };
        if let Err(error) = reader.collect(&mut read, patience) {
            if error.kind() == io::ErrorKind::TimedOut {
                patience = SHORT;
            }
            read.push(Err(error));
        }
    }
    read
}

/// A child that reads.
struct Reader {
    pid: Pid,
    pipe: OwnedFd,
    count: usize,
}

impl Reader {
    fn start(sources: &[Source]) -> io::Result<Self> {
        let (pipe, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let write = rustix::io::fcntl_dupfd_cloexec(&write, 3)?;
        match Pid::from_raw(fork()?) {
            Some(pid) => Ok(Self {
                pid,
                pipe,
                count: sources.len(),
            }),
            None => serve(sources, write.as_raw_fd()),
        }
    }

    /// Appends what was read of each source. An error is that of the one after the last of them.
    fn collect(self, read: &mut Vec<io::Result<Vec<u8>>>, patience: Duration) -> io::Result<()> {
        let end = read.len() + self.count;
        let mut current = Vec::new();
        let (mut input, mut chunk) = (Vec::new(), vec![0; CHUNK]);
        while read.len() < end {
            if !self.is_ready(patience)? {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the process holds it back",
                ));
            }
            let got = rustix::io::read(&self.pipe, &mut chunk[..])?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            input.extend_from_slice(&chunk[..got]);
            let mut rest = input.as_slice();
            while let Some(([length, errno], after)) = split(rest) {
                let Some((bytes, after)) = after.split_at_checked(length as usize) else {
                    break;
                };
                current.extend_from_slice(bytes);
                rest = after;
                if length == 0 {
                    let bytes = std::mem::take(&mut current);
                    read.push(match errno {
                        0 => Ok(bytes),
                        errno => Err(io::Error::from_raw_os_error(errno.cast_signed())),
                    });
                }
            }
            input.drain(..input.len() - rest.len());
        }
        Ok(())
    }

    /// Waits for a chunk; false where the reader has slept all the while: it does not get on.
    fn is_ready(&self, patience: Duration) -> io::Result<bool> {
        let slice = Timespec::try_from(SLICE).ok();
        let mut slept = Duration::ZERO;
        while slept < patience {
            let mut ready = [PollFd::new(&self.pipe, PollFlags::IN)];
            match poll(&mut ready, slice.as_ref()) {
                Ok(0) => {}
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            // To walk the page tables of a terabyte takes seconds of work.
            match self.state() {
                Some('R') => slept = Duration::ZERO,
                _ => slept += SLICE,
            }
        }
        Ok(false)
    }

    fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero()));
        // The name, in brackets, may hold any byte.
        stat.ok()?.rsplit(')').next()?.trim_start().chars().next()
    }
}

impl Drop for Reader {
    /// Ends the reader. One that no signal ends is left to its fate.
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        for pause in [0, 1, 2, 4, 8, 16, 32] {
            std::thread::sleep(Duration::from_millis(pause));
            match waitpid(Some(self.pid), WaitOptions::NOHANG) {
                Ok(None) | Err(Errno::INTR) => {}
                Ok(Some(_)) | Err(_) => break,
            }
        }
    }
}

fn split(bytes: &[u8]) -> Option<(Head, &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    let (errno, rest) = rest.split_first_chunk()?;
    Some((
        [u32::from_ne_bytes(*length), u32::from_ne_bytes(*errno)],
        rest,
    ))
}

/// What the child does. It makes system calls alone: another thread of its parent may have had any lock.
#[expect(
    unsafe_code,
    reason = "descriptors by number, in a process that has nothing else to do"
)]
fn serve(sources: &[Source], write: RawFd) -> ! {
    const OUT: RawFd = 1;
    let part = sources.iter().find_map(|source| match source {
        Source::Part(file, ..) => Some(*file),
        Source::File(_) => None,
    });
    // Left behind it must hold nothing of its parent's: no pipe that is read to its end, no lock, no folder.
    // SAFETY: numbers and a C string. The descriptors are this process's own since the fork, and nothing here uses
    // one after it was closed; `part` and `write` are above 2.
    unsafe {
        libc::dup2(write, OUT);
        part.map_or_else(|| libc::close(0), |part| libc::dup2(part, 0));
        if libc::syscall(libc::SYS_close_range, OUT + 1, libc::c_uint::MAX, 0) != 0 {
            // Before 5.9.
            for fd in OUT + 1..1024 {
                libc::close(fd);
            }
        }
        libc::chdir(c"/".as_ptr());
    }
    for source in sources {
        // SAFETY: a C string, and numbers.
        let (fd, mut left) = unsafe {
            match source {
                Source::File(path) => (libc::open(path.as_ptr(), libc::O_RDONLY), usize::MAX),
                Source::Part(_, offset, length) => {
                    libc::lseek(0, offset.cast_signed(), libc::SEEK_SET);
                    (0, *length)
                }
            }
        };
        let mut buffer = [0u8; CHUNK];
        let errno = loop {
            if fd < 0 {
                break errno();
            }
            // SAFETY: no more than the buffer has.
            let got = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), left.min(CHUNK)) };
            match usize::try_from(got) {
                Ok(0) => break 0,
                Ok(got) => {
                    send(OUT, &head(got, 0));
                    send(OUT, buffer.get(..got).unwrap_or_default());
                    left -= got;
                }
                Err(_) if errno() == libc::EINTR => {}
                Err(_) => break errno(),
            }
        };
        send(OUT, &head(0, errno));
        if fd > 0 {
            // SAFETY: opened above.
            unsafe { libc::close(fd) };
        }
    }
    // SAFETY: ends this process without running what its parent registered for its own exit.
    unsafe { libc::_exit(0) };
}

fn errno() -> i32 {
    io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

fn head(length: usize, errno: i32) -> [u8; 8] {
    let length = u32::try_from(length).unwrap_or_default().to_ne_bytes();
    let mut head = [0; 8];
    head[..4].copy_from_slice(&length);
    head[4..].copy_from_slice(&errno.to_ne_bytes());
    head
}

/// Writes all of it, or ends this process: its parent reads no more.
#[expect(unsafe_code, reason = "write and _exit by number")]
fn send(fd: RawFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the bytes are there; _exit touches nothing.
        unsafe {
            match usize::try_from(libc::write(fd, bytes.as_ptr().cast(), bytes.len())) {
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(_) if errno() == libc::EINTR => {}
                Err(_) => libc::_exit(1),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipe that nothing is written to holds its reader up.
    #[test]
    fn what_is_held_back_is_given_up_and_the_rest_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        for pid in [1, 2, 3, 4] {
            std::fs::create_dir_all(root.path(format!("proc/{pid}"))).unwrap();
        }
        let large = "x".repeat(3 << 20);
        std::fs::write(root.path("proc/1/maps"), &large).unwrap();
        let pipe = root.path("proc/2/maps");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        std::fs::write(root.path("proc/4/maps"), "").unwrap();
        let [first, held, gone, empty] = &texts(&root, &[1, 2, 3, 4], "maps")[..] else {
            panic!("four were asked for");
        };
        assert_eq!(first.as_ref().unwrap(), &large);
        assert!(held.as_ref().unwrap_err().is_held_back());
        assert!(gone.as_ref().unwrap_err().is_missing());
        assert_eq!(empty.as_ref().unwrap(), "");
        assert!(texts(&root, &[], "maps").is_empty());
    }

    #[test]
    fn a_part_is_read_where_it_is() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&path, "0123456789").unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(part(&file, 3, 4).unwrap(), b"3456");
        let short = part(&file, 8, 4).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    }
}
