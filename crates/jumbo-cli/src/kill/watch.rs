//! The signal, and the wait for what comes of it: [`run`].

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use jumbo_host::kernel::process::Signals;
use rustix::event::{PollFd, PollFlags};

use super::target::Target;
use crate::signal::{Number, poll};

/// Why the wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Every target is gone, or goes on.
    Concluded,
    /// By a signal to this process.
    Interrupted(i32),
}

/// Sends `signal` to the targets and waits until they are gone, or `timeout` has passed and what is left
/// of them is not about to end.
pub(super) fn run(
    targets: &mut [Target],
    signal: Number,
    timeout: Duration,
    signals: &Signals,
) -> End {
    for target in &mut *targets {
        target.send(signal);
    }
    let deadline = Instant::now().checked_add(timeout);
    loop {
        for target in &mut *targets {
            target.answer_stops();
            target.look();
        }
        let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let mut left = targets.iter().filter(|target| target.awaited().is_some());
        if !left.any(|target| !is_late || target.is_ending()) {
            return End::Concluded;
        }
        let deadline = deadline.filter(|_| !is_late);
        if wait(targets, deadline, signals).is_err() {
            return End::Concluded;
        }
        while let Ok(Some(signal)) = signals.next() {
            match signal.number {
                libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => {
                    return End::Interrupted(signal.number);
                }
                // SIGCHLD: a target has stopped. The others are not for a command that others wait for.
                _ => {}
            }
        }
    }
}

/// Waits for a target's end, or for a signal.
fn wait(targets: &[Target], deadline: Option<Instant>, signals: &Signals) -> io::Result<()> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let awaited = targets.iter().filter_map(Target::awaited);
    let mut ready: Vec<_> = [signals.as_fd()]
        .into_iter()
        .chain(awaited.map(|process| process.as_fd()))
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    poll(&mut ready, left)
}
