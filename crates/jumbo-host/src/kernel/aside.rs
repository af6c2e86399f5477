//! Files of /proc that another process can hold back, read by a child of this process: [`text`], [`texts`], [`parts`], and
//! the mappings of a process: [`smaps`], [`maps`], [`rollup`].
//!
//! A process's command line, mappings and memory are read with its memory map locked, and out of its memory. A thread
//! that keeps the lock holds the reader up, and so does a mapping of a file whose file system never answers: then not
//! even SIGKILL ends the reader. So a child reads. One that gets nowhere is killed and not waited for, and what it was
//! to read counts as held back: [`FileError::is_held_back`]. A process's own files are read in place.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::stdio::{dup2_stdin, dup2_stdout, stdout};

use super::process::{Standing, end, fork, is_ready};
use super::smaps::Smaps;
use super::{FileError, Root};

/// How long a reader may sleep without having read anything. It sleeps where another thread has the lock for a moment.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same, once a file has been held back: where there are many the sum has to have a bound.
const SHORT: Duration = Duration::from_millis(100);
/// How often the parent looks what the reader does.
const SLICE: Duration = Duration::from_millis(20);
/// The bytes that a reader passes on at a time, heads included.
const CHUNK: usize = 32 << 10;
/// Before each chunk its length; 0: the file has ended; less: it failed, by the errno.
type Head = i32;

/// The memory of the process whose folder it is in.
const MEM: &CStr = c"mem";
/// The longest text of one process, and of each where there are several: a process decides on the number of its mappings
/// and the length of their paths.
const LONGEST: usize = 128 << 20;
const LONGEST_OF_MANY: usize = 16 << 20;

/// What is to be read.
enum Source {
    /// A file to its end.
    File(CString),
    /// A number of bytes of the file [`MEM`] in an open folder, from here on.
    Part(OwnedFd, u64, usize),
}

/// The text of `proc/PID/FILE`, as [`Root::read`].
///
/// # Errors
/// [`FileError::Io`].
pub(crate) fn text(root: &Root, pid: u32, file: &str) -> Result<String, FileError> {
    if pid == std::process::id() {
        return root.read(format!("proc/{pid}/{file}"));
    }
    let text = texts(root, &[pid], file).pop();
    text.unwrap_or_else(|| Err(FileError::io("read", &root.path("proc"))(Errno::IO.into())))
}

/// [`text`] of each of these processes; one that is very long counts as held back.
pub(crate) fn texts(root: &Root, pids: &[u32], file: &str) -> Vec<Result<String, FileError>> {
    let longest = if pids.len() > 1 {
        LONGEST_OF_MANY
    } else {
        LONGEST
    };
    let path = |pid: &u32| root.path(format!("proc/{pid}/{file}"));
    let paths: Vec<PathBuf> = pids.iter().map(path).collect();
    let source = |path: &PathBuf| {
        let path = std::path::absolute(path)?;
        Ok(Source::File(CString::new(path.as_os_str().as_bytes())?))
    };
    let read = match paths.iter().map(source).collect::<io::Result<Vec<_>>>() {
        Ok(sources) => read(&sources, longest),
        Err(error) => vec![Err(error)],
    };
    let text = |(path, bytes): (&PathBuf, io::Result<Vec<u8>>)| {
        bytes.map(Root::lossy).map_err(FileError::io("read", path))
    };
    paths.iter().zip(read).map(text).collect()
}

/// [`Smaps::read`] of any process.
///
/// # Errors
/// As that, and where the process holds its mappings back.
pub(crate) fn smaps(root: &Root, pid: u32) -> Result<Smaps, FileError> {
    text(root, pid, "smaps").map(Smaps::of)
}

/// [`Smaps::read_maps`] of any process.
///
/// # Errors
/// As [`smaps`].
pub(crate) fn maps(root: &Root, pid: u32) -> Result<Smaps, FileError> {
    text(root, pid, "maps").map(Smaps::of)
}

/// [`maps`] of each of these processes.
pub(crate) fn maps_of_each(root: &Root, pids: &[u32]) -> Vec<Result<Smaps, FileError>> {
    let texts = texts(root, pids, "maps").into_iter();
    texts.map(|text| text.map(Smaps::of)).collect()
}

/// [`Smaps::read_rollup`] of any process.
///
/// # Errors
/// As [`smaps`].
pub(crate) fn rollup(root: &Root, pid: u32) -> Result<Smaps, FileError> {
    text(root, pid, "smaps_rollup").map(Smaps::of)
}

