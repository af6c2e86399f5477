//! Standing in for the program while it runs, so that a report can be written when it ends.
//!
//! The program is in our process group and session, so that the terminal treats both as one job:
//! what it sends (Ctrl-C, Ctrl-Z, a new window size) reaches the program without us. What others
//! send us is passed on. When the program stops we stop as it did, and when it ends we end as it
//! did.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::Events;
use jumbo_host::kernel::process::{Change, Child, ResourceUsage, Signal, Signals, tree};
use jumbo_host::kernel::thp::Thp;
use jumbo_inside::ledger::{Ledger, SLOTS};
use jumbo_inside::sandbox;
use rustix::event::{PollFd, PollFlags};

use super::Failure;
use super::args::{Place, Settings};
use super::launch::{self, Launch};
use super::outside;
use super::report::{Report, Seen};
use super::sample::Sampler;
use crate::signal::{end_by, poll};
use crate::view::tell;

/// Among how many of the program's latest processes the sender of a signal is looked for when it is
/// gone. Few: the kernel gives process IDs anew, and a stranger's signal must not be lost.
const LATELY: usize = 16;

/// How the program ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) change: Change,
    pub(super) faults: ResourceUsage,
}

/// Whether this process may make the calls of [`run`]. A seccomp filter that it inherited may end
/// it for one that the program never makes, so there another process makes them first.
pub(super) fn is_harmless() -> bool {
    if sandbox::inherited() == Some(0) {
        return true;
    }
    // Where no process can be made, or it cannot go as far as that, we find out as well, and are
    // none the worse.
    launch::rehearsed().map_or(true, |status| status.signal().is_none())
}

/// Becomes the program. A program is worth more than its report: where we cannot be its parent it
/// takes our place.
pub(super) fn in_place(settings: &Settings, launch: &Launch<'_>, why: &str) -> Failure {
    let mut lost = Vec::new();
    if settings.report.is_some() {
        lost.push("there will be no report");
    }
    if settings.shares_pool() {
        lost.push("--pool bounds each process and not the run");
    }
    tell(&format!("{}: {why}", lost.join(", ")));
    launch.exec()
}

pub(super) fn run(
    root: &Root,
    settings: &Settings,
    launch: &Launch<'_>,
) -> Result<ExitCode, Failure> {
    let signals = match Signals::take_ignored_too() {
        Ok(signals) => signals,
        Err(error) => {
            let why = format!("cannot read signals from a descriptor: {error}");
            return Err(in_place(settings, launch, &why));
        }
    };
    // A program is worth more than its figures: without a ledger it runs and the report says so.
    let (ledger, trouble) = match Ledger::create() {
        Ok(made) => (Some(made), None),
        Err(errno) => (None, Some(errno)),
    };
    let own = std::process::id();
    let path = ledger
        .as_ref()
        .map(|(_, fd)| format!("/proc/{own}/fd/{}", fd.as_raw_fd()));
    let ledger = ledger.as_ref().map(|(ledger, _)| *ledger);
    if let (Some(ledger), Some(pool)) = (ledger, launch.plan.orders.pool.filter(|pool| !pool.each))
    {
        ledger.pool.set((pool.size + pool.overcommit) as u64);
    }

    let started = Instant::now();
    let child = match launch.spawn(path.as_deref(), &signals)? {
        Ok(child) => child,
        Err(error) => {
            signals.release();
            return Err(in_place(settings, launch, &error.to_string()));
        }
    };
    let beside = outside::beside_child(&launch.outside, &child, &signals);
    // From here on nothing is worth giving up the program for.
    let fallbacks = || {
        let events = Events::read(root).ok()?;
        events.get("thp_fault_fallback")
    };
    let controls = || Thp::read_controls(root).ok().flatten();
    let (before, first) = (fallbacks(), controls());
    let mut sampler = (settings.report.as_ref()).map(|_| Sampler::new(root, child.pid(), ledger));
    let recipient = Recipient {
        root,
        child: &child,
        ledger,
    };
    let end = watch(recipient, &signals, sampler.as_mut())
        .or_else(|_| wait_out(&child))
        .map_err(|error| Failure::own(format!("cannot wait for the program: {error}")))?;
    let wall = started.elapsed();
    // From here on a signal is for us: writing may wait, for a pipe's reader say.
    signals.release();
    let (Some(wanted), Some(sampler)) = (&settings.report, sampler) else {
        return Ok(end_as(end.change));
    };
    let fallbacks = fallbacks()
        .zip(before)
        .map(|(after, before)| after.saturating_sub(before));

    let (peak, sampled) = sampler.finish(Bytes(end.faults.max_rss));
    let report = Report::new(
        settings,
        launch,
        Seen {
            pid: child.pid(),
            end,
            wall,
            peak,
            sampled,
            ledger,
            trouble,
            fallbacks,
            controls: [first, controls()],
            outside: outside::result(&launch.outside, beside),
        },
    );
    if let Err(error) = report.write(wanted) {
        let file = match &wanted.place {
            Place::Stderr => String::from("stderr"),
            Place::Stdout => String::from("stdout"),
            Place::File(file) => file.display().to_string(),
        };
        // The exit status is the program's own: a report that cannot be written must not change it.
        tell(&format!("cannot write the report to {file}: {error}"));
    }
    Ok(end_as(end.change))
}

