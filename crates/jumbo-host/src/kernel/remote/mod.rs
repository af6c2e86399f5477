//! madvise(2) made by a thread of another process, by ptrace(2): [`advise`].
//!
//! - `tracer`: a child of this process that stops one thread, lets it make the calls, and detaches.
//! - `threads`: selects the thread and the moment.
//! - `call`: registers, and the effect of a stop on the system call that the thread waits in.
//!
//! A child traces, with all signals blocked and in a session of its own: Ctrl-C and a kill of the
//! process group do not reach it. A tracer killed during a call would leave the thread with wrong
//! registers.
//!
//! Invariants: The thread gets no signal and no result that it would not get without a tracer: see
//! `call`. No byte of the process's memory is written. The thread always continues with its own
//! registers: after a signal, a group stop, an error, and the end of this process.

mod call;
mod threads;
mod tracer;

use std::io::Read as _;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};

use super::Root;
use super::process::{fork, is_ready};
use jumbo_sys::Blocked;

/// Maximum time of the child's search for a thread.
const SEARCH_TIMEOUT: Duration = Duration::from_millis(1200);
/// Maximum time of the child.
const CHILD_TIMEOUT: Duration = Duration::from_secs(20);

/// The arguments of madvise(2) that are equal for all addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The advice, such as MADV_COLLAPSE.
    pub advice: i32,
    /// Length of each range in bytes.
    pub length: usize,
}

/// The reason why the child stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// All addresses are done, or the maximum hold time is over.
    #[error("done")]
    Done,
    /// The process or the thread ended, by a kill or an execve(2).
    #[error("the thread ended meanwhile")]
    Gone,
    /// A signal for the thread arrived and was delivered.
    #[error("a signal came for the thread")]
    Signal,
    /// The process is stopped.
    #[error("the process is stopped (SIGSTOP)")]
    Stopped,
    /// No thread could be stopped without an effect on it.
    #[error("no thread was at a place where a stop leaves no trace")]
    NoThread,
    /// ptrace(2) refused.
    #[error("ptrace: {0}")]
    Denied(Errno),
    /// A seccomp filter would see the call, and may kill the process.
    #[error("the thread is under seccomp")]
    Filtered,
    /// The thread runs 32-bit code.
    #[error("the thread runs 32-bit code")]
    Narrow,
    /// The thread handles its system calls itself (PR_SET_SYSCALL_USER_DISPATCH).
    #[error("the process dispatches its system calls to itself")]
    Dispatched,
    /// Neither the vDSO nor the code at the thread's `rip` has a system call instruction.
    #[error("no system call instruction was found in the process")]
    NoInstruction,
    /// The architecture is unsupported.
    #[error("calls by ptrace are made on x86-64 only")]
    Unsupported,
    /// A call waited for the mmap lock of the process for too long.
    #[error("the process holds its memory map back")]
    Held,
    /// The child could not start, or timed out.
    #[error("the tracing child failed: {0}")]
    Failed(Errno),
}

impl End {
    /// Reasons without an errno, in the order of their codes in the pipe, which begin at 1.
    const PLAIN: [Self; 10] = [
        Self::Done,
        Self::Gone,
        Self::Signal,
        Self::Stopped,
        Self::NoThread,
        Self::Filtered,
        Self::Narrow,
        Self::Dispatched,
        Self::NoInstruction,
        Self::Unsupported,
    ];

    /// Encodes the reason as two numbers for the pipe.
    fn encode(self) -> [i32; 2] {
        match self {
            Self::Denied(errno) => [11, errno.raw_os_error()],
            Self::Failed(errno) => [12, errno.raw_os_error()],
            plain => {
                let mut codes = (1..).zip(Self::PLAIN);
                let found = codes.find(|(_, other)| *other == plain);
                [found.map_or(0, |(code, _)| code), 0]
            }
        }
    }

