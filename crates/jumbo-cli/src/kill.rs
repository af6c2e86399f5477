//! `jumbo kill`: ends processes and frees their memory beside the kernel.
//!
//! [`Target`] is one process. `jumbo_host::teardown` sends the signal and frees; here is the wait for
//! the end, and the output. A process that survives is unchanged.

use std::io;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Process, ProcessState, Signals};
use jumbo_host::kernel::{Root, task};
use jumbo_host::status::{is_reaper, program_of, reaper_of};
use jumbo_host::teardown::{Gain, Teardown};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::signal::{Number, end_by, next_termination, poll};
use crate::value::{process, processes, seconds};
use crate::view::{self, View, duration};

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
    let root = Root::host();
    let mut pids = Vec::new();
    for text in &args.processes {
        pids.extend(processes(&root, text)?);
    }
    let mut seen = std::collections::BTreeSet::new();
    pids.retain(|pid| seen.insert(*pid));

    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    let signal = args.signal;
    let mut targets: Vec<_> = pids
        .iter()
        .map(|pid| Target::kill(&root, *pid, signal))
        .collect();
    let interrupt = wait(&mut targets, args.timeout, &signals);
    // From here signals are delivered: the output may block on a pipe.
    signals.release();
    let concluded: Vec<_> = targets
        .into_iter()
        .map(|target| target.conclude(signal))
        .collect();
    if let Some(number) = interrupt {
        for one in concluded.iter().filter(|one| !one.is_gone()) {
            let pid = one.pid;
            view::tell(&format!(
                "interrupted: {pid} was sent {signal} and has not ended"
            ));
        }
        return Ok(end_by(number));
    }
    match args.json {
        true => {
            let rows: Vec<_> = concluded.iter().map(KillResult::json).collect();
            view::json(&json!({"signal": signal.to_string(), "processes": rows}))?;
        }
        false => {
            let mut view = View::stdout();
            concluded
                .iter()
                .try_for_each(|one| one.show(&mut view, signal))?;
            view.finish()?;
        }
    }
    let all = concluded.iter().all(KillResult::is_gone);
    Ok(ExitCode::from(u8::from(!all)))
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
        let mut ready: Vec<_> = fds
            .chain([signals.as_fd()])
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let deadline = deadline.filter(|_| !is_late);
        let time = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if poll(&mut ready, time).is_err() {
            return None;
        }
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
    pid: u32,
    name: String,
    reaper: Option<u32>,
    sent: Instant,
    state: Result<(Process, Teardown), Outcome>,
    /// Time from the signal to the end.
    waited: Option<Duration>,
}

#[derive(Debug)]
enum Outcome {
    Ended,
    /// A zombie before the signal; its parent has to reap it.
    WasEnded {
        parent: u32,
    },
    /// Still alive, with the presumable reason.
    Alive(String),
    /// The signal was not sent.
    Failed(String, Option<&'static str>),
}

struct KillResult {
    pid: u32,
    name: String,
    reaper: Option<u32>,
    outcome: Outcome,
    gain: Option<Gain>,
    waited: Option<Duration>,
}

impl Target {
    fn kill(root: &Root, pid: u32, signal: Number) -> Self {
        let name = task::name(root, pid).unwrap_or_default();
        let reaper = reaper_of(root, pid);
        let examined = examine(root, pid);
        let sent = Instant::now();
        let state = examined.and_then(|process| {
            let teardown = Teardown::begin(&process, signal.0).map_err(failure)?;
            Ok((process, teardown))
        });
        Self {
            pid,
            name,
            reaper,
            sent,
            state,
            waited: None,
        }
    }

    /// Process to wait for; `None` once it has ended.
    fn awaited(&self) -> Option<&Process> {
        let process = self.state.as_ref().ok().map(|(process, _)| process);
        process.filter(|_| self.waited.is_none())
    }

    fn check_end(&mut self) {
        if self.awaited().is_some_and(Process::is_gone) {
            self.waited = Some(self.sent.elapsed());
        }
    }

    fn conclude(self, signal: Number) -> KillResult {
        let (outcome, gain) = match (self.state, self.waited) {
            (Err(outcome), _) => (outcome, None),
            (Ok((_, teardown)), Some(waited)) => (Outcome::Ended, Some(teardown.finish(waited))),
            (Ok((process, _)), None) => (Outcome::Alive(why_alive(&process, signal)), None),
        };
        KillResult {
            pid: self.pid,
            name: self.name,
            reaper: self.reaper,
            outcome,
            gain,
            waited: self.waited,
        }
    }
}

impl KillResult {
    fn is_gone(&self) -> bool {
        matches!(self.outcome, Outcome::Ended | Outcome::WasEnded { .. })
    }

