//! One end of one process, watched from outside: [`watch`].

use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use jumbo::units::Bytes;
use jumbo_host::kernel::Root;
use jumbo_host::teardown::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, waitid, waitpid};

use super::worker::{End, HOLD, PID, REAPER, now_ns};
use crate::claim::{self, DRY_RUN};
use crate::figures::{Figures, figures};
use crate::launch::Launch;
use crate::memory::Watch;
use crate::talk::Talk;
use crate::work::Worker;
use crate::{Error, Settings};

/// The process that gives the memory back, beside the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Kernel,
    /// The sibling.
    Reaper,
    /// `jumbo kill`.
    Killer,
}

/// How long a process may take to end, and its sibling when the memory is back.
const PATIENCE: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// The first look at the memory comes so late because a look takes longer than some ends do.
const PAUSE: Duration = Duration::from_millis(1);

/// Starts a process with `size` bytes, ends it that way, and says how long that took from the call of `exit` or `abort`,
/// or from the signal: until `waitpid` returned, and until the memory was free.
pub(super) fn watch(
    settings: &Settings,
    end: End,
    (by, launch): (By, &Launch),
    size: Bytes,
) -> Result<Figures, Error> {
    let root = Root::host();
    let worker = Worker::new(launch.clone(), &HOLD, &(size, by == By::Reaper, end));
    let (mut holder, ready) = worker.begin(settings, &claim::base(size))?;
    let process = |name| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a process ID"
        )]
        let pid = ready.get(name).map(|pid| *pid as u32);
        pid.map(|pid| Process::open(&root, pid)).transpose()
    };
    let (held, reaper) = (process(PID)?, process(REAPER)?);
    if by == By::Reaper && reaper.is_none() {
        return Err(Error::claim("no reaper sleeps beside it", DRY_RUN));
    }
    // It may stand in front of the one that has the memory.
    let first = Process::open(&root, holder.child.id())?;

    let memory = Watch::new(&root, size)?;
    // A second for each GiB, as the memory has.
    let within = Timespec {
        tv_sec: PATIENCE.tv_sec + (size.0 >> 30).cast_signed(),
        ..PATIENCE
    };
    let (sent, clock) = (now_ns(), Instant::now());
    let (waited, back) = thread::scope(|scope| {
        let waited = scope.spawn(|| {
            let ended = has_ended(&first, &within)?;
            if ended {
                // It is waited for in earnest below, with its status.
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                waitid(WaitId::PidFd(first.as_fd()), options)?;
            }
            Ok::<_, Error>((ended, now_ns()))
        });
        let back = begin(settings, end, by, held.as_ref(), &mut holder).and_then(|killer| {
            thread::sleep(PAUSE);
            memory.wait(clock)?;
            Ok((now_ns(), killer))
        });
        if back.is_err() {
            let _ = first.signal(Signal::KILL.as_raw());
        }
        (waited.join(), back)
    });
    let (back, killer) = back?;
    let (ended, waited) = waited.map_err(|_| Error::Corrupt("a thread died".to_owned()))??;
    if !ended {
        let _ = first.signal(Signal::KILL.as_raw());
        return Err(Error::claim(
            "it goes on though its memory is free",
            DRY_RUN,
        ));
    }
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
    if let Some(reaper) = reaper {
        // The sibling exits when all is free. Where it is a child of this process it is reaped as well.
        if !has_ended(&reaper, &PATIENCE)? {
            let found = "its reaper goes on though the memory is back";
            return Err(Error::claim(found, DRY_RUN));
        }
        // ECHILD: another process is its parent.
        let _ = waitpid(
            Pid::from_raw(reaper.pid().cast_signed()),
            WaitOptions::NOHANG,
        );
    }
    let since = |at: u64| at.saturating_sub(started) as f64 / 1e6;
    Ok(figures([
        ("wait_ms", since(waited)),
        ("back_ms", since(back)),
    ]))
}

/// Has the process end; what kills it, where that is a process.
fn begin(
    settings: &Settings,
    end: End,
    by: By,
    held: Option<&Process>,
    holder: &mut Talk,
) -> Result<Option<Talk>, Error> {
    match (end, held) {
        (End::Kill, Some(held)) if by == By::Killer => {
            let mut command = Command::new(&settings.jumbo);
            command.args(["kill", "--signal", "KILL", &held.pid().to_string()]);
            return Talk::start(command, Stdio::piped()).map(Some);
        }
        (End::Kill, Some(held)) => held.signal(Signal::KILL.as_raw())?,
        _ => holder.say(&())?,
    }
    Ok(None)
}

/// Whether it ends within that time.
fn has_ended(process: &Process, within: &Timespec) -> Result<bool, Error> {
    Ok(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(within))? > 0)
}
