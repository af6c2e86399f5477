//! Files of /proc whose read another process can block, read by a child of this process: [`text`],
//! [`texts`], [`executables`], [`parts`], [`entries`], and the mappings of a process: [`smaps`], [`maps`]. [`MapCalls`]: other calls
//! that take its mmap lock.
//!
//! The kernel reads a process's command line, mappings and memory under its mmap lock, and from its
//! memory. The reader blocks while a thread holds the lock, and where a mapped file's file system
//! does not answer: then even SIGKILL does not end it. So a child reads. A child without progress
//! is killed without a wait, and its file counts as held back: [`FileError::is_held_back`]. This
//! process reads its own files itself.

mod calls;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::stdio::{dup2_stdin, dup2_stdout, stdout};

pub(crate) use calls::{BlockState, MapCalls};

use super::process::{ProcessState, end, fork, is_ready};
use super::smaps::Smaps;
use super::{FileError, Root};

/// Maximum time that a reader may sleep without progress. Another thread may hold the lock briefly.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The same after the first timeout, to bound the sum over many files.
const SHORT_READ_TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum time that a reader may sleep in all, as a multiple of that without progress: a process could
/// let each chunk wait for a little less.
const SUM_RATIO: u32 = 5;
/// Interval at which the parent checks the state of the reader.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Size of a chunk in the pipe, header included.
const CHUNK_BYTES: usize = 32 << 10;
/// Header of a chunk: its length; 0 at the end of the file; a negative errno after an error.
type Header = i32;

/// Maximum text of one process. A process decides on the number and the paths of its mappings.
const MAX_TEXT_BYTES: usize = 128 << 20;
/// Maximum text of each of several processes.
const MAX_TEXT_BYTES_OF_MANY: usize = 16 << 20;

/// A request to the reader.
enum Request {
    /// The start of a file, up to a length.
    File(CString, usize),
    /// A range of a file in an open folder of /proc: offset and length.
    Part(OwnedFd, &'static CStr, u64, usize),
}

/// Reads `proc/PID/FILE`, as [`Root::read`].
pub(crate) fn text(root: &Root, pid: u32, file: &str) -> Result<String, FileError> {
    if pid == std::process::id() {
        return root.read(format!("proc/{pid}/{file}"));
    }
    let text = texts(root, &[pid], file).pop();
    text.unwrap_or_else(|| Err(FileError::io("read", &root.path("proc"))(Errno::IO.into())))
}

/// Bounds of several reads together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Maximum length of a file.
    pub(crate) each: usize,
    /// Length that all files may still have.
    pub(crate) bytes: usize,
    /// Time of the last start of a read.
    pub(crate) until: Option<Instant>,
}

impl Budget {
    fn of_each(each: usize) -> Self {
        Self {
            each,
            bytes: usize::MAX,
            until: None,
        }
    }

