//! Calls that take the mmap lock of another process, made by a child: [`MapCalls`].
//!
//! A collapse waits for the lock in a sleep that no signal ends. So does PAGEMAP_SCAN, but for
//! SIGKILL. A file system that answers no page fault of the process holds the lock for ever. The
//! child serves one process for many calls, in turn. When a call sleeps for too long, the child is
//! killed without a wait, and all later calls fail.

use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::stdio::{stdin, stdout};

use super::{READ_TIMEOUT, Reader, isolate};
use crate::kernel::Root;
use crate::kernel::process::{end, fork};
use jumbo_sys::{self as sys, Pagemap};

/// Maximum time that a collapse may sleep without progress. A fork of a large process holds the
/// lock for seconds.
const ADVISE_TIMEOUT: Duration = Duration::from_secs(5);

/// A block of memory, by its present pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockState {
    pub(crate) address: usize,
    /// Bytes that are present, huge or not.
    pub(crate) present: usize,
    /// Bytes that are present and mapped by this process alone.
    pub(crate) exclusive: usize,
    /// Mapped by PMD.
    pub(crate) is_huge: bool,
}

/// The calls of the child. The other words of a request are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Call {
    /// Opens pagemap; the value of the result tells whether the kernel has PAGEMAP_SCAN.
    Open,
    /// Sends the blocks of a range that have present pages: start, end, size of a block.
    Survey,
    /// MADV_COLLAPSE: address, length, whether a huge page is prepared.
    Collapse,
    /// MADV_COLD: address, length.
    Cool,
}

/// A request, a block, or the end of a result: [`END`], errno, value.
type Message = [u64; 4];

/// First word of the last message of a result. No block has this address.
const END: u64 = u64::MAX;

/// A child that makes calls on the memory of one process.
#[derive(Debug)]
pub(crate) struct MapCalls {
    /// `None` once a call was held back.
    child: RefCell<Option<(Reader, UnixStream)>>,
    scans: Cell<bool>,
}

impl MapCalls {
    /// Starts the child, for the process `pid` behind `pidfd`.
    pub(crate) fn start(
        root: &Root,
        pid: u32,
        pidfd: BorrowedFd<'_>,
        base: usize,
    ) -> io::Result<Self> {
        let path = std::path::absolute(root.path(format!("proc/{pid}/pagemap")))?;
        let path = CString::new(path.as_os_str().as_bytes())?;
        let (own, its) = UnixStream::pair()?;
        // Above the standard descriptors, which the child replaces.
        let [its, pidfd] = [its.as_fd(), pidfd].map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3));
        let (its, pidfd) = (its?, pidfd?);
        let Some(pid) = Pid::from_raw(fork()?) else {
            isolate(&[pidfd.as_raw_fd().unsigned_abs()], &its);
            serve(&path, &pidfd, base)
        };
        let pipe = own.try_clone()?.into();
        Ok(Self {
            child: RefCell::new(Some((Reader::of(pid, pipe, READ_TIMEOUT), own))),
            scans: Cell::new(false),
        })
    }

    /// Opens the pagemap of the current program: the one of an earlier program is empty.
    pub(crate) fn open(&self) -> io::Result<()> {
        let scans = self.call(Call::Open, [0; 3], |_| ())??;
        self.scans.set(scans != 0);
        Ok(())
    }

    /// Reports whether the kernel has PAGEMAP_SCAN.
    pub(crate) fn scans(&self) -> bool {
        self.scans.get()
    }

    /// Calls `visit` with each block in `range` that has present pages; without PAGEMAP_SCAN with
    /// all blocks, and `is_huge` is false. The ends of `range` are multiples of `block`.
    pub(crate) fn survey(
        &self,
        range: Range<usize>,
        block: usize,
        mut visit: impl FnMut(BlockState),
    ) -> io::Result<()> {
        let arguments = [range.start, range.end, block].map(|word| word as u64);
        let word = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
        self.call(
            Call::Survey,
            arguments,
            |[address, present, exclusive, is_huge]| {
                visit(BlockState {
                    address: word(address),
                    present: word(present),
                    exclusive: word(exclusive),
                    is_huge: is_huge != 0,
                });
            },
        )??;
        Ok(())
    }

    /// Collapses a block. The inner error is the kernel's.
    pub(crate) fn collapse(
        &self,
        address: u64,
        length: usize,
        is_prepared: bool,
    ) -> io::Result<Result<(), Errno>> {
        let arguments = [address, length as u64, is_prepared.into()];
        let done = self.call(Call::Collapse, arguments, |_| ())?;
        Ok(done.map(drop))
    }

    /// Makes memory the first to be reclaimed. The inner error is the kernel's.
    pub(crate) fn cool(&self, address: u64, length: usize) -> io::Result<Result<(), Errno>> {
        let done = self.call(Call::Cool, [address, length as u64, 0], |_| ())?;
        Ok(done.map(drop))
    }

    /// Makes a call, and visits each block that it finds. Returns its value.
    fn call(
        &self,
        call: Call,
        [first, second, third]: [u64; 3],
        mut visit: impl FnMut(Message),
    ) -> io::Result<Result<u64, Errno>> {
        let mut child = self.child.borrow_mut();
        let Some((reader, stream)) = child.as_mut() else {
            return Err(io::Error::new(
                ErrorKind::TimedOut,
                "the process held it back before",
            ));
        };
        reader.timeout = match call {
            Call::Open | Call::Survey => READ_TIMEOUT,
            Call::Collapse | Call::Cool => ADVISE_TIMEOUT,
        };
        reader.slept = Duration::ZERO;
        let mut result = || {
            let request = [call as u64, first, second, third].map(u64::to_ne_bytes);
            stream.write_all(request.as_flattened())?;
            let mut message = [0; size_of::<Message>()];
            loop {
                reader.read_exact(&mut message)?;
                match words(message) {
                    [END, errno, value, _] => {
                        let errno = i32::try_from(errno).unwrap_or(libc::EIO);
                        return Ok(match errno {
                            0 => Ok(value),
                            errno => Err(Errno::from_raw_os_error(errno)),
                        });
                    }
                    block => visit(block),
                }
            }
        };
        let result = result();
        if result.is_err() {
            *child = None;
        }
        result
    }
}

