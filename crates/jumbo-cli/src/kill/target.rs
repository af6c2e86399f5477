//! Process to be ended: [`Target`]; its result: [`KillResult`].

use std::time::{Duration, Instant};

use jumbo_host::kernel::process::ProcessState;
use jumbo_host::kernel::{Root, task};
use jumbo_host::status::{is_reaper, program_of};
use jumbo_host::teardown::{Gain, Hold, HoldEvent, Process, Reason, Teardown};
use rustix::io::Errno;

use crate::signal::Number;

pub(super) struct Target {
    root: Root,
    pid: u32,
    name: String,
    state: State,
    /// Reason why the process is not held.
    unheld: Option<Reason>,
    sent: Option<Instant>,
    ended: Option<Duration>,
}

enum State {
    /// Ended before, or not allowed to be ended.
    Concluded(KillOutcome),
    /// Alive and not known to exit, with the hold on it.
    Alive(Process, Option<Hold>),
    /// Exiting; its memory is being freed.
    Ending(Process, Teardown),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KillOutcome {
    Ended,
    /// A zombie before the signal, without memory.
    WasEnded {
        /// PID of the parent, which has to reap it.
        parent: u32,
    },
    /// Still alive, with the presumable reason.
    Alive(String),
    /// The signal was not sent.
    Failed {
        why: String,
        hint: Option<&'static str>,
    },
}

pub(super) struct KillResult {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) outcome: KillOutcome,
    pub(super) unheld: Option<Reason>,
    pub(super) gain: Option<Gain>,
    /// Time from the signal to the end.
    pub(super) waited: Option<Duration>,
}

impl KillResult {
    pub(super) fn is_gone(&self) -> bool {
        matches!(
            self.outcome,
            KillOutcome::Ended | KillOutcome::WasEnded { .. }
        )
    }
}

impl KillOutcome {
    fn failed(why: impl Into<String>, hint: Option<&'static str>) -> Self {
        let why = why.into();
        Self::Failed { why, hint }
    }

    fn of(errno: Errno) -> Self {
        match errno {
            Errno::SRCH => Self::failed("no such process", None),
            Errno::PERM => Self::failed("not permitted", Some("run it as root, or as its user")),
            errno => Self::failed(errno.to_string(), None),
        }
    }
}

impl Target {
    /// Opens a process and seizes it, if both are possible.
    pub(super) fn open(root: &Root, pid: u32) -> Self {
        let name = task::name(root, pid).unwrap_or_default();
        let (state, unheld) = match examine(root, pid) {
            Err(outcome) => (State::Concluded(outcome), None),
            Ok(process) => match Hold::seize(&process) {
                Ok(hold) => (State::Alive(process, Some(hold)), None),
                Err(reason) => (State::Alive(process, None), Some(reason)),
            },
        };
        Self {
            root: root.clone(),
            pid,
            name,
            state,
            unheld,
            sent: None,
            ended: None,
        }
    }

    /// Sends the signal. Races a process that is not held.
    pub(super) fn send(&mut self, signal: Number) {
        self.sent = Some(Instant::now());
        let state = match &self.state {
            State::Alive(process, Some(_)) => process.signal(signal.0).map(|()| None),
            State::Alive(process, None) => Teardown::race(process, signal.0)
                .map(|teardown| Some(State::Ending(process.clone(), teardown))),
            State::Concluded(_) | State::Ending(..) => Ok(None),
        };
        match state {
            Ok(Some(state)) => self.state = state,
            Ok(None) => {}
            Err(errno) => self.state = State::Concluded(KillOutcome::of(errno)),
        }
    }

    /// Handles ptrace stops of the process.
    pub(super) fn answer_stops(&mut self) {
        let State::Alive(process, Some(hold)) = &mut self.state else {
            return;
        };
        match hold.poll() {
            HoldEvent::None | HoldEvent::Stopped(_) => {}
            HoldEvent::Ends(teardown) => self.state = State::Ending(process.clone(), teardown),
            HoldEvent::Lost(reason) => {
                self.unheld = Some(reason);
                self.state = State::Alive(process.clone(), None);
            }
        }
    }

    /// Process to wait for; `None` once it has ended.
    pub(super) fn awaited(&self) -> Option<&Process> {
        match &self.state {
            State::Alive(process, _) | State::Ending(process, _) if self.ended.is_none() => {
                Some(process)
            }
            _ => None,
        }
    }

