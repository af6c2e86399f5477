//! `jumbo kill`: ends processes and gives their memory back from both sides.
//!
//! The stages, a file each: [`target`] (which process, whether it can be ended, and what became of it),
//! [`watch`] (the signal, and the wait for what comes of it), [`show`].
//!
//! Invariant: a process that does not end is left as it was. Tracing is done by a thread that has ended
//! before anything is printed, and its end takes the tracing away, whatever the process is doing.

mod show;
mod target;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::Signals;

use crate::signal::{Number, end_by};
use crate::value::{process, seconds};
use target::Target;
use watch::End;

/// End processes, their memory given back by two CPUs at once
///
/// Sends the signal to each process. When a process begins to end, jumbo holds it for a moment, until a thread of jumbo
/// frees its memory beside the kernel. This works for any process, started by jumbo or not. The command returns when all
/// processes are gone, and prints what was gained. The memory of a process that has a reaper (`jumbo run --reaper`) is not back
/// by then: see `jumbo wait`.
///
/// Until then jumbo traces the processes: a debugger cannot attach. jumbo leaves a process that goes on as it was, and all of them
/// when jumbo is interrupted.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo kill 4711
  jumbo kill --signal KILL --json 4711 4712
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

    /// How long a process may take to begin its end
    #[arg(long, short, value_name = "SECS", default_value = "10", value_parser = seconds,
        allow_hyphen_values = true)]
    timeout: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// The processes
    #[arg(required = true, value_name = "PID", value_parser = pid, allow_negative_numbers = true)]
    pids: Vec<u32>,
}

/// What looks like an option is kill(1)'s form of a signal.
fn pid(text: &str) -> Result<u32, String> {
    process(text).map_err(|why| match text.starts_with('-') {
        true => format!("{why}; a signal is given with --signal"),
        false => why,
    })
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    let mut pids = args.pids;
    let mut seen = std::collections::BTreeSet::new();
    pids.retain(|pid| seen.insert(*pid));

    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let tracer = std::thread::Builder::new().name("jumbo-trace".to_owned());
    let (signal, timeout) = (args.signal, args.timeout);
    let tracer = tracer.spawn(move || {
        let mut targets: Vec<Target> = pids.iter().map(|pid| Target::open(&root, *pid)).collect();
        let end = watch::run(&mut targets, signal, timeout, &signals);
        // A thread that holds a process lets go of it by ending.
        let concluded: Vec<_> = targets
            .into_iter()
            .map(|target| target.conclude(signal))
            .collect();
        (end, concluded, signals)
    });
    let tracer = tracer.context("cannot make a thread")?;
    let Ok((end, concluded, signals)) = tracer.join() else {
        anyhow::bail!("the thread that traces has failed");
    };
    // From here on a signal is for us: writing may wait, for a pipe's reader say.
    signals.release();
    if let End::Interrupted(number) = end {
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
    let all = concluded.iter().all(target::Concluded::is_gone);
    Ok(ExitCode::from(u8::from(!all)))
}