/// Of the memory of each process whose folder this is so many bytes at an offset.
///
/// # Errors
/// The errno of openat(2) and pread(2); [`io::ErrorKind::UnexpectedEof`] where there are fewer.
pub(crate) fn parts(wanted: &[(&File, u64, usize)]) -> Vec<io::Result<Vec<u8>>> {
    // Off the standard descriptors, which the reader puts its own on.
    let source = |(folder, offset, length): &(&File, u64, usize)| {
        let folder = rustix::io::fcntl_dupfd_cloexec(folder, 3)?;
        Ok(Source::Part(folder, *offset, *length))
    };
    let sources = wanted.iter().map(source).collect::<io::Result<Vec<_>>>();
    let read = match &sources {
        Ok(sources) => read(sources, usize::MAX),
        Err(error) => {
            let failed = |_| Err(io::Error::new(error.kind(), error.to_string()));
            wanted.iter().map(failed).collect()
        }
    };
    let whole = |(read, wanted): (io::Result<Vec<u8>>, &(&File, u64, usize))| match read {
        Ok(bytes) if bytes.len() < wanted.2 => Err(io::ErrorKind::UnexpectedEof.into()),
        read => read,
    };
    read.into_iter().zip(wanted).map(whole).collect()
}

/// The content of each source, or why that was not to be had: one with more bytes than `longest` is refused.
fn read(sources: &[Source], longest: usize) -> Vec<io::Result<Vec<u8>>> {
    let (mut read, mut patience) = (Vec::new(), PATIENCE);
    while let Some(rest) = sources.get(read.len()..).filter(|rest| !rest.is_empty()) {
        let reader = Reader::start(rest, patience);
        if let Err(error) = reader.and_then(|reader| reader.collect(rest.len(), longest, &mut read))
        {
            if error.kind() == io::ErrorKind::TimedOut {
                patience = SHORT;
            }
            read.push(Err(error));
        }
    }
    read
}

/// A child that reads one source after the other.
struct Reader {
    pid: Pid,
    pipe: OwnedFd,
    patience: Duration,
}

impl Reader {
    fn start(sources: &[Source], patience: Duration) -> io::Result<Self> {
        let (pipe, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let write = rustix::io::fcntl_dupfd_cloexec(&write, 3)?;
        let parts = sources.iter().filter_map(|source| match source {
            Source::Part(file, ..) => Some(file.as_raw_fd().unsigned_abs()),
            Source::File(_) => None,
        });
        let mut kept: Vec<_> = parts.collect();
        kept.sort_unstable();
        match Pid::from_raw(fork()?) {
            Some(pid) => Ok(Self {
                pid,
                pipe,
                patience,
            }),
            None => serve(sources, &kept, &write),
        }
    }

    /// Appends what was read of each of `count` sources. An error is that of the one after the last of them.
    fn collect(
        self,
        count: usize,
        longest: usize,
        read: &mut Vec<io::Result<Vec<u8>>>,
    ) -> io::Result<()> {
        let mut input = BufReader::with_capacity(CHUNK, self);
        for _ in 0..count {
            let mut bytes = Vec::new();
            let ended = loop {
                let mut head = Head::default().to_ne_bytes();
                input.read_exact(&mut head)?;
                let head = Head::from_ne_bytes(head);
                let Ok(length) = usize::try_from(head) else {
                    break Err(io::Error::from_raw_os_error(head.saturating_neg()));
                };
                if length == 0 {
                    break Ok(bytes);
                }
                let filled = bytes.len();
                if length > longest - filled {
                    let why = format!("it is longer than {} MiB", longest >> 20);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                bytes.resize(filled + length, 0);
                input.read_exact(&mut bytes[filled..])?;
            };
            read.push(ended);
        }
        Ok(())
    }

    /// Waits for something to read; false where the child has slept all the while: it does not get on.
    fn is_ready(&self) -> io::Result<bool> {
        let mut slept = Duration::ZERO;
        while slept < self.patience {
            if is_ready(&self.pipe, SLICE)? {
                return Ok(true);
            }
            let pid = self.pid.as_raw_nonzero().get().unsigned_abs();
            match Standing::read(&Root::host(), pid).map(|standing| standing.state) {
                // To walk the page tables of a terabyte takes seconds of work.
                Ok('R') => slept = Duration::ZERO,
                _ => slept += SLICE,
            }
        }
        Ok(false)
    }
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.is_ready()? {
            let why = "the process holds it back";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        Ok(rustix::io::read(&self.pipe, buffer)?)
    }
}

impl Drop for Reader {
    /// Ends the reader. One that no signal ends is left to its fate.
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        for shift in 0..16 {
            std::thread::sleep(Duration::from_micros(1 << shift));
            match waitpid(Some(self.pid), WaitOptions::NOHANG) {
                Ok(None) | Err(Errno::INTR) => {}
                Ok(Some(_)) | Err(_) => break,
            }
        }
    }
}

/// The work of the child, with the descriptors that are `kept`, by ascending number. It makes system calls alone: another thread of its parent may have had any lock.
#[expect(
    unsafe_code,
    reason = "descriptors by number, in a process that has nothing else to do"
)]
fn serve(sources: &[Source], kept: &[u32], write: &OwnedFd) -> ! {
    // Left behind it must hold nothing of its parent's: no pipe that is read to its end, no lock, no folder.
    let _ = dup2_stdout(write);
    let _ = dup2_stdin(write);
    let _ = rustix::process::chdir(c"/");
    let mut next = 2;
    for &fd in kept.iter().chain([&libc::c_uint::MAX]) {
        // SAFETY: the descriptors are this process's own since the fork, and nothing here uses one above 1 any more that
        // is not kept: `write` is 1 now.
        unsafe {
            if next < fd && libc::syscall(libc::SYS_close_range, next, fd - 1, 0) != 0 {
                // Before 5.9.
                for other in next..fd.min(1024) {
                    libc::close(other.cast_signed());
                }
            }
        }
        next = fd.saturating_add(1);
    }
    for source in sources {
        let passed = match source {
            Source::File(path) => rustix::fs::open(path.as_c_str(), OFlags::RDONLY, Mode::empty())
                .map(|file| pass_on(|room| rustix::io::read(&file, room))),
            Source::Part(folder, offset, length) => {
                let (mut at, mut left) = (*offset, *length);
                let file = rustix::fs::openat(folder, MEM, OFlags::RDONLY, Mode::empty());
                file.map(|file| {
                    pass_on(|room| {
                        let wanted = room.len().min(left);
                        let got = rustix::io::pread(&file, &mut room[..wanted], at)?;
                        (at, left) = (at + got as u64, left - got);
                        Ok(got)
                    })
                })
            }
        };
        if passed
            .unwrap_or_else(|errno| pass_on(|_| Err(errno)))
            .is_err()
        {
            break;
        }
    }
    end(0)
}