    fn json(&self) -> serde_json::Value {
        let (outcome, reason) = match &self.outcome {
            Outcome::Ended => ("ended", None),
            Outcome::WasEnded { .. } => ("had-ended", None),
            Outcome::Alive(why) => ("alive", Some(why)),
            Outcome::Failed(why, _) => ("failed", Some(why)),
        };
        json!({
            "pid": self.pid,
            "name": self.name,
            "outcome": outcome,
            "reason": reason,
            "wait_ms": self.waited.map(|waited| waited.as_secs_f64() * 1e3),
            "gain": self.gain,
        })
    }

    fn show(&self, view: &mut View, signal: Number) -> io::Result<()> {
        let name = match self.name.as_str() {
            "" => self.pid.to_string(),
            name => format!("{} {}", self.pid, view::clean(name)),
        };
        match &self.outcome {
            Outcome::Ended => {
                let waited = self.waited.map(duration).unwrap_or_default();
                view.line(format!("{name}: ended, {waited} after {signal}"))?;
                view.lines(self.gain.iter().flat_map(|gain| self.lines(gain)))?;
            }
            Outcome::WasEnded { parent } => view.line(format!(
                "{name}: had ended before; its parent {parent} has not waited for it"
            ))?,
            Outcome::Alive(why) => view::tell(&format!(
                "{name} goes on: {why}\nhint: SIGKILL can be neither handled, blocked nor ignored: --signal KILL"
            )),
            Outcome::Failed(why, hint) => {
                let hint = hint.map(|hint| format!("\nhint: {hint}"));
                view::tell(&format!(
                    "cannot end {name}: {why}{}",
                    hint.unwrap_or_default()
                ));
            }
        }
        Ok(())
    }

    /// Lines about the freed memory, and about the reason for less.
    fn lines(&self, gain: &Gain) -> Vec<String> {
        let (anonymous, released) = (gain.anonymous, gain.released);
        let mut lines = vec![match (self.reaper, gain.reason) {
            (Some(_), Some(_)) => format!(
                "  {anonymous} not back yet; `jumbo wait {}` waits until a reaper has given it back",
                self.pid
            ),
            (_, Some(reason)) => format!("  {anonymous} left to the kernel: {reason}"),
            (_, None) => {
                format!("  {anonymous} given back from both sides, about {released} of it by jumbo")
            }
        }];
        if gain.left > Bytes(0) {
            let left = gain.left;
            lines.push(format!(
                "  {left} shared or hugetlb, which is the kernel's alone to unmap"
            ));
        }
        lines
    }
}

fn failure(errno: Errno) -> Outcome {
    match errno {
        Errno::SRCH => Outcome::Failed("no such process".to_owned(), None),
        Errno::PERM => Outcome::Failed(
            "not permitted".to_owned(),
            Some("run it as root, or as its user"),
        ),
        errno => Outcome::Failed(errno.to_string(), None),
    }
}

/// Opens a process; an outcome if it must not be ended, or has ended.
fn examine(root: &Root, pid: u32) -> Result<Process, Outcome> {
    const KTHREADD: u32 = 2;
    let failed = |why: &str, hint| Outcome::Failed(why.to_owned(), hint);
    if pid == std::process::id() {
        return Err(failed("that is this command itself", None));
    }
    if pid == 1 {
        let hint = "shut down the system, or the container from outside";
        return Err(failed("that is the init process", Some(hint)));
    }
    let opened = Process::open(root, pid);
    let standing = ProcessState::read(root, pid).map_err(|_| failure(Errno::SRCH))?;
    if standing.process != pid {
        let why = format!("that is a thread of process {}", standing.process);
        return Err(failed(&why, Some("name the process")));
    }
    if is_reaper(root, pid) {
        // A reaper blocks all signals; without it the kernel would free the memory alone.
        let all = task::all(root).unwrap_or_default();
        return Err(match program_of(root, pid, all) {
            Some(reaper) => failed(
                &format!(
                    "that is the reaper of process {}, which frees its memory",
                    reaper.program
                ),
                Some("name the process"),
            ),
            None => failed(
                "that is a reaper, which frees the memory of a program that has ended",
                Some("`jumbo wait` waits for it"),
            ),
        });
    }
    let process = opened.map_err(failure)?;
    if process.is_gone() {
        let parent = standing.parent;
        return Err(Outcome::WasEnded { parent });
    }
    if standing.parent == KTHREADD || pid == KTHREADD && standing.parent == 0 {
        return Err(failed("that is a thread of the kernel", None));
    }
    Ok(process)
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
