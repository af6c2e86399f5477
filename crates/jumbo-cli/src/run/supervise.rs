//! The parent process of the program, which writes a report at its end.
//!
//! The program shares jumbo's process group and session, so the terminal treats both as one job.
//! Signals of the terminal (Ctrl-C, Ctrl-Z, SIGWINCH) reach the program directly; others are
//! forwarded. jumbo stops when the program stops, and ends with its status.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::memory::Events;
use jumbo_host::kernel::process::{Change, Child, Signal, Signals, tree};
use jumbo_host::kernel::thp::Thp;
use jumbo_inside::ledger::{Ledger, MAX_SLOTS};
use jumbo_inside::sandbox;
use rustix::event::{PollFd, PollFlags};

use super::Failure;
use super::args::{Destination, REHEARSE, RunSettings};
use super::launch::Launch;
use super::outcome::{ProgramEnd, Report, RunOutcome};
use super::outside;
use super::sample::Sampler;
use crate::signal::{end_by, poll};
use crate::view::tell;

/// Maximum number of the newest ledger entries to search for the exited sender of a signal. The
/// kernel reuses process IDs, and the signal of an unrelated process must not be lost.
const MAX_RECENT_SENDERS: usize = 16;

/// Reports whether this process may make the calls of [`run`]. An inherited seccomp filter may kill
/// the caller, so under a filter another process tries them first.
pub(super) fn is_harmless() -> bool {
    if sandbox::inherited() == Some(0) {
        return true;
    }
    let rehearsed = std::env::current_exe().and_then(|jumbo| {
        Command::new(jumbo)
            .args([REHEARSE, "--report"])
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
    });
    // If no process can be started, the fork of the program fails too, which is handled.
    rehearsed.map_or(true, |status| status.signal().is_none())
}

/// Execs the program in place, without a report: the program matters more than its report.
pub(super) fn in_place(settings: &RunSettings, launch: &Launch<'_>, why: &str) -> Failure {
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
    settings: &RunSettings,
    launch: &Launch<'_>,
) -> Result<ExitCode, Failure> {
    let signals = match Signals::take_ignored_too() {
        Ok(signals) => signals,
        Err(error) => {
            let why = format!("cannot read signals from a descriptor: {error}");
            return Err(in_place(settings, launch, &why));
        }
    };
    // Without a ledger the program runs all the same, and the report says so.
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
    // From here on no error may stop the program.
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
        .or_else(|_| (child.wait()).map(|(change, faults)| ProgramEnd { change, faults }))
        .map_err(|error| Failure::own(format!("cannot wait for the program: {error}")))?;
    let wall = started.elapsed();
    // From here on signals are for jumbo: writing may block, for example on a pipe.
    signals.release();
    let (Some(request), Some(sampler)) = (&settings.report, sampler) else {
        return Ok(end_as(end.change));
    };
    let fallbacks = fallbacks()
        .zip(before)
        .map(|(after, before)| after.saturating_sub(before));

    let (peak, sampled) = sampler.finish(Bytes(end.faults.max_rss));
    let report = Report::new(
        settings,
        launch,
        RunOutcome {
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
    if let Err(error) = report.write(request) {
        let file = match &request.destination {
            Destination::Stderr => String::from("stderr"),
            Destination::Stdout => String::from("stdout"),
            Destination::File(file) => file.display().to_string(),
        };
        // The exit status stays the program's.
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

/// Forwards signals until the program has ended.
fn watch(
    recipient: Recipient<'_>,
    signals: &Signals,
    mut sampler: Option<&mut Sampler<'_>>,
) -> io::Result<ProgramEnd> {
    let child = recipient.child;
    loop {
        if let Some(sampler) = &mut sampler {
            sampler.check();
        }
        let timeout = (sampler.as_ref())
            .map(|sampler| (sampler.deadline()).saturating_duration_since(Instant::now()));
        poll(&mut [PollFd::new(signals, PollFlags::IN)], timeout)?;
        while let Some(signal) = signals.next()? {
            recipient.forward(signal);
        }
        while let Some((change, faults)) = child.poll()? {
            match change {
                Change::Exited(_) | Change::Killed(_) => return Ok(ProgramEnd { change, faults }),
                // jumbo stops only with a job control shell: else no process would continue it, and
                // the end of the program would go unnoticed.
                Change::Stopped(signal) if has_terminal() && child.is_stopped() => {
                    stop_with(recipient, signals, signal)?;
                }
                Change::Stopped(_) | Change::Continued => {}
            }
        }
    }
}

/// Stops this process as the program was stopped, so that the shell sees its job stopped, and
/// continues the program when this process is continued.
fn stop_with(recipient: Recipient<'_>, signals: &Signals, signal: i32) -> io::Result<()> {
    signals.stop_by(signal);
    let mut continued = false;
    while let Some(signal) = signals.next()? {
        if signal.number == libc::SIGCONT {
            continued = true;
        } else {
            recipient.forward(signal);
        }
    }
    // A shell continues the whole job, but a `kill -CONT` of jumbo alone is for the program too. A
    // second SIGCONT would run the program's handler twice.
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

/// Target of forwarded signals, with the data that selects them.
#[derive(Clone, Copy)]
struct Recipient<'a> {
    root: &'a Root,
    child: &'a Child,
    ledger: Option<&'a Ledger>,
}

impl Recipient<'_> {
    fn forward(&self, signal: Signal) {
        if self.is_meant(&signal) {
            self.child.send(signal);
        }
    }

    /// Reports whether a signal was meant for the program and has not reached it.
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
            // Positive codes report the state of our own child.
            return signal.code <= 0;
        }
        if signal.code == libc::SI_KERNEL && from_terminal.contains(&signal.number) {
            // The terminal sends these to the whole process group, except for a hangup: the session
            // leader alone gets SIGHUP.
            return signal.number == libc::SIGHUP && is_session_leader();
        }
        // Signals of the program to its parent are not meant for itself; neither is jumbo's own
        // SIGPIPE.
        signal.sender != std::process::id() && !self.is_of_program(signal.sender)
    }

    /// Reports whether a process belongs to the program. A sender such as kill(1) may have exited:
    /// then it belongs to the program if it is among the newest entries of the ledger.
    fn is_of_program(&self, pid: u32) -> bool {
        let is_recent = |ledger: &Ledger| {
            let pids = ledger.slots().map(|slot| slot.pid.load(Ordering::Relaxed));
            let pids: Vec<_> = pids.collect();
            // After the slots have run out, the last ones are not the newest.
            let is_whole =
                usize::try_from(ledger.claimed()).is_ok_and(|claimed| claimed <= MAX_SLOTS);
            let mut recent = pids.iter().rev().take(MAX_RECENT_SENDERS);
            is_whole && recent.any(|recent| *recent == pid)
        };
        tree::is_within(self.root, pid, self.child.pid())
            || !tree::exists(self.root, pid) && self.ledger.is_some_and(is_recent)
    }
}

/// Reports whether this session has a terminal, and so a job control shell.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

fn is_session_leader() -> bool {
    rustix::process::getsid(None).is_ok_and(|leader| leader == rustix::process::getpid())
}
