//! Standing in for the program while it runs, so that a report can be written when it ends.
//!
//! The program is in our process group and session, so that the terminal treats both as one job: what it
//! sends (Ctrl-C, Ctrl-Z, a new window size) reaches the program without us. What others send us is
//! passed on. When the program stops we stop as it did, and when it ends we end as it did.

use std::process::ExitCode;
use std::time::Instant;

use jumbo::kernel::Root;
use jumbo::kernel::process::{Change, Child, Faults, Signal, Signals, die_by};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Failure;
use super::args::{Settings, Wanted};
use super::launch::Launch;

/// How the program ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) change: Change,
    #[expect(dead_code, reason = "the report is still to come")]
    pub(super) faults: Faults,
}

pub(super) fn run(
    _root: &Root,
    _settings: &Settings,
    _wanted: &Wanted,
    launch: &Launch<'_>,
) -> Result<ExitCode, Failure> {
    let signals = Signals::take()
        .map_err(|error| Failure::own(format!("cannot read signals from a descriptor: {error}")))?;
    let child = launch.spawn(None, &signals)?;
    let end = watch(&child, &signals)
        .map_err(|error| Failure::own(format!("cannot wait for the program: {error}")))?;
    Ok(end_as(end.change))
}

fn end_as(change: Change) -> ExitCode {
    match change {
        Change::Killed(signal) => {
            die_by(signal);
            ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
        }
        Change::Exited(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Change::Stopped(_) | Change::Continued => ExitCode::SUCCESS,
    }
}

/// Passes signals on until the program has ended.
fn watch(child: &Child, signals: &Signals) -> std::io::Result<End> {
    loop {
        wait(signals, None)?;
        while let Some(signal) = signals.next()? {
            if is_for_program(&signal) {
                child.send(signal);
            }
        }
        while let Some((change, faults)) = child.poll()? {
            match change {
                Change::Exited(_) | Change::Killed(_) => return Ok(End { change, faults }),
                Change::Stopped(signal) => stop_with(child, signals, signal)?,
                Change::Continued => {}
            }
        }
    }
}

/// Waits until a signal has arrived, or until `deadline`.
fn wait(signals: &Signals, deadline: Option<Instant>) -> std::io::Result<()> {
    let timeout = deadline.map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec::try_from(left).unwrap_or(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        })
    });
    let mut ready = [PollFd::new(signals, PollFlags::IN)];
    match poll(&mut ready, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The program was stopped: stops this process in the same way, so that the shell sees its job
/// stopped, and continues the program when we are continued.
fn stop_with(child: &Child, signals: &Signals, signal: i32) -> std::io::Result<()> {
    signals.stop_by(signal);
    let mut continued = false;
    while let Some(signal) = signals.next()? {
        if signal.number == libc::SIGCONT {
            continued = true;
        } else if is_for_program(&signal) {
            child.send(signal);
        }
    }
    // A shell continues the whole job, but a `kill -CONT` of us alone is for the program as well. A
    // second SIGCONT would run its handler twice.
    if continued && child.is_stopped() {
        child.send(Signal {
            number: libc::SIGCONT,
            code: libc::SI_USER,
            sender: 0,
            value: 0,
        });
    }
    Ok(())
}

/// True for a signal that was meant for the program and has not reached it.
fn is_for_program(signal: &Signal) -> bool {
    let from_terminal = [
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGWINCH,
        libc::SIGCONT,
        libc::SIGHUP,
    ];
    if signal.number == libc::SIGCHLD {
        // Positive codes are the kernel's news of our own child.
        return signal.code <= 0;
    }
    if signal.code == libc::SI_KERNEL && from_terminal.contains(&signal.number) {
        // The terminal sends these to the whole process group, except when it hangs up: that it tells
        // the session leader alone.
        return signal.number == libc::SIGHUP && is_session_leader();
    }
    // Our own SIGPIPE, when stderr has gone.
    signal.sender != std::process::id()
}

fn is_session_leader() -> bool {
    rustix::process::getsid(None).is_ok_and(|leader| leader == rustix::process::getpid())
}