/// Sends what `read` gives in chunks with their heads, until it gives nothing.
fn pass_on(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<(), Errno> {
    const HEAD: usize = size_of::<Head>();
    let mut buffer = [0; CHUNK];
    loop {
        let got = rustix::io::retry_on_intr(|| read(&mut buffer[HEAD..]));
        let length = got.unwrap_or(0);
        let head = got.map_or_else(
            |errno| -errno.raw_os_error(),
            |_| Head::try_from(length).unwrap_or_default(),
        );
        buffer[..HEAD].copy_from_slice(&head.to_ne_bytes());
        let mut left = &buffer[..HEAD + length];
        while !left.is_empty() {
            let sent = rustix::io::retry_on_intr(|| rustix::io::write(stdout(), left))?;
            left = &left[sent..];
        }
        if length == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipe that nothing is written to holds its reader up.
    #[test]
    fn what_is_held_back_is_given_up_and_the_rest_is_read() {
        let large = "x".repeat(3 << 20);
        let files = [
            ("proc/1/maps", &*large),
            ("proc/2/x", ""),
            ("proc/4/maps", ""),
        ];
        let (_folder, root) = crate::kernel::fake::host(&files);
        let pipe = root.path("proc/2/maps");
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, Mode::RWXU, 0).unwrap();
        let [first, held, gone, empty] = &texts(&root, &[1, 2, 3, 4], "maps")[..] else {
            panic!("four were asked for");
        };
        assert_eq!(first.as_ref().unwrap(), &large);
        assert!(held.as_ref().unwrap_err().is_held_back());
        assert!(gone.as_ref().unwrap_err().is_missing());
        assert_eq!(empty.as_ref().unwrap(), "");
        assert!(texts(&root, &[], "maps").is_empty());
    }

    /// A file that takes long to be opened holds up the child alone.
    #[test]
    fn memory_that_cannot_be_opened_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        let pipe = folder.path().join("mem");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, Mode::RWXU, 0).unwrap();
        let read = parts(&[(&File::open(&folder).unwrap(), 0, 1)]).pop();
        let error = read.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_text_that_is_very_long_is_refused_and_the_rest_is_read() {
        let long = "x".repeat(LONGEST_OF_MANY + 1);
        let files = [("proc/1/maps", &*long), ("proc/2/maps", "short")];
        let (_folder, root) = crate::kernel::fake::host(&files);
        let read = texts(&root, &[1, 2], "maps");
        assert!(read[0].as_ref().unwrap_err().is_held_back());
        assert_eq!(read[1].as_ref().unwrap(), "short");
        assert_eq!(text(&root, 1, "maps").unwrap().len(), long.len());
    }

    #[test]
    fn parts_are_read_where_they_are() {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [one, other] = folders.each_ref().map(|folder| File::open(folder).unwrap());
        for (folder, text) in folders.iter().zip(["0123456789", "abcdef"]) {
            std::fs::write(folder.path().join("mem"), text).unwrap();
        }
        let read = parts(&[(&one, 3, 4), (&other, 0, 2), (&one, 8, 4), (&one, 0, 1)]);
        let [first, second, short, last] = &read[..] else {
            panic!("four were asked for");
        };
        assert_eq!(first.as_ref().unwrap(), b"3456");
        assert_eq!(second.as_ref().unwrap(), b"ab");
        let short = short.as_ref().unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(last.as_ref().unwrap(), b"0");
    }
}
