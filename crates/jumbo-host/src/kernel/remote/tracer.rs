//! The child that traces: [`serve`].

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::call::{SavedRegisters, find};
use super::{Advice, End, RENEWED, RESULT, Renewed, threads};
use crate::kernel::Root;
use crate::kernel::process::{Stop, end, is_ready};
use crate::kernel::smaps::Smaps;
use crate::kernel::task::is_filtered;
use jumbo_sys::ptrace::{self, PTRACE_O_TRACESYSGOOD};

/// Maximum time until a thread stops. A thread in uninterruptible sleep takes longer.
const STOP_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval between two polls for a stop, after the first [`MAX_YIELDS`].
const POLL_INTERVAL: Duration = Duration::from_micros(30);
const MAX_YIELDS: u32 = 20;
/// Code of the SIGSYS of a dispatched call (Linux 5.11).
const SYS_USER_DISPATCH: i32 = 2;

/// Traces, sends the results, and ends this process.
pub(super) fn serve(
    root: &Root,
    (process, pidfd): (Pid, BorrowedFd<'_>),
    work: (&[u64], Advice, Duration),
    renewed: Option<Renewed>,
    pipe: &OwnedFd,
) -> ! {
    // The caller's pipes and files must not stay open for this child.
    if let Ok(null) = root.open("dev/null") {
        let _ = dup2_stdin(&null);
    }
    if let Ok(null) = File::options().write(true).open(root.path("dev/null")) {
        let _ = (dup2_stdout(&null), dup2_stderr(&null));
    }
    // A kill of the process group must not reach this child.
    let _ = rustix::process::setsid();
    let send = |message: [i32; 2]| {
        let message = message.map(i32::to_ne_bytes);
        // Atomic, as less than PIPE_BUF. Without a reader the message is dropped.
        let _ = rustix::io::write(pipe.as_fd(), message.as_flattened());
    };
    let reason = trace(root, (process, pidfd), work, renewed, send).unwrap_or_else(|end| end);
    send(reason.encode());
    end(0)
}

fn trace(
    root: &Root,
    (process, pidfd): (Pid, BorrowedFd<'_>),
    (addresses, advice, hold): (&[u64], Advice, Duration),
    renewed: Option<Renewed>,
    send: impl Fn([i32; 2]),
) -> Result<End, End> {
    let vdso = vdso(root, process);
    // Checked before the stop: `threads` does not know the system calls of 32-bit code.
    if vdso.is_some_and(|address| u32::try_from(address).is_ok()) {
        return Err(End::Narrow);
    }
    let thread = threads::pick(root, process, renewed)?;
    ptrace::seize(thread, PTRACE_O_TRACESYSGOOD).map_err(|errno| match errno {
        Errno::SRCH => End::Gone,
        errno => End::Denied(errno),
    })?;
    // Either ID may have been reused. The end of this process detaches the thread.
    let is_thread = root.path(format!("proc/{process}/task/{thread}")).exists();
    if !is_thread || is_ready(pidfd, Duration::ZERO) != Ok(false) {
        return Err(End::Gone);
    }
    let thread = TracedThread(thread);
    ptrace::interrupt(thread.0).map_err(|_| End::Gone)?;
    thread.stop_at_exit_from_kernel()?;
    let saved = SavedRegisters::save(thread.0, vdso);
    let is_filtered = is_filtered(root, format!("{process}/task/{}", thread.0)).unwrap_or(true);
    let saved = match saved {
        Ok(saved) if !is_filtered => saved,
        saved => {
            let _ = Stop::Trap.detach(thread.0);
            return Err(saved.err().unwrap_or(End::Filtered));
        }
    };
    // Runs at the last stop, because each stop counts as a wait.
    let restore = || {
        if saved.restarts_timeout() {
            let [thread, waits] = Renewed::of(root, process, thread.0).numbers();
            let [first, second] = RENEWED;
            send([first, thread]);
            send([second, waits]);
        }
        saved.restore()
    };
    let started = Instant::now();
    for address in addresses {
        match thread.call(&saved, *address, advice)? {
            Ok(result) => send([RESULT, result.err().map_or(0, Errno::raw_os_error)]),
            Err((stop, reason)) => {
                // The thread is at another stop at its exit from the kernel.
                let _ = restore();
                let _ = stop.detach(thread.0);
                return Ok(reason);
            }
        }
        if started.elapsed() >= hold {
            break;
        }
    }
    restore().map_err(|_| End::Gone)?;
    let _ = Stop::Trap.detach(thread.0);
    Ok(End::Done)
}

/// A thread that this one traces.
struct TracedThread(Pid);

/// A stop that interrupts a call, and the reason.
type Interruption = (Stop, End);

impl TracedThread {
    /// Waits for the next stop. No timeout applies while the registers are those of a call, because
    /// the thread must get its own registers back.
    fn stop(&self, timeout: Option<Duration>) -> Result<Stop, End> {
        let (started, mut polls) = (Instant::now(), 0);
        loop {
            match ptrace::wait_any(self.0).map(|status| status.map(Stop::of)) {
                Ok(Some(Some(stop))) => return Ok(stop),
                Ok(Some(None)) | Err(_) => return Err(End::Gone),
                Ok(None) if timeout.is_some_and(|timeout| started.elapsed() > timeout) => {
                    return Err(End::NoThread);
                }
                Ok(None) if polls < MAX_YIELDS => std::thread::yield_now(),
                Ok(None) => std::thread::sleep(POLL_INTERVAL),
            }
            polls += 1;
        }
    }

    /// Waits for the stop of PTRACE_INTERRUPT. Earlier signals are delivered.
    fn stop_at_exit_from_kernel(&self) -> Result<(), End> {
        loop {
            match self.stop(Some(STOP_TIMEOUT))? {
                Stop::Trap => return Ok(()),
                stop @ Stop::Group(_) => {
                    let _ = stop.detach(self.0);
                    return Err(End::Stopped);
                }
                stop => stop.pass(self.0).map_err(|_| End::Gone)?,
            }
        }
    }

    /// Makes the thread perform one call. All stops that interrupt it are at the exit from the
    /// kernel.
    fn call(
        &self,
        saved: &SavedRegisters,
        address: u64,
        advice: Advice,
    ) -> Result<Result<Result<(), Errno>, Interruption>, End> {
        let gone = |_| End::Gone;
        saved.set_call(address, advice).map_err(gone)?;
        loop {
            ptrace::resume_to_call(self.0).map_err(gone)?;
            match self.stop(None)? {
                Stop::Call => break,
                // The end of a group stop, unrelated to the call.
                Stop::Trap => {}
                // The call caused this signal, so the thread must not get it.
                Stop::Signal(libc::SIGSYS)
                    if ptrace::signal_code(self.0) == Ok(SYS_USER_DISPATCH) =>
                {
                    return Ok(Err((Stop::Trap, End::Dispatched)));
                }
                // A fault of the instruction, which the program made not executable: not delivered.
                Stop::Signal(libc::SIGSEGV | libc::SIGBUS | libc::SIGILL)
                    if ptrace::signal_code(self.0).is_ok_and(|code| code > 0)
                        && saved.is_at_call() =>
                {
                    return Ok(Err((Stop::Trap, End::NoInstruction)));
                }
                stop @ Stop::Group(_) => return Ok(Err((stop, End::Stopped))),
                stop => return Ok(Err((stop, End::Signal))),
            }
        }
        // Stops the thread at its exit from the kernel, before any signal.
        ptrace::interrupt(self.0).map_err(gone)?;
        ptrace::resume(self.0, 0).map_err(gone)?;
        let stop = self.stop(None)?;
        let result = saved.call_result().map_err(gone)?;
        match stop {
            Stop::Trap => Ok(Ok(result)),
            stop @ Stop::Group(_) => Ok(Err((stop, End::Stopped))),
            stop => Ok(Err((stop, End::Signal))),
        }
    }
}

/// Address of the instruction in the vDSO of `process`, at the same offset as in this process. The
/// kernel maps one vDSO to all 64-bit processes. The bytes are checked before their use.
fn vdso(root: &Root, process: Pid) -> Option<u64> {
    let range = |maps: &Smaps| {
        let mut mappings = maps.mappings().filter(|mapping| mapping.path == "[vdso]");
        mappings.next().map(|mapping| mapping.start..mapping.end)
    };
    let own = range(&Smaps::read_maps(root, std::process::id()).ok()?)?;
    let length = usize::try_from(own.end - own.start).ok()?;
    let memory = root.open("proc/self/mem").ok()?;
    let mut code = vec![0; length];
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut code, own.start).ok()?;
    let offset = find(&code)?;
    let theirs = Smaps::read_maps(root, process.as_raw_nonzero().get().unsigned_abs()).ok()?;
    let at = range(&theirs)?.start + offset as u64;
    // The program may have made it not executable.
    let mut mappings = theirs.mappings();
    let runs =
        mappings.any(|mapping| mapping.execute && (mapping.start..mapping.end).contains(&at));
    runs.then_some(at)
}
