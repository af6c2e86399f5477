//! One end of one process, watched from outside: [`watch`].

use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::units::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use rustix::time::Timespec;

use super::worker::{End, Ready, now_ns};
use crate::child::{self, Launch, Talk};
use crate::claim::{DRY_RUN, On, refused};
use crate::group::Figures;
use crate::memory::Watch;
use crate::worker::Task;
use crate::{Error, Settings};

/// Who gives the memory back.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) launch: Launch,
    /// The sibling.
    pub(super) reaper: bool,
    /// `jumbo kill`, beside the kernel.
    pub(super) killer: bool,
}

/// How long a process may take to end when its memory is back, and its sibling to follow.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts a process with `size` bytes on that side, ends it that way, and says how long that took from the call of
/// `exit` or `abort`, or from the signal: until `waitpid` returned, and until the memory was free.
pub(super) fn watch(
    settings: &Settings,
    end: End,
    side: &Side,
    size: Bytes,
) -> Result<Figures, Error> {
    let command = child::worker(&side.launch, settings, &Task::Hold(size, side.reaper));
    let mut holder = Talk::start(command, Stdio::piped())?;
    let measured = measure(&mut holder, settings, (end, side), size);
    if measured.is_err() {
        // A process that a launcher stands in front of dies with the launcher.
        let _ = holder.child.kill();
        let _ = holder.child.wait();
    }
    measured
}

fn measure(
    holder: &mut Talk,
    settings: &Settings,
    (end, side): (End, &Side),
    size: Bytes,
) -> Result<Figures, Error> {
    let ready: Ready = holder.hear()?;
    On::Base(size).check(&side.launch, &ready.memory)?;
    let alone = side.reaper && ready.reaper.is_none();
    refused(alone, "no reaper sleeps beside it".to_owned(), DRY_RUN)?;
    let reaper = ready.reaper.map(pidfd).transpose()?;
    let child = pidfd(holder.child.id())?;

    let memory = Watch::new(&Root::host(), size)?;
    let sent = now_ns();
    let mut killer = None;
    match end {
        End::Kill if side.killer => killer = Some(jumbo_kill(settings, ready.pid)?),
        End::Kill => {
            let killed = kill_process(pid(ready.pid)?, Signal::KILL);
            killed.map_err(|errno| Error::Pipe(errno.into()))?;
        }
        End::Exit | End::Crash => holder.say(&end)?,
    }
    let (waited, status, back) = await_end(holder, &child, &memory)?;
    if let Some(mut killer) = killer {
        killer.end()?;
    }
    if !end.is(status) {
        return Err(holder.failed(status));
    }
    // It says itself when it calls; a signal comes from here.
    let started = match end {
        End::Kill => sent,
        End::Exit | End::Crash => holder.hear()?,
    };
    if let (Some(reaper), Some(number)) = (reaper, ready.reaper) {
        // The sibling exits when all is free. Where it is a child of this process it is reaped as well.
        let goes_on = !has_ended(&reaper, PATIENCE)?;
        let found = "its reaper goes on though the memory is back".to_owned();
        refused(goes_on, found, DRY_RUN)?;
        // ECHILD: another process is its parent.
        let _ = waitpid(Some(pid(number)?), WaitOptions::NOHANG);
    }
    let since = |at: u64| at.saturating_sub(started) as f64 / 1e6;
    let figures = [("wait_ms", since(waited)), ("back_ms", since(back))];
    Ok(figures.map(|(name, ms)| (name.to_owned(), ms)).into())
}

fn jumbo_kill(settings: &Settings, pid: u32) -> Result<Talk, Error> {
    let mut command = Command::new(&settings.jumbo);
    command.args(["kill", "--signal", "KILL", &pid.to_string()]);
    Talk::start(command, Stdio::piped())
}

/// When `waitpid` returned and with what, and when the memory was back.
fn await_end(
    holder: &mut Talk,
    pidfd: &OwnedFd,
    memory: &Watch,
) -> Result<(u64, ExitStatus, u64), Error> {
    let start = Instant::now();
    let (mut ended, mut back) = (None, None);
    // A look takes longer than some ends do, so the end is waited for first.
    let mut pause = Watch::PAUSE;
    loop {
        if ended.is_some() {
            std::thread::sleep(pause);
        } else if has_ended(pidfd, pause)? {
            let status = holder.child.wait().map_err(Error::Pipe)?;
            ended = Some((now_ns(), status));
        } else if back.is_some() {
            return Err(Error::Endless(holder.command.clone()));
        }
        if back.is_none() {
            match memory.look(start)? {
                Some(later) => pause = later,
                None => (back, pause) = (Some(now_ns()), PATIENCE),
            }
        }
        if let (Some((at, status)), Some(back)) = (ended, back) {
            return Ok((at, status, back));
        }
    }
}

/// Whether the process behind `pidfd` ends within that time.
fn has_ended(pidfd: &OwnedFd, within: Duration) -> Result<bool, Error> {
    let within = Timespec::try_from(within).map_err(std::io::Error::other);
    let within = within.map_err(Error::Pipe)?;
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    match poll(&mut fds, Some(&within)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(Error::Pipe(errno.into())),
    }
}

fn pid(number: u32) -> Result<Pid, Error> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| Error::Pipe(std::io::ErrorKind::InvalidData.into()))
}

fn pidfd(number: u32) -> Result<OwnedFd, Error> {
    pidfd_open(pid(number)?, PidfdFlags::empty()).map_err(|errno| Error::Pipe(errno.into()))
}