fn end_as(change: Change) -> ExitCode {
    match change {
        Change::Killed(signal) => end_by(signal),
        Change::Exited(code) => ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)),
        Change::Stopped(_) | Change::Continued => ExitCode::SUCCESS,
    }
}

/// Passes signals on until the program has ended.
fn watch(
    recipient: Recipient<'_>,
    signals: &Signals,
    mut sampler: Option<&mut Sampler<'_>>,
) -> io::Result<End> {
    let child = recipient.child;
    loop {
        if let Some(sampler) = &mut sampler {
            sampler.look();
        }
        wait(signals, sampler.as_ref().map(|sampler| sampler.deadline()))?;
        while let Some(signal) = signals.next()? {
            recipient.pass_on(signal);
        }
        while let Some((change, faults)) = child.poll()? {
            match change {
                Change::Exited(_) | Change::Killed(_) => return Ok(End { change, faults }),
                // The job is stopped only where there is a shell to see it: elsewhere no process
                // would continue us, and the program would end unnoticed.
                Change::Stopped(signal) if has_terminal() && child.is_stopped() => {
                    stop_with(recipient, signals, signal)?;
                }
                Change::Stopped(_) | Change::Continued => {}
            }
        }
    }
}

/// The rest of [`watch`] where that has failed: the program runs and its end is waited for.
fn wait_out(child: &Child) -> io::Result<End> {
    let (change, faults) = child.wait()?;
    Ok(End { change, faults })
}

/// Waits until a signal has arrived, or until `deadline`.
fn wait(signals: &Signals, deadline: Option<Instant>) -> io::Result<()> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    poll(&mut [PollFd::new(signals, PollFlags::IN)], left)
}

/// The program was stopped: stops this process in the same way, so that the shell sees its job
/// stopped, and continues the program when we are continued.
fn stop_with(recipient: Recipient<'_>, signals: &Signals, signal: i32) -> io::Result<()> {
    signals.stop_by(signal);
    let mut continued = false;
    while let Some(signal) = signals.next()? {
        if signal.number == libc::SIGCONT {
            continued = true;
        } else {
            recipient.pass_on(signal);
        }
    }
    // A shell continues the whole job, but a `kill -CONT` of us alone is for the program as well. A
    // second SIGCONT would run its handler twice.
    if continued && recipient.child.is_stopped() {
        recipient.child.send(Signal {
            number: libc::SIGCONT,
            code: libc::SI_USER,
            sender: 0,
            value: 0,
        });
    }
    Ok(())
}

/// Whom signals are passed on to, and how it is known which ones.
#[derive(Clone, Copy)]
struct Recipient<'a> {
    root: &'a Root,
    child: &'a Child,
    ledger: Option<&'a Ledger>,
}

impl Recipient<'_> {
    fn pass_on(&self, signal: Signal) {
        if self.is_meant(&signal) {
            self.child.send(signal);
        }
    }

    /// True for a signal that was meant for the program and has not reached it.
    fn is_meant(&self, signal: &Signal) -> bool {
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
            // The terminal sends these to the whole process group, except when it hangs up: that it
            // tells the session leader alone.
            return signal.number == libc::SIGHUP && is_session_leader();
        }
        // What the program sends to its parent is not meant for itself. Neither is our own SIGPIPE,
        // when stderr has gone.
        signal.sender != std::process::id() && !self.is_of_program(signal.sender)
    }

    /// True where a process is the program's. One that has been waited for by now, as a kill(1) has
    /// soon, has a number that may be any process's: then it is if it has come into the ledger
    /// lately, and else a stranger, as another script's kill(1) is.
    fn is_of_program(&self, pid: u32) -> bool {
        let came_lately = |ledger: &Ledger| {
            let pids = ledger.slots().map(|slot| slot.pid.load(Ordering::Relaxed));
            let pids: Vec<_> = pids.collect();
            // Where slots have run out, the last ones are not the latest any more.
            let is_whole = usize::try_from(ledger.claimed()).is_ok_and(|claimed| claimed <= SLOTS);
            is_whole && pids.iter().rev().take(LATELY).any(|late| *late == pid)
        };
        tree::is_within(self.root, pid, self.child.pid())
            || !tree::exists(self.root, pid) && self.ledger.is_some_and(came_lately)
    }
}

/// True where this session has a terminal, and so a shell that controls jobs.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

fn is_session_leader() -> bool {
    rustix::process::getsid(None).is_ok_and(|leader| leader == rustix::process::getpid())
}
