//! `jumbo bench exit`: the time until the end of a large process, and until its memory is free.
//!
//! A process with a large block of base pages exits or is killed. Another process measures
//! the time from the call or the signal until `waitpid` returns, and until the memory is free
//! (`memory::FreeWatch`, the same probe on all sides).
//!
//! Before the end each side is checked: base pages only, and a sleeping reaper where one is to free
//! them.

use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, waitid, waitpid};

use crate::claim::{self, DRY_RUN_HINT};
use crate::figures::{Figures, figures};
use crate::group::{self, Group, rows};
use crate::json_child::JsonChild;
use crate::launch::Launch;
use crate::life::{REAPER_PID, WORKER_PID, now_ns};
use crate::memory::{FreeWatch, check_available, footprint};
use crate::table::Table;
use crate::task::{Action, Task};
use crate::work::Worker;
use crate::{Error, Settings};

/// Minimum size: a quarter of it must exceed the program around it.
pub const MIN_SIZE: Bytes = Bytes(64 << 20);

const PUBLISHED: &str = "more than 10 min for several TB";

/// Maximum time until a process ends, and its reaper after that.
const END_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Delay before the first check of free memory: a check takes longer than some ends do.
const FIRST_CHECK_DELAY: Duration = Duration::from_millis(1);

/// Measures the table, with processes of `size` bytes.
pub fn measure(settings: &Settings, size: Bytes) -> Result<Table, Error> {
    check_available(footprint(size))?;
    let table = Table::new("exit", format!("{size} in base pages"), settings)?;
    let ends = [(Termination::Exit, "exit"), (Termination::Kill, "kill")];
    let groups = ends.map(|(end, key)| group_of(settings, end, key, size));
    group::measure(settings, table, groups.into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Termination {
    /// `exit(0)`.
    Exit,
    Kill,
}

/// One end of a process; `by_kill`: by `jumbo kill`.
struct Ending<'a> {
    settings: &'a Settings,
    end: Termination,
    size: Bytes,
    launch: Launch,
    by_kill: bool,
}

fn group_of<'a>(
    settings: &'a Settings,
    end: Termination,
    key: &'static str,
    size: Bytes,
) -> Group<'a> {
    let mut group = Group::new(settings, key);
    let reaper = Launch::Jumbo("--reaper=on".to_owned());
    let mut side = |launch: &Launch, by_kill: bool| {
        let name = match by_kill {
            true => "jumbo kill".to_owned(),
            false => launch.name(),
        };
        let ending = Ending {
            settings,
            end,
            size,
            launch: launch.clone(),
            by_kill,
        };
        group.side(name, size, move || ending.watch())
    };
    let (base, sibling) = (side(&Launch::Plain, false), side(&reaper, false));
    let killed = (end == Termination::Kill).then(|| side(&Launch::Plain, true));
    let name = |what: &str| format!("{key}_{what}");
    let [wait, back] = ["waitpid returns", "memory is back"].map(|t| format!("{key}, until {t}"));
    if let Some(killed) = killed {
        rows! { group; "jumbo_kill_memory_back" => &back, "back_ms", base / killed; }
    }
    rows! { group;
        name("wait_aa") => &wait, "wait_ms", base / base;
        name("wait") => &wait, "wait_ms", base / sibling, PUBLISHED;
        name("memory_back_aa") => &back, "back_ms", base / base;
        name("memory_back") => &back, "back_ms", base / sibling, PUBLISHED;
    }
    group.value(name("wait_ms"), "wait_ms", sibling);
    group.value(format!("plain_{key}_wait_ms"), "wait_ms", base);
    group
}