    fn is_spent(&self) -> bool {
        self.bytes == 0 || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

/// Reads the [`text`] of each of these processes; a text above the maximum counts as held back.
pub(crate) fn texts(root: &Root, pids: &[u32], file: &str) -> Vec<Result<String, FileError>> {
    let mut budget = Budget::of_each(match pids.len() {
        ..=1 => MAX_TEXT_BYTES,
        _ => MAX_TEXT_BYTES_OF_MANY,
    });
    texts_within(root, pids, file, &mut budget)
}

/// Reads [`texts`] until the budget is spent: [`FileError::is_beyond_budget`].
pub(crate) fn texts_within(
    root: &Root,
    pids: &[u32],
    file: &str,
    budget: &mut Budget,
) -> Vec<Result<String, FileError>> {
    let path = |pid: &u32| root.path(format!("proc/{pid}/{file}"));
    let paths: Vec<PathBuf> = pids.iter().map(path).collect();
    let read = starts(&paths, usize::MAX, budget);
    let text = |(path, bytes): (&PathBuf, io::Result<Vec<u8>>)| {
        bytes.map(Root::lossy).map_err(FileError::io("read", path))
    };
    paths.iter().zip(read).map(text).collect()
}

/// Reads the first `bytes` of the executable of each of these processes, whose file system may not
/// answer.
pub(crate) fn executables(root: &Root, pids: &[u32], bytes: usize) -> Vec<io::Result<Vec<u8>>> {
    let paths: Vec<_> = pids
        .iter()
        .map(|pid| root.path(format!("proc/{pid}/exe")))
        .collect();
    starts(&paths, bytes, &mut Budget::of_each(bytes))
}

/// Reads the first `bytes` of each file.
fn starts(paths: &[PathBuf], bytes: usize, budget: &mut Budget) -> Vec<io::Result<Vec<u8>>> {
    let request = |path: &PathBuf| {
        let path = std::path::absolute(path)?;
        Ok(Request::File(
            CString::new(path.as_os_str().as_bytes())?,
            bytes,
        ))
    };
    match paths.iter().map(request).collect::<io::Result<Vec<_>>>() {
        Ok(requests) => read(&requests, budget),
        Err(error) => vec![Err(error)],
    }
}

/// Reads smaps of any process.
///
/// # Errors
/// [`FileError`] where the process is gone, may not be read, or holds its mappings back.
pub(crate) fn smaps(root: &Root, pid: u32) -> Result<Smaps, FileError> {
    text(root, pid, "smaps").map(Smaps::of)
}

/// Reads maps of any process.
pub fn maps(root: &Root, pid: u32) -> Result<Smaps, FileError> {
    text(root, pid, "maps").map(Smaps::of)
}

/// Reads the [`maps`] of each of these processes.
pub(crate) fn maps_of_each(root: &Root, pids: &[u32]) -> Vec<Result<Smaps, FileError>> {
    let texts = texts(root, pids, "maps").into_iter();
    texts.map(|text| text.map(Smaps::of)).collect()
}

/// Reads ranges of memory: the folder of a process in /proc, an offset and a length each.
///
/// # Errors
/// The errno of openat(2) and pread(2); [`io::ErrorKind::UnexpectedEof`] after a short read.
pub(crate) fn parts(wanted: &[(&File, u64, usize)]) -> Vec<io::Result<Vec<u8>>> {
    // Above the standard descriptors, which the reader replaces.
    let request = |(folder, offset, length): &(&File, u64, usize)| {
        let folder = rustix::io::fcntl_dupfd_cloexec(folder, 3)?;
        Ok(Request::Part(folder, c"mem", *offset, *length))
    };
    let requests = wanted.iter().map(request).collect::<io::Result<Vec<_>>>();
    let read = match &requests {
        Ok(requests) => read(requests, &mut Budget::of_each(usize::MAX)),
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

/// Reads entries of pagemap of any process: up to `count`, from the `first`.
///
/// # Errors
/// Those of open(2) and pread(2).
pub(crate) fn entries(root: &Root, pid: u32, first: u64, count: usize) -> io::Result<Vec<u64>> {
    const ENTRY_BYTES: usize = size_of::<u64>();
    let folder = File::open(root.path(format!("proc/{pid}")))?;
    let folder = rustix::io::fcntl_dupfd_cloexec(&folder, 3)?;
    let (offset, length) = (first * ENTRY_BYTES as u64, count * ENTRY_BYTES);
    let request = Request::Part(folder, c"pagemap", offset, length);
    let bytes = read(&[request], &mut Budget::of_each(usize::MAX)).pop();
    let bytes = bytes.unwrap_or_else(|| Err(io::ErrorKind::Other.into()))?;
    let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
    Ok(entries.iter().copied().map(u64::from_ne_bytes).collect())
}

/// Content of each request, or the error. Content beyond the budget is an error.
fn read(requests: &[Request], budget: &mut Budget) -> Vec<io::Result<Vec<u8>>> {
    let (mut read, mut timeout) = (Vec::new(), READ_TIMEOUT);
    while let Some(rest) = requests.get(read.len()..).filter(|rest| !rest.is_empty()) {
        if budget.is_spent() {
            read.push(Err(io::ErrorKind::QuotaExceeded.into()));
            continue;
        }
        let reader = Reader::start(rest, timeout);
        if let Err(error) = reader.and_then(|reader| reader.collect(rest.len(), budget, &mut read))
        {
            if error.kind() == io::ErrorKind::TimedOut {
                timeout = SHORT_READ_TIMEOUT;
            }
            read.push(Err(error));
        }
    }
    read
}

/// A child that serves the requests in their order.
#[derive(Debug)]
struct Reader {
    pid: Pid,
    pipe: OwnedFd,
    timeout: Duration,
    /// Time that the child has slept in all.
    slept: Duration,
}

/// Children that were killed and had not ended then.
static LEFT: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Reports whether a child has ended, and is waited for.
fn has_ended(pid: Pid) -> bool {
    !matches!(
        waitpid(Some(pid), WaitOptions::NOHANG),
        Ok(None) | Err(Errno::INTR)
    )
}

impl Reader {
    fn start(requests: &[Request], timeout: Duration) -> io::Result<Self> {
        let (pipe, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let write = rustix::io::fcntl_dupfd_cloexec(&write, 3)?;
        let folders = requests.iter().filter_map(|request| match request {
            Request::Part(folder, ..) => Some(folder.as_raw_fd().unsigned_abs()),
            Request::File(..) => None,
        });
        let mut kept: Vec<_> = folders.collect();
        kept.sort_unstable();
        match Pid::from_raw(fork()?) {
            Some(pid) => Ok(Self::of(pid, pipe, timeout)),
            None => serve(requests, &kept, &write),
        }
    }

    fn of(pid: Pid, pipe: OwnedFd, timeout: Duration) -> Self {
        let slept = Duration::ZERO;
        Self {
            pid,
            pipe,
            timeout,
            slept,
        }
    }

    /// Appends the result of each of `count` requests. An error belongs to the first request
    /// without a result.
    fn collect(
        self,
        count: usize,
        budget: &mut Budget,
        read: &mut Vec<io::Result<Vec<u8>>>,
    ) -> io::Result<()> {
        let mut input = BufReader::with_capacity(CHUNK_BYTES, self);
        for _ in 0..count {
            if budget.is_spent() {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            let mut bytes = Vec::new();
            let result = loop {
                let mut header = Header::default().to_ne_bytes();
                input.read_exact(&mut header)?;
                let header = Header::from_ne_bytes(header);
                let Ok(length) = usize::try_from(header) else {
                    break Err(io::Error::from_raw_os_error(header.saturating_neg()));
                };
                if length == 0 {
                    break Ok(bytes);
                }
                let filled = bytes.len();
                if length > budget.each - filled {
                    // Its text is dropped, and no other process has less room for it.
                    budget.bytes = budget.bytes.saturating_add(filled);
                    let why = format!("it is longer than {} MiB", budget.each >> 20);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                budget.bytes = budget.bytes.saturating_sub(length);
                if budget.is_spent() {
                    return Err(io::ErrorKind::QuotaExceeded.into());
                }
                bytes.resize(filled + length, 0);
                input.read_exact(&mut bytes[filled..])?;
            };
            read.push(result);
        }
        Ok(())
    }

    /// Waits for input; false where the child slept for the whole timeout.
    fn is_ready(&mut self) -> io::Result<bool> {
        let mut slept = Duration::ZERO;
        while slept < self.timeout && self.slept < self.timeout * SUM_RATIO {
            if is_ready(&self.pipe, POLL_INTERVAL)? {
                return Ok(true);
            }
            let pid = self.pid.as_raw_nonzero().get().unsigned_abs();
            match ProcessState::read(&Root::host(), pid).map(|reader| reader.state) {
                // A walk of the page tables of a terabyte takes seconds of CPU time.
                Ok('R') => slept = Duration::ZERO,
                _ => {
                    slept += POLL_INTERVAL;
                    self.slept += POLL_INTERVAL;
                }
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
    /// Kills the reader, and waits 65 ms at most: a blocked reader may not end. The next one waits for
    /// it again.
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let ended = (0..16).any(|shift| {
            std::thread::sleep(Duration::from_micros(1 << shift));
            has_ended(self.pid)
        });
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|pid| !has_ended(*pid));
        if !ended {
            left.push(self.pid);
        }
    }
}

/// Replaces the standard descriptors of the child by `write`, and closes all others except `kept`, by
/// ascending number. A child that outlives its parent must hold no pipe, lock or folder of the parent.
#[expect(
    unsafe_code,
    reason = "descriptors by number, in a process that has nothing else to do"
)]
fn isolate(kept: &[u32], write: &OwnedFd) {
    let _ = dup2_stdout(write);
    let _ = dup2_stdin(write);
    let _ = rustix::process::chdir(c"/");
    let mut next = 2;
    for &fd in kept.iter().chain([&libc::c_uint::MAX]) {
        // SAFETY: the descriptors belong to this process since the fork, and no code here uses one
        // above 1 that is not kept: `write` is 1 now.
        unsafe {
            if next < fd && libc::syscall(libc::SYS_close_range, next, fd - 1, 0) != 0 {
                // Linux before 5.9.
                for other in next..fd.min(1024) {
                    libc::close(other.cast_signed());
                }
            }
        }
        next = fd.saturating_add(1);
    }
}

/// Serves the requests in the child. `kept` are their descriptors, by ascending number. Makes only
/// system calls: another thread of the parent may have held any lock at the fork.
fn serve(requests: &[Request], kept: &[u32], write: &OwnedFd) -> ! {
    isolate(kept, write);
    for request in requests {
        let sent = match request {
            Request::File(path, length) => {
                let mut left = *length;
                let file = rustix::fs::open(path.as_c_str(), OFlags::RDONLY, Mode::empty());
                file.map(|file| {
                    send(|buffer| {
                        let wanted = buffer.len().min(left);
                        let count = rustix::io::read(&file, &mut buffer[..wanted])?;
                        left -= count;
                        Ok(count)
                    })
                })
            }
            Request::Part(folder, name, offset, length) => {
                let (mut at, mut left) = (*offset, *length);
                let file = rustix::fs::openat(folder, *name, OFlags::RDONLY, Mode::empty());
                file.map(|file| {
                    send(|buffer| {
                        // Reads of pagemap take whole entries.
                        let wanted = (buffer.len() / 8 * 8).min(left);
                        let count = rustix::io::pread(&file, &mut buffer[..wanted], at)?;
                        (at, left) = (at + count as u64, left - count);
                        Ok(count)
                    })
                })
            }
        };
        if sent.unwrap_or_else(|errno| send(|_| Err(errno))).is_err() {
            break;
        }
    }
    end(0)
}

/// Sends the bytes that `read` returns as chunks, until it returns 0 or an error.
fn send(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<(), Errno> {
    const HEADER_BYTES: usize = size_of::<Header>();
    let mut buffer = [0; CHUNK_BYTES];
    loop {
        let count = rustix::io::retry_on_intr(|| read(&mut buffer[HEADER_BYTES..]));
        let length = count.unwrap_or(0);
        let header = count.map_or_else(
            |errno| -errno.raw_os_error(),
            |_| Header::try_from(length).unwrap_or_default(),
        );
        buffer[..HEADER_BYTES].copy_from_slice(&header.to_ne_bytes());
        let mut left = &buffer[..HEADER_BYTES + length];
        while !left.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(stdout(), left))?;
            left = &left[written..];
        }
        if length == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reader of an empty pipe blocks.
    #[test]
    fn a_blocked_file_times_out_and_the_others_are_read() {
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
            panic!("four results expected");
        };
        assert_eq!(first.as_ref().unwrap(), &large);
        assert!(held.as_ref().unwrap_err().is_held_back());
        assert!(gone.as_ref().unwrap_err().is_missing());
        assert_eq!(empty.as_ref().unwrap(), "");
        assert!(texts(&root, &[], "maps").is_empty());
    }

    /// A slow open blocks only the child.
    #[test]
    fn memory_that_blocks_on_open_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        let pipe = folder.path().join("mem");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, Mode::RWXU, 0).unwrap();
        let read = parts(&[(&File::open(&folder).unwrap(), 0, 1)]).pop();
        let error = read.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_text_above_the_maximum_is_refused_and_the_others_are_read() {
        let long = "x".repeat(MAX_TEXT_BYTES_OF_MANY + 1);
        let files = [("proc/1/maps", &*long), ("proc/2/maps", "short")];
        let (_folder, root) = crate::kernel::fake::host(&files);
        let read = texts(&root, &[1, 2], "maps");
        assert!(read[0].as_ref().unwrap_err().is_held_back());
        assert_eq!(read[1].as_ref().unwrap(), "short");
        assert_eq!(text(&root, 1, "maps").unwrap().len(), long.len());
    }

    #[test]
    fn parts_are_read_at_their_offsets() {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [one, other] = folders.each_ref().map(|folder| File::open(folder).unwrap());
        for (folder, text) in folders.iter().zip(["0123456789", "abcdef"]) {
            std::fs::write(folder.path().join("mem"), text).unwrap();
        }
        let read = parts(&[(&one, 3, 4), (&other, 0, 2), (&one, 8, 4), (&one, 0, 1)]);
        let [first, second, short, last] = &read[..] else {
            panic!("four results expected");
        };
        assert_eq!(first.as_ref().unwrap(), b"3456");
        assert_eq!(second.as_ref().unwrap(), b"ab");
        let short = short.as_ref().unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(last.as_ref().unwrap(), b"0");
    }
}
