//! Selects the thread to stop, and the moment: [`pick`].
//!
//! A stop interrupts the system call that a thread waits in. The kernel restarts most calls with
//! their remaining timeout: these are *exact*. epoll_wait(2) and a few others return EINTR.
//! [`call`](super::call) restarts them, but with their full timeout. So a thread in such a call
//! with a timeout is stopped only just after it entered ([`MAX_SCAN_GAP`]), which bounds the delay.
//! A call that may have moved a part of its data (write(2), send(2)) would return less: its thread
//! is not stopped.
//!
//! A running thread is the second choice, because it can enter any call before it stops.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::{End, Renewed, SEARCH_TIMEOUT};
use crate::kernel::Root;
use crate::kernel::task::{Status, is_worker};

/// Interval between two scans of the threads.
const SCAN_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum time between two scans that are compared.
const MAX_SCAN_GAP: Duration = Duration::from_millis(3);
/// Maximum number of threads per scan.
const MAX_THREADS: usize = 64;

/// State of a thread by the effect of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadState {
    /// Running or runnable.
    Running,
    /// In a call on which a stop has no effect.
    Exact,
    /// In a call that restarts with its full timeout.
    Limited,
    /// Any other state.
    Other,
}

/// Selects a thread of `process` that can be stopped now.
///
/// # Errors
/// [`End::Gone`], [`End::NoThread`].
pub(super) fn pick(root: &Root, process: Pid, renewed: Option<Renewed>) -> Result<Pid, End> {
    let started = Instant::now();
    // Number of waits of each thread at the last scan.
    let mut seen: BTreeMap<i32, Option<u64>> = BTreeMap::new();
    let mut last = started;
    while started.elapsed() < SEARCH_TIMEOUT {
        let mut second = None;
        // A late scan does not tell when a wait began.
        let is_soon = last.elapsed() < MAX_SCAN_GAP;
        last = Instant::now();
        let names = root.list(format!("proc/{process}/task"));
        let names = names.map_err(|_| End::Gone)?;
        let threads = names
            .iter()
            .filter_map(|name| Pid::from_raw(name.parse().ok()?));
        for thread in threads.take(MAX_THREADS) {
            let excluded = || {
                is_worker(root, format!("{process}/task/{thread}")).unwrap_or(true)
                    || renewed.is_some_and(|renewed| is_in(root, process, thread, renewed))
            };
            let state = match state(root, process, thread) {
                state if state == ThreadState::Other || excluded() => ThreadState::Other,
                state => state,
            };
            let waits = (state == ThreadState::Limited).then(|| waits(root, process, thread));
            let before = seen.insert(thread.as_raw_nonzero().get(), waits.flatten());
            // The thread was scanned before, and was in no wait or in another one.
            let is_new_wait = || is_soon && before.is_some_and(|before| Some(before) != waits);
            match state {
                ThreadState::Exact => return Ok(thread),
                ThreadState::Running => second = second.or(Some(thread)),
                ThreadState::Limited if is_new_wait() => second = second.or(Some(thread)),
                ThreadState::Limited | ThreadState::Other => {}
            }
        }
        if let Some(thread) = second {
            return Ok(thread);
        }
        std::thread::sleep(SCAN_INTERVAL);
    }
    Err(End::NoThread)
}

impl Renewed {
    /// The wait that the stopped `thread` is about to restart.
    pub(super) fn of(root: &Root, process: Pid, thread: Pid) -> Self {
        Self {
            thread: thread.as_raw_nonzero().get(),
            waits: waits(root, process, thread).map_or(0, low),
        }
    }

    /// The numbers for the pipe.
    pub(super) fn numbers(self) -> [i32; 2] {
        [self.thread, self.waits]
    }
}

/// Reports whether a thread may still be in the restarted wait, which counts as one more.
fn is_in(root: &Root, process: Pid, thread: Pid, renewed: Renewed) -> bool {
    thread.as_raw_nonzero().get() == renewed.thread
        && waits(root, process, thread).is_none_or(|waits| {
            let since = low(waits).wrapping_sub(renewed.waits) & i32::MAX;
            since < 2
        })
}

/// The lower 31 bits of a number.
fn low(number: u64) -> i32 {
    i32::try_from(number & 0x7fff_ffff).unwrap_or(0)
}

