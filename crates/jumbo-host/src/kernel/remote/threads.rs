//! The thread to stop, and the moment: [`pick`].
//!
//! A stop ends the system call that a thread waits in. Most calls the kernel begins again by itself,
//! with the time that is left: those are *exact*. epoll_wait(2) and a few more answer EINTR; they are
//! begun again by [`call`](super::call), but with all of their time. So a thread in such a call with a
//! limit is stopped only just after it entered it ([`MAX_BETWEEN`]): its time is late by no more than that.
//! A call that may have moved a part of its data (write(2), send(2)) would answer with less: a thread
//! in it is left alone.
//!
//! A thread that runs is the second choice. It can enter any call before it stops.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::{End, Renewed, SEARCH};
use crate::kernel::Root;
use crate::kernel::task::{Status, is_worker};

/// The time between two looks at the threads.
const LOOK: Duration = Duration::from_millis(1);
/// The most between two looks that are compared.
const MAX_BETWEEN: Duration = Duration::from_millis(3);
/// The number of threads that are looked at.
const MAX_THREADS: usize = 64;

/// Where a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It runs, or is about to.
    Running,
    /// In a call that goes on after a stop as if there had been none.
    Exact,
    /// In a call that begins again with all of its time.
    Limited,
    /// Anywhere else.
    Other,
}

/// A thread of `process` that can be stopped now.
///
/// # Errors
/// [`End::Gone`], [`End::NoThread`].
pub(super) fn pick(root: &Root, process: Pid, renewed: Option<Renewed>) -> Result<Pid, End> {
    let started = Instant::now();
    // How often a thread has waited, where it was seen before.
    let mut seen: BTreeMap<i32, Option<u64>> = BTreeMap::new();
    let mut last = started;
    while started.elapsed() < SEARCH {
        let mut second = None;
        // A look that came late says nothing of when a wait began.
        let is_soon = last.elapsed() < MAX_BETWEEN;
        last = Instant::now();
        let names = root.list(format!("proc/{process}/task"));
        let names = names.map_err(|_| End::Gone)?;
        let threads = names
            .iter()
            .filter_map(|name| Pid::from_raw(name.parse().ok()?));
        for thread in threads.take(MAX_THREADS) {
            let place = match place(root, process, thread) {
                Place::Other => Place::Other,
                _ if is_worker(root, format!("{process}/task/{thread}")).unwrap_or(true) => {
                    Place::Other
                }
                place => place,
            };
            let place = match renewed {
                Some(renewed) if is_in(root, process, thread, renewed) => Place::Other,
                _ => place,
            };
            let waits = (place == Place::Limited).then(|| waits(root, process, thread));
            let before = seen.insert(thread.as_raw_nonzero().get(), waits.flatten());
            match place {
                Place::Exact => return Ok(thread),
                Place::Running => second = second.or(Some(thread)),
                // Seen a look ago, and in another wait then, or none.
                Place::Limited if is_soon && before.is_some_and(|before| Some(before) != waits) => {
                    second = second.or(Some(thread));
                }
                Place::Limited | Place::Other => {}
            }
        }
        if let Some(thread) = second {
            return Ok(thread);
        }
        std::thread::sleep(LOOK);
    }
    Err(End::NoThread)
}

impl Renewed {
    /// That `thread`, which is stopped, begins its wait again.
    pub(super) fn of(root: &Root, process: Pid, thread: Pid) -> Self {
        Self {
            thread: thread.as_raw_nonzero().get(),
            waits: waits(root, process, thread).map_or(0, low),
        }
    }

    /// For the pipe.
    pub(super) fn numbers(self) -> [i32; 2] {
        [self.thread, self.waits]
    }
}

/// Whether a thread may still be in the wait that began again: it counts as one more.
fn is_in(root: &Root, process: Pid, thread: Pid, renewed: Renewed) -> bool {
    thread.as_raw_nonzero().get() == renewed.thread
        && waits(root, process, thread).is_none_or(|waits| {
            let since = low(waits).wrapping_sub(renewed.waits) & i32::MAX;
            since < 2
        })
}