    pub(super) fn check_end(&mut self) {
        let gone = match &mut self.state {
            State::Concluded(_) => false,
            State::Alive(process, _) => process.is_gone(),
            State::Ending(_, teardown) => teardown.poll(),
        };
        if gone && self.ended.is_none() {
            self.ended = self.sent.map(|sent| sent.elapsed());
            // The tracer has to reap a traced process first.
            self.answer_stops();
        }
    }

    /// Reports whether the process is exiting; then the timeout does not apply.
    pub(super) fn is_ending(&self) -> bool {
        let standing = || ProcessState::read(&self.root, self.pid);
        standing().is_ok_and(|standing| !standing.has_memory || standing.is_dumping)
            || task::is_exiting(&self.root, self.pid).unwrap_or(true)
    }

    pub(super) fn conclude(self, signal: Number) -> KillResult {
        let is_gone = self.ended.is_some();
        let is_stopped = matches!(&self.state, State::Alive(_, Some(hold)) if hold.is_stopped());
        let (outcome, gain) = match self.state {
            State::Concluded(outcome) => (outcome, None),
            State::Alive(..) | State::Ending(..) if !is_gone => {
                let why = why_alive(&self.root, self.pid, signal, is_stopped);
                (KillOutcome::Alive(why), None)
            }
            State::Alive(..) => (KillOutcome::Ended, None),
            State::Ending(_, teardown) => (KillOutcome::Ended, Some(teardown.finish())),
        };
        KillResult {
            pid: self.pid,
            name: self.name,
            outcome,
            unheld: self.unheld,
            gain,
            waited: self.ended,
        }
    }
}

/// Opens a process; an outcome if it must not be ended, or has ended.
fn examine(root: &Root, pid: u32) -> Result<Process, KillOutcome> {
    const KTHREADD: u32 = 2;
    if pid == std::process::id() {
        return Err(KillOutcome::failed("that is this command itself", None));
    }
    if pid == 1 {
        let hint = "shut down the system, or the container from outside";
        return Err(KillOutcome::failed("that is the init process", Some(hint)));
    }
    let opened = Process::open(root, pid);
    let standing = ProcessState::read(root, pid).map_err(|_| KillOutcome::of(Errno::SRCH))?;
    if standing.process != pid {
        let why = format!("that is a thread of process {}", standing.process);
        return Err(KillOutcome::failed(why, Some("name the process")));
    }
    if is_reaper(root, pid) {
        // A reaper blocks all signals; without it the kernel would free the memory alone.
        let all = task::all(root).unwrap_or_default();
        return Err(match program_of(root, pid, all) {
            Some(reaper) => KillOutcome::failed(
                format!(
                    "that is the reaper of process {}, which frees its memory",
                    reaper.program
                ),
                Some("name the process"),
            ),
            None => KillOutcome::failed(
                "that is a reaper, which frees the memory of a program that has ended",
                Some("`jumbo wait` waits for it"),
            ),
        });
    }
    let process = opened.map_err(KillOutcome::of)?;
    if process.is_gone() {
        let parent = standing.parent;
        return Err(KillOutcome::WasEnded { parent });
    }
    if standing.parent == KTHREADD || pid == KTHREADD && standing.parent == 0 {
        return Err(KillOutcome::failed("that is a thread of the kernel", None));
    }
    Ok(process)
}

/// Reason why a process survived the signal. `is_stopped`: it was stopped while held, which
/// /proc/PID/status does not show.
fn why_alive(root: &Root, pid: u32, signal: Number, is_stopped: bool) -> String {
    let Ok(standing) = ProcessState::read(root, pid) else {
        return String::from("it has only just ended");
    };
    let bit = 1u64 << (signal.0 - 1);
    if is_stopped || standing.state == 'T' {
        format!("it is stopped, and {signal} waits until it is continued")
    } else if standing.blocked & bit != 0 {
        format!("it has blocked {signal}")
    } else if standing.ignored & bit != 0 {
        format!("it ignores {signal}")
    } else if standing.caught & bit != 0 {
        format!("it handles {signal}")
    } else {
        format!("{signal} did not end it")
    }
}