impl Ending<'_> {
    /// Ends a process; measures the time until `waitpid` returns, and until the memory is free.
    fn watch(&self) -> Result<Figures, Error> {
        let (root, end) = (Root::host(), self.end);
        let by_reaper = matches!(self.launch, Launch::Jumbo(_));
        let task = Task::block(self.size, true, Action::End { by_reaper });
        let worker = Worker::new(self.launch.clone(), task);
        let (mut holder, ready) = worker.begin(self.settings, &claim::base(self.size))?;
        let process = |name| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a process ID"
            )]
            let pid = ready.get(name).map(|pid| *pid as u32);
            pid.map(|pid| Process::open(&root, pid)).transpose()
        };
        let (held, reaper) = (process(WORKER_PID)?, process(REAPER_PID)?);
        if by_reaper && reaper.is_none() {
            return Err(Error::claim("it has no sleeping reaper", DRY_RUN_HINT));
        }
        // The launcher may be its parent.
        let first = Process::open(&root, holder.process.id())?;
        let kill = |process: &Process| process.signal(Signal::KILL.as_raw());

        let memory = FreeWatch::new(&root, self.size)?;
        // One more second per GiB, as in `FreeWatch`.
        let within = Timespec {
            tv_sec: END_TIMEOUT.tv_sec + (self.size.0 >> 30).cast_signed(),
            ..END_TIMEOUT
        };
        let (sent, clock) = (now_ns(), Instant::now());
        let (waited, back) = thread::scope(|scope| {
            let waited = scope.spawn(|| {
                let ended = has_ended(&first, &within)?;
                if ended {
                    // `wait` below reaps it and returns its status.
                    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                    waitid(WaitId::PidFd(first.as_fd()), options)?;
                }
                Ok::<_, Error>((ended, now_ns()))
            });
            let back = self.begin(held.as_ref(), &mut holder).and_then(|killer| {
                thread::sleep(FIRST_CHECK_DELAY);
                memory.wait(clock)?;
                Ok((now_ns(), killer))
            });
            if back.is_err() {
                let _ = kill(&first);
            }
            (waited.join(), back)
        });
        let (back, killer) = back?;
        let (ended, waited) = waited.map_err(|_| Error::Corrupt("a thread died".to_owned()))??;
        if !ended {
            let _ = kill(&first);
            let found = "the process still runs though its memory is free";
            return Err(Error::claim(found, DRY_RUN_HINT));
        }
        killer.map_or(Ok(()), |mut killer| killer.wait())?;
        let status = holder.process.wait()?;
        if !is_end(end, status) {
            return Err(holder.failed(status));
        }
        // The process reports the time of its call; a signal is sent here.
        let started = match end {
            Termination::Kill => sent,
            Termination::Exit => holder.receive()?,
        };
        if let Some(reaper) = reaper {
            // The reaper exits once all memory is free. It is reaped here if it is our child.
            if !has_ended(&reaper, &END_TIMEOUT)? {
                let found = "its reaper still runs though the memory is free";
                return Err(Error::claim(found, DRY_RUN_HINT));
            }
            // ECHILD: another process is its parent.
            let pid = Pid::from_raw(reaper.pid().cast_signed());
            let _ = waitpid(pid, WaitOptions::NOHANG);
        }
        let since = |at: u64| at.saturating_sub(started) as f64 / 1e6;
        Ok(figures([
            ("wait_ms", since(waited)),
            ("back_ms", since(back)),
        ]))
    }

    /// Ends the process; returns the child that kills it, if any.
    fn begin(
        &self,
        held: Option<&Process>,
        holder: &mut JsonChild,
    ) -> Result<Option<JsonChild>, Error> {
        match (self.end, held) {
            (Termination::Kill, Some(held)) if self.by_kill => {
                let mut command = Command::new(&self.settings.jumbo);
                command.args(["kill", "--signal", "KILL", &held.pid().to_string()]);
                return JsonChild::start(command, Stdio::piped()).map(Some);
            }
            (Termination::Kill, Some(held)) => held.signal(Signal::KILL.as_raw())?,
            _ => holder.send(&())?,
        }
        Ok(None)
    }
}

/// Waits for the end of a process, for at most that time.
fn has_ended(process: &Process, within: &Timespec) -> Result<bool, Error> {
    Ok(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(within))? > 0)
}

fn is_end(end: Termination, status: ExitStatus) -> bool {
    match end {
        Termination::Exit => status.success(),
        Termination::Kill => status.signal() == Some(libc::SIGKILL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_terminations_are_detected() {
        for (end, raw) in [(Termination::Exit, 0), (Termination::Kill, 9)] {
            for other in [0, 9, 6, 15, 0x100] {
                let status = ExitStatus::from_raw(other);
                assert_eq!(is_end(end, status), raw == other, "{end:?} {other}");
            }
        }
    }
}
