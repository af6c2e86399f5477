//! `jumbo kill`: ends processes and frees their memory beside the kernel.
//!
//! [`teardown`] sends the signal and frees. Here are the wait for the end, and the output. A process
//! that survives is unchanged.

mod teardown;

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Process, ProcessState, Signals};
use jumbo_host::kernel::{Root, task};
use jumbo_host::promote::{self, DESCRIPTORS_HINT, open_program};
use jumbo_host::status::{REAPER, program_of, siblings_of};
use jumbo_sys::raise_descriptors;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::signal::{Number, end_by, next_termination, poll};
use crate::value::{process, processes, seconds};
use crate::view::{self, View, duration};
use teardown::{Gain, Teardown};

/// End processes, with their memory freed by two CPUs at once
///
/// Sends the signal to each process. If the signal kills it, jumbo frees its memory beside the
/// kernel. This works for any process, started by jumbo or not. The command returns when all
/// processes are gone, and prints the gain. The memory of a process that has a reaper (`jumbo run
/// --reaper`) is not back by then: see `jumbo wait`.
///
/// The kernel alone frees the memory of a process that handles the signal, or that has shared
/// memory. A process that survives is unchanged.
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
    // A descriptor is held for each process.
    raise_descriptors();
    let root = Root::host();
    let (mut opened, mut seen) = (Vec::new(), BTreeSet::new());
    for text in &args.processes {
        let new = processes(&root, text)?
            .into_iter()
            .filter(|pid| seen.insert(*pid));
        let new: Vec<_> = new.map(|pid| (pid, examine(&root, pid))).collect();
        // A PID may have been reused before it was opened: then it has another name.
        let named = processes(&root, text).unwrap_or_default();
        opened.extend(new.into_iter().filter(|(pid, _)| named.contains(pid)));
    }
    let pids: Vec<_> = opened.iter().map(|(pid, _)| *pid).collect();

    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let signal = args.signal;
    let siblings = siblings_of(&root, &pids);
    let has_reaper = |pid| (siblings.iter()).any(|it| it.program == pid && it.role == REAPER);
    let kill = |(pid, process)| Target::kill(&root, pid, process, signal, has_reaper(pid));
    let mut targets: Vec<_> = opened.into_iter().map(kill).collect();
    let interrupt = wait(&mut targets, args.timeout, &signals);
    // From here signals are delivered: the output may block on a pipe.
    signals.release();
    let ends: Vec<_> = targets
        .into_iter()
        .map(|target| target.end(signal))
        .collect();
    if let Some(number) = interrupt {
        for end in ends.iter().filter(|end| !end.is_gone()) {
            let pid = end.pid;
            view::tell(&format!(
                "interrupted: {pid} was sent {signal} and has not ended"
            ));
        }
        return Ok(end_by(number));
    }
    if args.json {
        view::json(&json!({"signal": signal.to_string(), "processes": ends}))?;
    } else {
        let mut view = View::default();
        ends.iter().for_each(|end| end.show(&mut view, signal));
        view.print()?;
    }
    Ok(ExitCode::from(u8::from(!ends.iter().all(End::is_gone))))
}

/// Waits until the targets are gone. After `timeout` it waits only for those that are exiting.
/// Returns the signal that interrupts the wait.
fn wait(targets: &mut [Target], timeout: Duration, signals: &Signals) -> Option<i32> {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        targets.iter_mut().for_each(Target::check_end);
        let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let left = targets.iter().filter_map(Target::awaited);
        let left: Vec<_> = left.filter(|one| !is_late || is_ending(one)).collect();
        if left.is_empty() {
            return None;
        }
        let fds = left.iter().map(|process| process.as_fd());
        let fds = fds.chain([signals.as_fd()]);
        let mut ready: Vec<_> = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let deadline = deadline.filter(|_| !is_late);
        let time = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        poll(&mut ready, time).ok()?;
        if let Some(number) = next_termination(signals) {
            return Some(number);
        }
    }
}

/// Reports whether the process is exiting; then the timeout does not apply.
fn is_ending(process: &Process) -> bool {
    let (root, pid) = (process.root(), process.pid());
    ProcessState::read(root, pid).is_ok_and(|state| !state.has_memory || state.is_dumping)
        || task::is_exiting(root, pid).unwrap_or(true)
}

/// A process that was sent the signal, unless it must not be ended.
struct Target {
    end: End,
    sent: Instant,
    running: Option<(Process, Teardown)>,
    waited: Option<Duration>,
}

/// End of a process, or the reason against it, for JSON.
#[derive(Default, serde::Serialize)]
struct End {
    pid: u32,
    name: String,
    /// `ended`, `had-ended`, `alive` or `failed`.
    outcome: &'static str,
    reason: Option<String>,
    #[serde(skip)]
    hint: Option<&'static str>,
    /// Time from the signal to the end.
    wait_ms: Option<f64>,
    gain: Option<Gain>,
    #[serde(skip)]
    has_reaper: bool,
}

/// Outcome, reason, and hint.
type Refusal = (&'static str, String, Option<&'static str>);

impl Target {
    fn kill(
        root: &Root,
        pid: u32,
        process: Result<Process, Refusal>,
        signal: Number,
        has_reaper: bool,
    ) -> Self {
        let mut end = End {
            pid,
            name: task::name(root, pid).unwrap_or_default(),
            has_reaper,
            ..End::default()
        };
        let sent = Instant::now();
        let begun = process.and_then(|process| {
            let teardown = Teardown::begin(&process, signal.0).map_err(refused)?;
            Ok((process, teardown))
        });
        let running = begun.map_err(|(outcome, reason, hint)| {
            (end.outcome, end.reason, end.hint) = (outcome, Some(reason), hint);
        });
        Self {
            running: running.ok(),
            end,
            sent,
            waited: None,
        }
    }

