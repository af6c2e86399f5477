//! `--supervise`: the program is held at its end, until a thread of ours frees its memory beside the
//! kernel: [`Held`].
//!
//! Invariant: what the program does, and what its parent sees of it, is what it would be untraced.

use std::time::{Duration, Instant};

use jumbo::kernel::process::{Change, Child, Stop};
use jumbo::kernel::{Root, process};
use jumbo::teardown::{Gain, Hold, News, Process, Reason, Teardown};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde_json::json;

use crate::view::tell;

/// How long a program that is left in a group stop may take to be in it again.
const TO_STOP: Duration = Duration::from_millis(100);

/// The program, held or not.
pub(super) struct Held {
    process: Option<Process>,
    state: State,
}

enum State {
    /// It runs, and stops for us.
    Hold(Hold),
    /// It was let go while jumbo itself is stopped.
    Paused,
    /// It ends.
    Ending(Teardown),
    /// It is left to the kernel.
    Alone(Reason),
}

/// What came of it; or why the kernel was alone, and the end was not seen.
pub(super) type Supervised = Result<Gain, Reason>;

impl Held {
    /// Holds a program that has started: only then is it known what it may, and so whether it may be
    /// traced.
    pub(super) fn start(root: &Root, child: &Child) -> Self {
        let process = Process::open(root, child.pid()).map_err(Reason::Denied);
        let mut held = Self {
            state: State::Paused,
            process: None,
        };
        match process {
            Ok(process) => held.process = Some(process),
            Err(reason) => held.state = State::Alone(reason),
        }
        held.resume();
        if let State::Alone(reason @ (Reason::Denied(_) | Reason::Traced(_))) = held.state {
            tell(&format!("the program is not supervised: {reason}"));
        }
        held
    }

    /// Holds it again after [`Held::pass`] has let it go.
    pub(super) fn resume(&mut self) {
        if let (State::Paused, Some(process)) = (&self.state, &self.process) {
            self.state = match Hold::seize(process) {
                Ok(hold) => State::Hold(hold),
                Err(reason) => State::Alone(reason),
            };
        }
    }

    /// Does what is due before the child is looked at: after that there may be nothing to see.
    pub(super) fn look(&mut self, child: &Child) {
        match &mut self.state {
            // The first thread's stops come with the child's changes.
            State::Hold(hold) if hold.thread() != child.pid() => {
                let news = hold.poll();
                self.take_in(news);
            }
            State::Ending(teardown) => {
                teardown.look();
            }
            State::Hold(_) | State::Paused | State::Alone(_) => {}
        }
    }

    /// Answers a stop of the program, and returns what an untraced one would have brought. `may_stop`:
    /// jumbo stops with it, and then no process could answer the next.
    pub(super) fn pass(
        &mut self,
        child: &Child,
        change: Change,
        may_stop: impl FnOnce() -> bool,
    ) -> Option<Change> {
        let Some(stop) = change.stop() else {
            return Some(change);
        };
        match std::mem::replace(&mut self.state, State::Paused) {
            State::Hold(hold) if hold.thread() != child.pid() => {
                self.state = State::Hold(hold);
                Some(change)
            }
            State::Hold(hold) => match stop {
                Stop::Group(signal) if may_stop() => {
                    hold.leave(stop);
                    let since = Instant::now();
                    while !child.is_stopped() && since.elapsed() < TO_STOP {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                    Some(Change::Stopped(signal))
                }
                _ => {
                    let mut hold = hold;
                    let news = hold.answer(stop);
                    self.state = State::Hold(hold);
                    self.take_in(news);
                    None
                }
            },
            other => {
                self.state = other;
                Some(change)
            }
        }
    }

    fn take_in(&mut self, news: News) {
        match news {
            News::None | News::Stopped(_) => {}
            News::Ends(teardown) => self.state = State::Ending(teardown),
            News::Lost(reason) => self.state = State::Alone(reason),
        }
    }

    /// What came of it, once the program has ended.
    pub(super) fn finish(self) -> Supervised {
        match self.state {
            State::Ending(teardown) => Ok(teardown.finish()),
            State::Alone(reason) => Err(reason),
            State::Hold(_) | State::Paused => Err(Reason::Late),
        }
    }
}

/// The calls for a program that is held and ends, made of this process: they are refused.
pub(super) fn rehearse(root: &Root) {
    if let Ok(process) = Process::open(root, std::process::id()) {
        let _ = Hold::seize(&process);
    }
    let _ = pidfd_open(getpid(), PidfdFlags::empty()).and_then(process::release);
}

/// The shape in the report. What was not seen is null.
pub(super) fn json(supervised: &Supervised) -> serde_json::Value {
    let gain = supervised.as_ref().ok();
    let released = gain.and_then(|gain| gain.released);
    json!({
        "anonymous": gain.map(|gain| gain.anonymous),
        "released": released,
        "worked_ms": gain.filter(|_| released.is_some()).map(|gain| gain.worked_ms),
        "teardown_ms": gain.and_then(|gain| gain.teardown_ms),
        "reason": supervised.map_or_else(Some, |gain| gain.reason),
    })
}

/// A line for people.
pub(super) fn text(supervised: &Supervised) -> String {
    let alone = "memory given back by the kernel alone";
    match supervised {
        Err(reason) => format!("{alone}: {reason}"),
        Ok(gain) => match (gain.reason, gain.released) {
            (Some(reason), _) => format!("{alone}: {reason}"),
            (None, None) => alone.to_owned(),
            (None, Some(released)) => format!(
                "{} given back in {:.1} ms from both sides, about {released} of it by jumbo",
                gain.anonymous,
                gain.teardown_ms.unwrap_or_default()
            ),
        },
    }
}
