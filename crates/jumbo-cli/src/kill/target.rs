//! One process to be ended: [`Target`], and what became of it: [`Concluded`].

use std::time::{Duration, Instant};

use jumbo_host::kernel::process::ProcessState;
use jumbo_host::kernel::{Root, task};
use jumbo_host::status::{is_reaper, program_of};
use jumbo_host::teardown::{Gain, Hold, HoldEvent, Process, Reason, Teardown};
use rustix::io::Errno;

use crate::signal::Number;

/// A process to be ended.
pub(super) struct Target {
    root: Root,
    pid: u32,
    name: String,
    state: State,
    /// Why it is not held.
    unheld: Option<Reason>,
    sent: Option<Instant>,
    ended: Option<Duration>,
}

enum State {
    /// It had ended, or it cannot be ended.
    Concluded(KillOutcome),
    /// Its end has not begun, as far as can be seen.
    Alive(Process, Option<Hold>),
    /// Its memory is being given back.
    Ending(Process, Teardown),
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KillOutcome {
    /// It is gone.
    Ended,
    /// It was a zombie before the signal: its memory had gone with its end.
    WasEnded {
        /// The process that has to wait for it.
        parent: u32,
    },
    /// It goes on; why, as far as can be seen.
    Alive(String),
    /// It was not sent the signal.
    Failed {
        /// Why not.
        why: String,
        /// The remedy.
        hint: Option<&'static str>,
    },
}

/// A target at the end of the command.
pub(super) struct KillResult {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) outcome: KillOutcome,
    pub(super) unheld: Option<Reason>,
    pub(super) gain: Option<Gain>,
    /// From the signal to its end.
    pub(super) waited: Option<Duration>,
}

impl KillResult {
    /// True where there is nothing left of it to end.
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
    /// Opens a process and seizes it, where both can be done.
    pub(super) fn open(root: &Root, pid: u32) -> Self {
        let mut target = Self {
            root: root.clone(),
            pid,
            name: task::name(root, pid).unwrap_or_default(),
            state: State::Concluded(KillOutcome::Ended),
            unheld: None,
            sent: None,
            ended: None,
        };
        target.state = match examine(root, pid) {
            Ok(process) => State::Alive(process, None),
            Err(outcome) => State::Concluded(outcome),
        };
        if let State::Alive(process, hold) = &mut target.state {
            match Hold::seize(process) {
                Ok(held) => *hold = Some(held),
                Err(reason) => target.unheld = Some(reason),
            }
        }
        target
    }

    /// Sends the signal, and where the process is not held races it.
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

    /// Answers what the process stops for.
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

    /// Its descriptor, while it is worth waiting for.
    pub(super) fn awaited(&self) -> Option<&Process> {
        match &self.state {
            State::Alive(process, _) | State::Ending(process, _) if self.ended.is_none() => {
                Some(process)
            }
            _ => None,
        }
    }

    /// Looks whether it has ended.
    pub(super) fn look(&mut self) {
        let gone = match &mut self.state {
            State::Concluded(_) => false,
            State::Alive(process, _) => process.is_gone(),
            State::Ending(_, teardown) => teardown.poll(),
        };
        if gone && self.ended.is_none() {
            self.ended = self.sent.map(|sent| sent.elapsed());
            // A process that was held to the last has to be waited for here first.
            self.answer_stops();
        }
    }

    /// True while it is on its way out: then it is waited for, however long it takes.
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

/// Which process it is, or why it cannot be ended.
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
        // It has blocked all signals, and to kill it is to wait for the kernel alone.
        let all = task::all(root).unwrap_or_default();
        return Err(match program_of(root, pid, all) {
            Some(sibling) => KillOutcome::failed(
                format!(
                    "that is the reaper of process {}, which gives its memory back",
                    sibling.program
                ),
                Some("name the process"),
            ),
            None => KillOutcome::failed(
                "that is a reaper, which gives the memory of a program back that has ended",
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

/// Why a process did not end by a signal. `is_stopped`: it was while it was held, which does not
/// show.
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
