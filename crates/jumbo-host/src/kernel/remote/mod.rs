//! madvise(2) made by a thread of another process, as ptrace(2) allows: [`advise`].
//!
//! - `tracer`: a child of ours that stops one thread, has it make the calls, and lets it go.
//! - `threads`: the thread to stop, and the moment.
//! - `call`: registers, and what a stop did to the system call that the thread waits in.
//!
//! A child traces, not this process: it blocks all signals and is in a session of its own, so that
//! Ctrl-C and the kill of a process group pass it by. If it were killed while a thread makes a call of
//! ours, the thread would go on with registers that are not its own.
//!
//! Invariants. The thread gets no signal, and no result that it would not have had: see `call`. No
//! byte of the process's memory is written. The thread is let go with its own registers, whatever
//! happens: at a signal, a group stop, an error, and when this process is gone.

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
use super::sys::Blocked;

/// The longest search of the child for a thread, and its longest work with everything.
pub const SEARCH: Duration = Duration::from_millis(1200);
const LIMIT: Duration = Duration::from_secs(20);

/// The advice, on so many bytes from each address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// MADV_COLLAPSE, say.
    pub advice: i32,
    /// The length of each range.
    pub length: usize,
}

/// Why the child stopped before the last address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The time that a thread may be held is over, or all is done.
    #[error("done")]
    Done,
    /// The process has ended, or the thread has: by a kill, or an execve(2).
    #[error("the thread ended meanwhile")]
    Gone,
    /// A signal came for the thread, which has it.
    #[error("a signal came for the thread")]
    Signal,
    /// The process is stopped.
    #[error("the process is stopped (SIGSTOP)")]
    Stopped,
    /// No thread was where it can be stopped without a trace.
    #[error("no thread was at a place where a stop leaves no trace")]
    NoThread,
    /// ptrace(2) refused.
    #[error("ptrace: {0}")]
    Denied(Errno),
    /// A seccomp filter would answer the call, and may kill for it.
    #[error("the thread is under seccomp")]
    Filtered,
    /// The thread runs 32-bit code.
    #[error("the thread runs 32-bit code")]
    Narrow,
    /// The thread has its system calls dispatched to itself (PR_SET_SYSCALL_USER_DISPATCH).
    #[error("the process dispatches its system calls to itself")]
    Dispatched,
    /// There is no instruction for it, in the vDSO or where the thread stands.
    #[error("no system call instruction was found in the process")]
    NoInstruction,
    /// This architecture's registers are not known here.
    #[error("calls by ptrace are made on x86-64 only")]
    Unsupported,
    /// The child could not be made, or did not answer in time.
    #[error("the tracing child failed: {0}")]
    Failed(Errno),
}

impl End {
    /// Those without an errno, in the order of their codes in the pipe, which begin at 1.
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

    /// As two numbers, for the pipe.
    fn encode(self) -> [i32; 2] {
        match self {
            Self::Denied(errno) => [11, errno.raw_os_error()],
            Self::Failed(errno) => [12, errno.raw_os_error()],
            plain => [
                (1..)
                    .zip(Self::PLAIN)
                    .find(|(_, other)| *other == plain)
                    .map_or(0, |(code, _)| code),
                0,
            ],
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

/// The errno of a number that the kernel, or the child, gave; EIO where it is none.
fn errno(number: i32) -> Errno {
    match number {
        1..4096 => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}

/// A wait with a limit that began again for us, with all of its time. It is not made to begin again: until
/// the thread has waited anew, no stop may fall on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    thread: i32,
    /// How often the thread had waited before it began again, modulo 2^31.
    waits: i32,
}

/// A message: the answer to the next address, as an errno, has the code 0.
const ANSWER: i32 = 0;
/// Two messages: [`Renewed`].
const RENEWED: [i32; 2] = [-1, -2];

/// The result of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advised {
    /// The answers, to as many addresses as were reached; 0 or an errno each.
    pub answers: Vec<Result<(), Errno>>,
    /// Why there are no more.
    pub end: End,
    /// To be handed to the next call for the same process.
    pub renewed: Option<Renewed>,
}

/// Has a thread of `process` give an advice on the memory at each of `addresses`, until it was held for
/// `hold`; on one address at least. Waits up to [`SEARCH`] for a moment at which that leaves no trace.
///
/// `pidfd` is of the process. The caller has one thread.
pub fn advise(
    root: &Root,
    process: Pid,
    pidfd: BorrowedFd<'_>,
    addresses: &[u64],
    advice: Advice,
    hold: Duration,
    renewed: Option<Renewed>,
) -> Advised {
    let failed = |errno| Advised {
        answers: Vec::new(),
        end: End::Failed(errno),
        renewed,
    };
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
        Err(errno) => failed(errno),
    }
}

/// Reads what the child says, to its end. A child that says nothing for long is left alone: to kill it
/// could leave a thread with registers that are not its own.
fn collect(child: Pid, pipe: OwnedFd, mut renewed: Option<Renewed>) -> Advised {
    let deadline = Instant::now() + LIMIT;
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
            [ANSWER, 0] => answers.push(Ok(())),
            [ANSWER, number] => answers.push(Err(errno(number))),
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
    fn an_end_survives_the_pipe() {
        let others = [End::Denied(Errno::PERM), End::Failed(Errno::NOMEM)];
        for end in End::PLAIN.into_iter().chain(others) {
            assert_eq!(End::decode(end.encode()), end);
        }
    }
}