/// The lower bits of a number.
fn low(number: u64) -> i32 {
    i32::try_from(number & 0x7fff_ffff).unwrap_or(0)
}

fn waits(root: &Root, process: Pid, thread: Pid) -> Option<u64> {
    let status = Status::read(root, format!("{process}/task/{thread}")).ok()?;
    status.get("voluntary_ctxt_switches")?.parse().ok()
}

/// Where a thread is, by its `syscall` file (proc_pid_syscall(5)).
pub(super) fn place(root: &Root, process: Pid, thread: Pid) -> Place {
    let text = root.read(format!("proc/{process}/task/{thread}/syscall"));
    let text = text.unwrap_or_default();
    let mut words = text.split_ascii_whitespace();
    let number = match words.next() {
        Some("running") => return Place::Running,
        Some(number) => number.parse().unwrap_or(-1),
        None => return Place::Other,
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
    place_in(number, argument, is_pipe)
}

/// The same by number and arguments.
pub(super) fn place_in(
    number: i64,
    argument: impl Fn(usize) -> u64,
    is_pipe: impl Fn(u64) -> bool,
) -> Place {
    const FUTEX_WAIT: u64 = 0;
    const FUTEX_WAIT_BITSET: u64 = 9;
    const FUTEX_COMMAND: u64 = 0x7f;
    const SIGN: u64 = 1 << 31;
    let limited = |is_limited| {
        if is_limited {
            Place::Limited
        } else {
            Place::Exact
        }
    };
    match number {
        libc::SYS_futex => match argument(1) & FUTEX_COMMAND {
            FUTEX_WAIT | FUTEX_WAIT_BITSET => Place::Exact,
            _ => Place::Other,
        },
        libc::SYS_nanosleep
        | libc::SYS_clock_nanosleep
        | libc::SYS_ppoll
        | libc::SYS_pselect6
        | libc::SYS_rt_sigsuspend
        | libc::SYS_restart_syscall
        | libc::SYS_wait4
        | libc::SYS_waitid => Place::Exact,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll | libc::SYS_select | libc::SYS_pause => Place::Exact,
        // Of a socket the time may be limited (SO_RCVTIMEO).
        libc::SYS_read | libc::SYS_readv => limited(!is_pipe(argument(0))),
        libc::SYS_accept | libc::SYS_accept4 => Place::Limited,
        // As an int: what is above is undefined.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => limited(argument(3) & SIGN == 0),
        libc::SYS_epoll_pwait => limited(argument(3) & SIGN == 0),
        libc::SYS_epoll_pwait2 => limited(argument(3) != 0),
        libc::SYS_rt_sigtimedwait => limited(argument(2) != 0),
        libc::SYS_semtimedop => limited(argument(3) != 0),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_semop => Place::Exact,
        _ => Place::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_exact_or_limited_by_its_call_and_arguments() {
        let forever = u64::from(u32::MAX);
        for (number, arguments, place) in [
            (libc::SYS_futex, &[0x1000, 0x80][..], Place::Exact),
            (libc::SYS_futex, &[0x1000, 0x189], Place::Exact),
            (libc::SYS_futex, &[0x1000, 0x86], Place::Other),
            (libc::SYS_read, &[0], Place::Exact),
            (libc::SYS_read, &[1], Place::Limited),
            (libc::SYS_write, &[0], Place::Other),
            (libc::SYS_epoll_pwait, &[3, 1, 1, 100], Place::Limited),
            (libc::SYS_epoll_pwait, &[3, 1, 1, forever], Place::Exact),
            (libc::SYS_epoll_pwait, &[3, 1, 1, u64::MAX], Place::Exact),
            (libc::SYS_epoll_pwait2, &[3, 1, 1, 0], Place::Exact),
            (libc::SYS_rt_sigtimedwait, &[1, 1, 9], Place::Limited),
        ] {
            let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
            assert_eq!(
                place_in(number, argument, |fd| fd == 0),
                place,
                "{number} {arguments:?}"
            );
        }
    }
}