fn words(bytes: [u8; size_of::<Message>()]) -> Message {
    let (words, _) = bytes.as_chunks::<8>();
    let mut message = Message::default();
    for (word, bytes) in message.iter_mut().zip(words) {
        *word = u64::from_ne_bytes(*bytes);
    }
    message
}

/// Serves requests until the parent closes its end. Makes only system calls, as another thread of the
/// parent may have held any lock at the fork.
fn serve(path: &CString, process: &OwnedFd, base: usize) -> ! {
    let (mut pagemap, mut scans) = (None, false);
    let destination = sys::Destination::new();
    loop {
        let mut request = [0; size_of::<Message>()];
        match rustix::io::retry_on_intr(|| rustix::io::read(stdin(), &mut request)) {
            Ok(read) if read == request.len() => {}
            _ => end(0),
        }
        let [call, first, second, third] = words(request);
        let word = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
        let (first, second, third) = (word(first), word(second), word(third));
        let done = match call {
            call if call == Call::Open as u64 => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
                rustix::fs::open(path.as_c_str(), flags, Mode::empty()).map(|file| {
                    let file = pagemap.insert(Pagemap::of(file));
                    scans = file.walk(0..base, |_, _| ()).is_ok();
                    scans.into()
                })
            }
            call if call == Call::Survey as u64 => match &pagemap {
                Some(pagemap) => survey(pagemap, scans, first..second, third, base).map(|()| 0),
                None => Err(Errno::BADF),
            },
            call if call == Call::Collapse as u64 => {
                let collapse = || sys::collapse_in(process, first, second).map(|_| 0);
                match third {
                    0 => collapse(),
                    // The page faults of the process wait for the copy.
                    _ => destination.collapse(second, collapse).answer,
                }
            }
            _ => sys::cool_in(process, first, second).map(|_| 0),
        };
        let errno = done.err().map_or(0, Errno::raw_os_error);
        send([END, errno.unsigned_abs().into(), done.unwrap_or(0), 0]);
    }
}

/// Sends the state of each block of `range`.
fn survey(
    pagemap: &Pagemap,
    scans: bool,
    range: Range<usize>,
    block: usize,
    base: usize,
) -> Result<(), Errno> {
    let send_state = |at: usize, is_huge: bool| {
        if is_huge {
            send([at, block, 0, 1].map(|word| word as u64));
            return Ok(());
        }
        let pages = at..at + block;
        let present = pagemap.present(pages.clone(), base)?;
        let exclusive = pagemap.exclusive(pages, base)?;
        send([at, present, exclusive, 0].map(|word| word as u64));
        Ok(())
    };
    let block = block.max(base);
    if !scans {
        return range
            .step_by(block)
            .try_for_each(|at| send_state(at, false));
    }
    let (mut last, mut failed) = (None, Ok(()));
    pagemap.walk(range, |run, found| {
        if !found.present {
            return;
        }
        for at in (run.start / block * block..run.end).step_by(block) {
            if last.replace(at) != Some(at) && failed.is_ok() {
                failed = send_state(at, found.huge);
            }
        }
    })?;
    failed
}

/// Sends a message; ends this process where the parent has ended.
fn send(message: Message) {
    let bytes = message.map(u64::to_ne_bytes);
    let mut left = bytes.as_flattened();
    while !left.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::write(stdout(), left)) {
            Ok(written) => left = left.get(written..).unwrap_or_default(),
            Err(_) => end(0),
        }
    }
}
