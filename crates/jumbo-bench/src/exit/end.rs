//! One end of one process, watched from outside: [`watch`].

use std::io;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::units::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, pidfd_open, waitid,
    waitpid,
};
use rustix::time::Timespec;

use super::worker::{End, Ready, now_ns};
use crate::child::{self, Launch, Talk};
use crate::claim::{self, DRY_RUN};
use crate::memory::Watch;
use crate::worker::{Figures, Task, with};
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

/// How long the sibling may take to end when the memory is back.
const PATIENCE: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// The first look at the memory comes so late because a look takes longer than some ends do.
const PAUSE: Duration = Duration::from_millis(1);

/// Starts a process with `size` bytes on that side, ends it that way, and says how long that took from the call of
/// `exit` or `abort`, or from the signal: until `waitpid` returned, and until the memory was free.
pub(super) fn watch(
    settings: &Settings,
    end: End,
    side: &Side,
    size: Bytes,
) -> Result<Figures, Error> {
    let task = Task::Hold(size, side.reaper, end);
    let mut holder = Talk::start(child::worker(&side.launch, settings, &task), Stdio::piped())?;
    let ready: Ready = holder.hear()?;
    claim::check(&claim::base(size), &side.launch, &ready.figures)?;
    if side.reaper && ready.reaper.is_none() {
        let found = "no reaper sleeps beside it".to_owned();
        return Err(Error::claim(found, DRY_RUN));
    }
    let reaper = ready.reaper.map(pid).transpose()?;
    // Its number may be another's once it is gone.
    let reaper_fd = reaper.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let reaper_fd = reaper_fd.transpose()?;

    let memory = Watch::new(&Root::host(), size)?;
    let child = Pid::from_child(&holder.child);
    let (sent, clock) = (now_ns(), Instant::now());
    let (waited, back) = thread::scope(|scope| {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let waited = scope.spawn(move || waitid(WaitId::Pid(child), ended).map(|_| now_ns()));
        let back = begin(settings, end, side, &ready, &mut holder).and_then(|killer| {
            thread::sleep(PAUSE);
            memory.wait(clock)?;
            Ok((now_ns(), killer))
        });
        if back.is_err() {
            // A process that a launcher stands in front of dies with the launcher.
            let _ = kill_process(child, Signal::KILL);
        }
        (waited.join(), back)
    });
    let (back, killer) = back?;
    let waited = waited.map_err(|_| Error::Corrupt("a thread died".to_owned()))??;
    killer.map_or(Ok(()), |mut killer| killer.end())?;
    let status = holder.child.wait()?;
    if !end.is(status) {
        return Err(holder.failed(status));
    }
    // It says itself when it calls; a signal comes from here.
    let started = match end {
        End::Kill => sent,
        End::Exit | End::Crash => holder.hear()?,
    };
    if let Some(reaper_fd) = reaper_fd {
        // The sibling exits when all is free. Where it is a child of this process it is reaped as well.
        if poll(
            &mut [PollFd::new(&reaper_fd, PollFlags::IN)],
            Some(&PATIENCE),
        )? == 0
        {
            let found = "its reaper goes on though the memory is back".to_owned();
            return Err(Error::claim(found, DRY_RUN));
        }
        // ECHILD: another process is its parent.
        let _ = waitpid(reaper, WaitOptions::NOHANG);
    }
    let since = |at: u64| at.saturating_sub(started) as f64 / 1e6;
    let figures = [("wait_ms", since(waited)), ("back_ms", since(back))];
    Ok(with(Figures::new(), figures))
}

/// Has the process end; what kills it, where that is a process.
fn begin(
    settings: &Settings,
    end: End,
    side: &Side,
    ready: &Ready,
    holder: &mut Talk,
) -> Result<Option<Talk>, Error> {
    match end {
        End::Kill if side.killer => {
            let mut command = Command::new(&settings.jumbo);
            command.args(["kill", "--signal", "KILL", &ready.pid.to_string()]);
            return Talk::start(command, Stdio::piped()).map(Some);
        }
        End::Kill => kill_process(pid(ready.pid)?, Signal::KILL)?,
        End::Exit | End::Crash => holder.say(&())?,
    }
    Ok(None)
}

fn pid(number: u32) -> io::Result<Pid> {
    let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
