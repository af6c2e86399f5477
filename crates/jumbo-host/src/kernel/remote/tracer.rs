//! The child that traces: [`serve`].

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::call::{Held, find};
use super::{ANSWER, Advice, End, RENEWED, Renewed, threads};
use crate::kernel::Root;
use crate::kernel::process::{Stop, end, is_ready};
use crate::kernel::smaps::Smaps;
use crate::kernel::sys::ptrace;
use crate::kernel::task::is_filtered;

/// The time in which a thread stops. One that is where no signal reaches it takes longer.
const STOPS: Duration = Duration::from_millis(200);
/// The time between two looks for a stop, after the first [`YIELDS`].
const SLICE: Duration = Duration::from_micros(30);
const YIELDS: u32 = 20;
/// The code of a SIGSYS by which a call was dispatched (SYS_USER_DISPATCH, 5.11).
const DISPATCHED: i32 = 2;

/// Traces, says what came of it, and ends this process.
pub(super) fn serve(
    root: &Root,
    (process, pidfd): (Pid, BorrowedFd<'_>),
    work: (&[u64], Advice, Duration),
    renewed: Option<Renewed>,
    pipe: &OwnedFd,
) -> ! {
    // What the caller's descriptors lead to may end without it.
    if let Ok(null) = root.open("dev/null") {
        let _ = dup2_stdin(&null);
    }
    if let Ok(null) = File::options().write(true).open(root.path("dev/null")) {
        let _ = (dup2_stdout(&null), dup2_stderr(&null));
    }
    // A session of its own: a kill of the process group is not for it.
    let _ = rustix::process::setsid();
    let say = |message: [i32; 2]| {
        let message = message.map(i32::to_ne_bytes);
        // Less than what a pipe takes as a whole. Where no process reads it there is nothing to do.
        let _ = rustix::io::write(pipe.as_fd(), message.as_flattened());
    };
    let why = trace(root, (process, pidfd), work, renewed, say).unwrap_or_else(|why| why);
    say(why.encode());
    end(0)
}

fn trace(
    root: &Root,
    (process, pidfd): (Pid, BorrowedFd<'_>),
    (addresses, advice, hold): (&[u64], Advice, Duration),
    renewed: Option<Renewed>,
    say: impl Fn([i32; 2]),
) -> Result<End, End> {
    let vdso = vdso(root, process);
    // Before it is stopped: the system calls of 32-bit code are not looked through.
    if vdso.is_some_and(|address| u32::try_from(address).is_ok()) {
        return Err(End::Narrow);
    }
    let thread = threads::pick(root, process, renewed)?;
    ptrace::seize_for_calls(thread).map_err(|errno| match errno {
        Errno::SRCH => End::Gone,
        errno => End::Denied(errno),
    })?;
    // Either ID may be another's by now. The end of this process lets go of it.
    let is_its = root.path(format!("proc/{process}/task/{thread}")).exists();
    if !is_its || is_ready(pidfd, Duration::ZERO) != Ok(false) {
        return Err(End::Gone);
    }
    let thread = Thread(thread);
    ptrace::interrupt(thread.0).map_err(|_| End::Gone)?;
    thread.stop_on_way_out()?;
    let held = Held::take(thread.0, vdso);
    let is_filtered = is_filtered(root, format!("{process}/task/{}", thread.0)).unwrap_or(true);
    let held = match held {
        Ok(held) if !is_filtered => held,
        held => {
            let _ = Stop::Trap.detach(thread.0);
            return Err(held.err().unwrap_or(End::Filtered));
        }
    };
    // At its last stop: each counts as a wait.
    let leave = || {
        if held.is_renewed() {
            let [thread, waits] = Renewed::of(root, process, thread.0).numbers();
            let [first, second] = RENEWED;
            say([first, thread]);
            say([second, waits]);
        }
        held.put_back()
    };
    let started = Instant::now();
    for address in addresses {
        match thread.call(&held, *address, advice) {
            Ok(Ok(made)) => say([ANSWER, made.err().map_or(0, Errno::raw_os_error)]),
            Ok(Err((stop, why))) => {
                // It stands at another stop on its way out of the kernel.
                let _ = leave();
                let _ = stop.detach(thread.0);
                return Ok(why);
            }
            Err(end) => return Err(end),
        }
        if started.elapsed() >= hold {
            break;
        }
    }
    leave().map_err(|_| End::Gone)?;
    let _ = Stop::Trap.detach(thread.0);
    Ok(End::Done)
}

/// A thread that is traced by this one.
struct Thread(Pid);

/// A stop that is no call's, and what follows from it.
type Cut = (Stop, End);

impl Thread {
    /// Waits for its next stop. Without a limit while the registers are those of a call: whatever the call
    /// waits for, the thread must get its own back.
    fn stop(&self, patience: Option<Duration>) -> Result<Stop, End> {
        let (started, mut looks) = (Instant::now(), 0);
        loop {
            match ptrace::wait_any(self.0).map(|status| status.map(Stop::of)) {
                Ok(Some(Some(stop))) => return Ok(stop),
                Ok(Some(None)) | Err(_) => return Err(End::Gone),
                Ok(None) if patience.is_some_and(|most| started.elapsed() > most) => {
                    return Err(End::NoThread);
                }
                Ok(None) if looks < YIELDS => std::thread::yield_now(),
                Ok(None) => std::thread::sleep(SLICE),
            }
            looks += 1;
        }
    }

    /// Waits until it stands where it was interrupted. Signals that come first it gets.
    fn stop_on_way_out(&self) -> Result<(), End> {
        loop {
            match self.stop(Some(STOPS))? {
                Stop::Trap => return Ok(()),
                stop @ Stop::Group(_) => {
                    let _ = stop.detach(self.0);
                    return Err(End::Stopped);
                }
                stop => stop.pass(self.0).map_err(|_| End::Gone)?,
            }
        }
    }

    /// Has it make one call. The stops that cut it short are all on the way out of the kernel.
    fn call(
        &self,
        held: &Held,
        address: u64,
        advice: Advice,
    ) -> Result<Result<Result<(), Errno>, Cut>, End> {
        let gone = |_| End::Gone;
        held.aim(address, advice).map_err(gone)?;
        loop {
            ptrace::resume_to_call(self.0).map_err(gone)?;
            match self.stop(None)? {
                Stop::Call => break,
                // A group stop that has ended: nothing to do with the call.
                Stop::Trap => {}
                // The answer of PR_SET_SYSCALL_USER_DISPATCH to the call is not for the thread.
                Stop::Signal(libc::SIGSYS) if ptrace::signal_code(self.0) == Ok(DISPATCHED) => {
                    return Ok(Err((Stop::Trap, End::Dispatched)));
                }
                // A fault of our instruction, which the program made not executable: no signal of its own.
                Stop::Signal(libc::SIGSEGV | libc::SIGBUS | libc::SIGILL)
                    if ptrace::signal_code(self.0).is_ok_and(|code| code > 0)
                        && held.is_at_call() =>
                {
                    return Ok(Err((Stop::Trap, End::NoInstruction)));
                }
                stop @ Stop::Group(_) => return Ok(Err((stop, End::Stopped))),
                stop => return Ok(Err((stop, End::Signal))),
            }
        }
        // So that it stops on its way out, before any signal.
        ptrace::interrupt(self.0).map_err(gone)?;
        ptrace::resume(self.0, 0).map_err(gone)?;
        let stop = self.stop(None)?;
        let made = held.answer().map_err(gone)?;
        match stop {
            Stop::Trap => Ok(Ok(made)),
            stop @ Stop::Group(_) => Ok(Err((stop, End::Stopped))),
            stop => Ok(Err((stop, End::Signal))),
        }
    }
}

/// Where the vDSO of `process` has the instruction: where ours has it. The kernel maps the same to all
/// 64-bit processes, and no program changes it; its bytes are looked at before they are used.
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
