//! `jumbo kill`: ends processes and frees their memory in parallel with the kernel.
//!
//! The signal and the wait for the end are here. [`target`]: one process and its result. [`show`]:
//! the results.
//!
//! Invariant: a process that survives is unchanged. A separate thread traces the processes. It ends
//! before any output, and its end detaches from them.

mod show;
mod target;

use std::io;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::Signals;
use rustix::event::{PollFd, PollFlags};

use crate::signal::{Number, end_by, poll};
use crate::value::{process, processes, seconds};
use target::Target;

/// End processes, with their memory freed by two CPUs at once
///
/// Sends the signal to each process. When a process begins to end, jumbo holds it for a moment,
/// until a thread of jumbo frees its memory beside the kernel. This works for any process, started
/// by jumbo or not. The command returns when all processes are gone, and prints the gain.
/// The memory of a process that has a reaper (`jumbo run --reaper`) is not back by then: see `jumbo
/// wait`.
///
/// Until then jumbo traces the processes: a debugger cannot attach. A process that survives is
/// unchanged, as are all processes after an interrupt.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo kill 4711
  jumbo kill --signal KILL --json 4711 4712
  jumbo kill redis-server
  jumbo kill --timeout 0.5 4711 || jumbo kill --signal KILL 4711

Exit status: 0 all processes are gone; 1 one is not, or could not be ended; 2 wrong usage; 128+N \
when signal N interrupted jumbo.")]
pub(crate) struct Args {
    /// The signal, by name or number
    #[arg(
        long,
        short,
        value_name = "SIGNAL",
        default_value = "TERM",
        allow_negative_numbers = true
    )]
    signal: Number,

    /// Timeout until a process begins to exit
    #[arg(long, short, value_name = "SECS", default_value = "10", value_parser = seconds,
        allow_hyphen_values = true)]
    timeout: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// The processes; a name can match several
    #[arg(required = true, value_name = "PID|NAME", value_parser = typed, allow_negative_numbers = true)]
    processes: Vec<String>,
}

/// Checks a PID or name. A word like `-9` is a signal of kill(1): the error names --signal.
fn typed(text: &str) -> Result<String, String> {
    let is_number = text.trim_start_matches(['-', '+']).parse::<u128>().is_ok();
    match process(text) {
        Err(why) if text.starts_with('-') => Err(format!("{why}; a signal is given with --signal")),
        Err(why) if is_number || text.is_empty() => Err(why),
        _ => Ok(text.to_owned()),
    }
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    let mut pids = Vec::new();
    for text in &args.processes {
        pids.extend(processes(&root, text)?);
    }
    let mut seen = std::collections::BTreeSet::new();
    pids.retain(|pid| seen.insert(*pid));

    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let tracer = std::thread::Builder::new().name("jumbo-trace".to_owned());
    let (signal, timeout) = (args.signal, args.timeout);
    let tracer = tracer.spawn(move || {
        let mut targets: Vec<Target> = pids.iter().map(|pid| Target::open(&root, *pid)).collect();
        let interrupt = watch(&mut targets, signal, timeout, &signals);
        // The end of this thread detaches from the processes.
        let concluded: Vec<_> = targets
            .into_iter()
            .map(|target| target.conclude(signal))
            .collect();
        (interrupt, concluded, signals)
    });
    let tracer = tracer.context("cannot make a thread")?;
    let Ok((interrupt, concluded, signals)) = tracer.join() else {
        anyhow::bail!("the thread that traces has failed");
    };
    // From here signals are delivered: the output may block on a pipe.
    signals.release();
    if let Some(number) = interrupt {
        for one in concluded.iter().filter(|one| !one.is_gone()) {
            let signal = args.signal;
            crate::view::tell(&format!(
                "interrupted: {} was sent {signal} and has not ended",
                one.pid
            ));
        }
        return Ok(end_by(number));
    }
    match args.json {
        true => show::json(args.signal, &concluded)?,
        false => show::text(args.signal, &concluded)?,
    }
    let all = concluded.iter().all(target::KillResult::is_gone);
    Ok(ExitCode::from(u8::from(!all)))
}

/// Sends `signal` to the targets, and waits until they are gone. After `timeout` it waits only for
/// those that are exiting. Returns the signal that interrupts the wait.
fn watch(
    targets: &mut [Target],
    signal: Number,
    timeout: Duration,
    signals: &Signals,
) -> Option<i32> {
    for target in &mut *targets {
        target.send(signal);
    }
    let deadline = Instant::now().checked_add(timeout);
    loop {
        for target in &mut *targets {
            target.answer_stops();
            target.check_end();
        }
        let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let mut left = targets.iter().filter(|target| target.awaited().is_some());
        if !left.any(|target| !is_late || target.is_ending()) {
            return None;
        }
        let deadline = deadline.filter(|_| !is_late);
        if wait(targets, deadline, signals).is_err() {
            return None;
        }
        while let Ok(Some(signal)) = signals.next() {
            match signal.number {
                libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT => {
                    return Some(signal.number);
                }
                // SIGCHLD: a target has stopped. Others do not end the wait.
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