fn waits(root: &Root, process: Pid, thread: Pid) -> Option<u64> {
    let status = Status::read(root, format!("{process}/task/{thread}")).ok()?;
    status.get("voluntary_ctxt_switches")?.parse().ok()
}

/// State of a thread according to its `syscall` file (proc_pid_syscall(5)).
fn state(root: &Root, process: Pid, thread: Pid) -> ThreadState {
    let text = root.read(format!("proc/{process}/task/{thread}/syscall"));
    let text = text.unwrap_or_default();
    let mut words = text.split_ascii_whitespace();
    let number = match words.next() {
        Some("running") => return ThreadState::Running,
        Some(number) => number.parse().unwrap_or(-1),
        None => return ThreadState::Other,
    };
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let arguments: Vec<u64> = words.take(6).filter_map(hex).collect();
    let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
    let is_pipe = |fd: u64| {
        let file = std::fs::read_link(root.path(format!("proc/{process}/fd/{fd}")));
        let file = file.unwrap_or_default();
        let file = file.to_string_lossy();
        file.starts_with("pipe:") || file.starts_with("anon_inode:")
    };
    state_of_call(number, argument, is_pipe)
}

/// State of a thread in the call `number` with these arguments.
pub(super) fn state_of_call(
    number: i64,
    argument: impl Fn(usize) -> u64,
    is_pipe: impl Fn(u64) -> bool,
) -> ThreadState {
    const FUTEX_WAIT: u64 = 0;
    const FUTEX_WAIT_BITSET: u64 = 9;
    const FUTEX_CMD_MASK: u64 = 0x7f;
    const SIGN_BIT: u64 = 1 << 31;
    let limited = |is_limited| match is_limited {
        true => ThreadState::Limited,
        false => ThreadState::Exact,
    };
    match number {
        libc::SYS_futex => match argument(1) & FUTEX_CMD_MASK {
            FUTEX_WAIT | FUTEX_WAIT_BITSET => ThreadState::Exact,
            _ => ThreadState::Other,
        },
        libc::SYS_nanosleep
        | libc::SYS_clock_nanosleep
        | libc::SYS_ppoll
        | libc::SYS_pselect6
        | libc::SYS_rt_sigsuspend
        | libc::SYS_restart_syscall
        | libc::SYS_wait4
        | libc::SYS_waitid => ThreadState::Exact,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll | libc::SYS_select | libc::SYS_pause => ThreadState::Exact,
        // A socket may have a timeout (SO_RCVTIMEO).
        libc::SYS_read | libc::SYS_readv => limited(!is_pipe(argument(0))),
        libc::SYS_accept | libc::SYS_accept4 => ThreadState::Limited,
        // The timeout is an int: the upper bits are undefined.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => limited(argument(3) & SIGN_BIT == 0),
        libc::SYS_epoll_pwait => limited(argument(3) & SIGN_BIT == 0),
        libc::SYS_epoll_pwait2 => limited(argument(3) != 0),
        libc::SYS_rt_sigtimedwait => limited(argument(2) != 0),
        libc::SYS_semtimedop => limited(argument(3) != 0),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_semop => ThreadState::Exact,
        _ => ThreadState::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_and_its_arguments_decide_the_state() {
        use ThreadState::{Exact, Limited, Other};
        let forever = u64::from(u32::MAX);
        for (number, arguments, expected) in [
            (libc::SYS_futex, &[0x1000, 0x80][..], Exact),
            (libc::SYS_futex, &[0x1000, 0x189], Exact),
            (libc::SYS_futex, &[0x1000, 0x86], Other),
            (libc::SYS_read, &[0], Exact),
            (libc::SYS_read, &[1], Limited),
            (libc::SYS_write, &[0], Other),
            (libc::SYS_epoll_pwait, &[3, 1, 1, 100], Limited),
            (libc::SYS_epoll_pwait, &[3, 1, 1, forever], Exact),
            (libc::SYS_epoll_pwait, &[3, 1, 1, u64::MAX], Exact),
            (libc::SYS_epoll_pwait2, &[3, 1, 1, 0], Exact),
            (libc::SYS_rt_sigtimedwait, &[1, 1, 9], Limited),
        ] {
            let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
            let state = state_of_call(number, argument, |fd| fd == 0);
            assert_eq!(state, expected, "{number} {arguments:?}");
        }
    }
}