    fn decode([code, value]: [i32; 2]) -> Self {
        let plain = usize::try_from(code - 1)
            .ok()
            .and_then(|at| Self::PLAIN.get(at));
        match (plain, code) {
            (Some(plain), _) => *plain,
            (None, 11) => Self::Denied(errno(value)),
            (None, _) => Self::Failed(errno(value)),
        }
    }
}

/// Converts a number from the kernel or the child to an errno; EIO where it is invalid.
fn errno(number: i32) -> Errno {
    match number {
        1..4096 => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}

/// A wait that a stop restarted with its full timeout. The thread may not be stopped again before
/// its next wait, so that each wait restarts at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    thread: i32,
    /// Number of the thread's waits before the restart, modulo 2^31.
    waits: i32,
}

/// Code of the message with the result for the next address, 0 or an errno.
const RESULT: i32 = 0;
/// Codes of the two messages of a [`Renewed`].
const RENEWED: [i32; 2] = [-1, -2];

/// Results of [`advise`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advised {
    /// Results for the first addresses.
    pub answers: Vec<Result<(), Errno>>,
    /// The reason why there are no more.
    pub end: End,
    /// Argument of the next call for the same process.
    pub renewed: Option<Renewed>,
}

/// Makes a thread of `process` advise each of `addresses` in turn, at least one, until `hold` is
/// over. Waits up to 1.2 s for a moment at which a stop has no effect on the thread.
///
/// `pidfd` refers to `process`. The caller has one thread.
pub fn advise(
    root: &Root,
    process: Pid,
    pidfd: BorrowedFd<'_>,
    addresses: &[u64],
    advice: Advice,
    hold: Duration,
    renewed: Option<Renewed>,
) -> Advised {
    let started = || {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // The child inherits the mask.
        let _blocked = Blocked::all();
        let child = fork().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        match Pid::from_raw(child) {
            Some(child) => Ok((child, read)),
            None => {
                drop(read);
                let work = (addresses, advice, hold);
                tracer::serve(root, (process, pidfd), work, renewed, &write)
            }
        }
    };
    match started() {
        Ok((child, pipe)) => collect(child, pipe, renewed),
        Err(errno) => Advised {
            answers: Vec::new(),
            end: End::Failed(errno),
            renewed,
        },
    }
}

/// Reads the messages of the child to their end. A child that times out is not killed, because a
/// kill could leave a thread with wrong registers.
fn collect(child: Pid, pipe: OwnedFd, mut renewed: Option<Renewed>) -> Advised {
    let deadline = Instant::now() + CHILD_TIMEOUT;
    let (mut answers, mut end) = (Vec::new(), End::Failed(Errno::PIPE));
    let mut pipe = std::fs::File::from(pipe);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match is_ready(&pipe, left) {
            Ok(true) => {}
            Ok(false) => {
                let end = End::Failed(Errno::TIMEDOUT);
                return Advised {
                    answers,
                    end,
                    renewed,
                };
            }
            Err(errno) => {
                end = End::Failed(errno);
                break;
            }
        }
        let mut message = [[0u8; 4]; 2];
        if pipe.read_exact(message.as_flattened_mut()).is_err() {
            break;
        }
        match message.map(i32::from_ne_bytes) {
            [RESULT, 0] => answers.push(Ok(())),
            [RESULT, number] => answers.push(Err(errno(number))),
            [code, thread] if code == RENEWED[0] => renewed = Some(Renewed { thread, waits: 0 }),
            [code, waits] if code == RENEWED[1] => {
                renewed = renewed.map(|renewed| Renewed { waits, ..renewed });
            }
            other => end = End::decode(other),
        }
    }
    let _ = waitpid(Some(child), WaitOptions::empty());
    Advised {
        answers,
        end,
        renewed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_survives_the_pipe() {
        let others = [End::Denied(Errno::PERM), End::Failed(Errno::NOMEM)];
        for end in End::PLAIN.into_iter().chain(others) {
            assert_eq!(End::decode(end.encode()), end);
        }
    }
}