    /// Process to wait for; `None` once it has ended.
    fn awaited(&self) -> Option<&Process> {
        let running = self.running.as_ref().filter(|_| self.waited.is_none());
        running.map(|(process, _)| process)
    }

    fn check_end(&mut self) {
        if self.awaited().is_some_and(Process::is_gone) {
            self.waited = Some(self.sent.elapsed());
        }
    }

    fn end(self, signal: Number) -> End {
        let mut end = self.end;
        match (self.running, self.waited) {
            (None, _) => {}
            (Some((_, teardown)), Some(waited)) => {
                (end.outcome, end.gain) = ("ended", Some(teardown.finish(waited)));
                end.wait_ms = Some(waited.as_secs_f64() * 1e3);
            }
            (Some((process, _)), None) => {
                (end.outcome, end.reason) = ("alive", Some(why_alive(&process, signal)));
            }
        }
        end
    }
}

impl End {
    fn is_gone(&self) -> bool {
        ["ended", "had-ended"].contains(&self.outcome)
    }

    fn show(&self, view: &mut View, signal: Number) {
        let name = format!("{} {}", self.pid, view::clean(&self.name));
        let (name, reason) = (name.trim_end(), self.reason.as_deref().unwrap_or_default());
        match (self.outcome, self.hint, &self.gain) {
            ("ended", _, Some(gain)) => {
                let waited = Duration::from_secs_f64(self.wait_ms.unwrap_or_default() / 1e3);
                view.line(format!(
                    "{name}: ended, {} after {signal}",
                    duration(waited)
                ));
                view.line(format!("  {}", self.given_back(gain)));
                if gain.left > Bytes(0) {
                    let left = gain.left;
                    view.line(format!(
                        "  {left} shared or hugetlb, which is the kernel's alone to unmap"
                    ));
                }
            }
            ("had-ended", ..) => view.line(format!("{name}: had ended before; {reason}")),
            ("alive", ..) => view::tell(&format!(
                "{name} goes on: {reason}\nhint: SIGKILL can be neither handled, blocked nor ignored: --signal KILL"
            )),
            (_, Some(hint), _) => view::tell(&format!("cannot end {name}: {reason}\nhint: {hint}")),
            (_, None, _) => view::tell(&format!("cannot end {name}: {reason}")),
        }
    }

    fn given_back(&self, gain: &Gain) -> String {
        let (pid, anonymous, released) = (self.pid, gain.anonymous, gain.released);
        match &gain.reason {
            None => {
                format!("{anonymous} given back from both sides, about {released} of it by jumbo")
            }
            Some(_) if self.has_reaper => format!(
                "{anonymous} not back yet; `jumbo wait {pid}` waits until a reaper has given it back"
            ),
            Some(reason) => format!("{anonymous} left to the kernel: {reason}"),
        }
    }
}

fn refused(errno: Errno) -> Refusal {
    match errno {
        Errno::SRCH | Errno::NOENT => failed("no such process", None),
        Errno::MFILE => failed(errno.to_string(), Some(DESCRIPTORS_HINT)),
        Errno::PERM => failed("not permitted", Some("run it as root, or as its user")),
        errno => failed(errno.to_string(), None),
    }
}

fn failed(why: impl Into<String>, hint: Option<&'static str>) -> Refusal {
    ("failed", why.into(), hint)
}

/// Opens a process; an error if it must not be ended, or has ended.
fn examine(root: &Root, pid: u32) -> Result<Process, Refusal> {
    if pid == 1 {
        let hint = "shut down the system, or the container from outside";
        return Err(failed("that is the init process", Some(hint)));
    }
    open_program(root, pid).map_err(|refusal| match refusal {
        // A zombie has no memory.
        promote::Refusal::Zombie { parent } => {
            let why = format!("its parent {parent} has not waited for it");
            ("had-ended", why, None)
        }
        // A reaper blocks all signals; without it the kernel would free the memory alone.
        promote::Refusal::Sibling => {
            match program_of(root, pid, task::all(root).unwrap_or_default()) {
                Some(of) => {
                    let why = format!(
                        "that is the {} of process {}, whose memory it shares",
                        of.role, of.program
                    );
                    failed(why, Some("name the process"))
                }
                None => failed(
                    "that is a reaper, which frees the memory of a program that has ended",
                    Some("`jumbo wait` waits for it"),
                ),
            }
        }
        refusal => failed(refusal.to_string(), refusal.hint()),
    })
}

/// Reason why a process survived the signal.
fn why_alive(process: &Process, signal: Number) -> String {
    let Ok(state) = ProcessState::read(process.root(), process.pid()) else {
        return String::from("it has only just ended");
    };
    let has = |set: u64| set & 1 << (signal.0 - 1) != 0;
    match () {
        () if state.state == 'T' => {
            format!("it is stopped, and {signal} waits until it is continued")
        }
        () if has(state.blocked) => format!("it has blocked {signal}"),
        () if has(state.ignored) => format!("it ignores {signal}"),
        () if has(state.caught) => format!("it handles {signal}"),
        () => format!("{signal} did not end it"),
    }
}
