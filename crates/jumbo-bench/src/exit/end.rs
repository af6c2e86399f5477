//! One end of one process, watched from outside: [`watch`].

use std::io::{BufReader, Read as _, Write as _};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use jumbo::kernel::Root;
use jumbo::units::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use rustix::time::Timespec;
use serde::de::DeserializeOwned;

use super::plan::{End, Side};
use super::worker::{ABORT, EXIT, Ending, Ready, now_ns};
use crate::child::{self, Launch, line};
use crate::claim::{self, DRY_RUN};
use crate::memory::Watch;
use crate::{Error, Settings};

/// What an end took, from the call of `exit` or `abort`, or from the signal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Until `waitpid` returned.
    pub(super) wait_ms: f64,
    /// Until the memory was free.
    pub(super) back_ms: f64,
}

/// How long a process may take to end when its memory is back, and its sibling to follow.
const PATIENCE: Duration = Duration::from_secs(10);

/// A process that holds memory and is ready to end.
struct Holder {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    launch: Launch,
    command: String,
    ready: Ready,
}

/// Starts a process with `size` bytes on that side, ends it that way, and watches.
pub(super) fn watch(
    settings: &Settings,
    (end, side): (End, Side),
    (size, workers): (Bytes, Option<NonZeroU32>),
) -> Result<Sample, Error> {
    let mut holder = Holder::start(settings, (side, side.launch(workers)), size)?;
    let measured = holder.measure(settings, (end, side), size);
    if measured.is_err() {
        holder.clear();
    }
    measured
}

impl Holder {
    fn start(
        settings: &Settings,
        (side, launch): (Side, Launch),
        size: Bytes,
    ) -> Result<Self, Error> {
        let size = size.0.to_string();
        let mut words = vec!["hold", size.as_str()];
        if side == Side::Reaper {
            words.push("--reaper");
        }
        let mut command = child::worker(launch, &settings.jumbo, &words);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|source| Error::Start {
            command: line(&command),
            source,
        })?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
            return Err(Error::Pipe(std::io::ErrorKind::BrokenPipe.into()));
        };
        let mut stdout = BufReader::new(stdout);
        match read(&mut stdout) {
            Ok(Some(ready)) => Ok(Self {
                child,
                stdin,
                stdout,
                launch,
                command: line(&command),
                ready,
            }),
            said => {
                let _ = child.kill();
                let status = child.wait().map_err(Error::Pipe)?;
                said?;
                Err(failed(&mut child, line(&command), status))
            }
        }
    }

    fn measure(
        &mut self,
        settings: &Settings,
        (end, side): (End, Side),
        size: Bytes,
    ) -> Result<Sample, Error> {
        claim::base_pages(self.launch, &self.ready.memory, size)?;
        if side == Side::Reaper && self.ready.reaper.is_none() {
            return claim::refuse(
                self.launch,
                "no reaper sleeps beside it".to_owned(),
                DRY_RUN,
            );
        }
        let reaper = self.ready.reaper.map(pidfd).transpose()?;
        let child = pidfd(self.child.id())?;

        let memory = Watch::new(&Root::host(), size)?;
        let (ordered, mut killer) = self.order(settings, end, side)?;
        let (waited, status, back) = self.await_end(&child, &memory)?;
        if let Some(killer) = &mut killer {
            let status = killer.wait().map_err(Error::Pipe)?;
            if !status.success() {
                return Err(failed(killer, "jumbo kill".to_owned(), status));
            }
        }
        if !end.is(status) {
            return Err(failed(&mut self.child, self.command.clone(), status));
        }
        // It says itself when it calls; a signal comes from here.
        let started = match ordered {
            Some(sent) => sent,
            None => match read::<Ending>(&mut self.stdout)? {
                Some(ending) => ending.at_ns,
                None => return Err(failed(&mut self.child, self.command.clone(), status)),
            },
        };
        if let Some(reaper) = reaper {
            self.await_reaper(&reaper)?;
        }
        let since = |at: u64| at.saturating_sub(started) as f64 / 1e6;
        Ok(Sample {
            wait_ms: since(waited),
            back_ms: since(back),
        })
    }

    /// Ends the process, and returns when, where that is known here, and whom to wait for afterwards.
    fn order(
        &mut self,
        settings: &Settings,
        end: End,
        side: Side,
    ) -> Result<(Option<u64>, Option<Child>), Error> {
        let word = match end {
            End::Exit => EXIT,
            End::Crash => ABORT,
            End::Kill => {
                let now = now_ns();
                let killer = match side {
                    Side::JumboKill => Some(self.start_killer(settings)?),
                    _ => {
                        let sent = kill_process(pid(self.ready.pid)?, Signal::KILL);
                        sent.map_err(|errno| Error::Pipe(errno.into()))?;
                        None
                    }
                };
                return Ok((Some(now), killer));
            }
        };
        writeln!(self.stdin, "{word}").map_err(Error::Pipe)?;
        Ok((None, None))
    }

    fn start_killer(&self, settings: &Settings) -> Result<Child, Error> {
        let mut command = Command::new(&settings.jumbo);
        command.args(["kill", "--signal", "KILL", &self.ready.pid.to_string()]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.spawn().map_err(|source| Error::Start {
            command: line(&command),
            source,
        })
    }

    /// When `waitpid` returned and with what, and when the memory was back.
    fn await_end(
        &mut self,
        child: &OwnedFd,
        memory: &Watch,
    ) -> Result<(u64, ExitStatus, u64), Error> {
        let start = Instant::now();
        let (mut ended, mut back) = (None, None);
        // A look takes longer than some ends do, so the end is waited for first.
        let mut pause = Watch::PAUSE;
        loop {
            if ended.is_some() {
                std::thread::sleep(pause);
            } else if ready(child, pause)? {
                let status = self.child.wait().map_err(Error::Pipe)?;
                ended = Some((now_ns(), status));
            } else if back.is_some() {
                return Err(Error::Endless(self.command.clone()));
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

    /// The sibling exits when all is free. Where it is a child of this process it is reaped as well.
    fn await_reaper(&self, reaper: &OwnedFd) -> Result<(), Error> {
        if !ready(reaper, PATIENCE)? {
            let found = "its reaper goes on though the memory is back".to_owned();
            return claim::refuse(self.launch, found, DRY_RUN);
        }
        if let Some(reaper) = self.ready.reaper {
            // ECHILD: another process is its parent.
            let _ = waitpid(Some(pid(reaper)?), WaitOptions::NOHANG);
        }
        Ok(())
    }

    /// Leaves nothing behind where a sample failed.
    fn clear(&mut self) {
        // Whom a launcher stands in front of dies with the launcher.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line, as JSON; `None` where there is none.
fn read<T: DeserializeOwned>(from: &mut impl std::io::BufRead) -> Result<Option<T>, Error> {
    let mut text = String::new();
    if from.read_line(&mut text).map_err(Error::Pipe)? == 0 {
        return Ok(None);
    }
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).map_err(|error| Error::Pipe(error.into()))
}

/// Whether the process behind `pidfd` ends within that time.
fn ready(pidfd: &OwnedFd, within: Duration) -> Result<bool, Error> {
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

/// That the process ended in another way than it was to; with the last that it said.
fn failed(child: &mut Child, command: String, status: ExitStatus) -> Error {
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.read_to_string(&mut said);
    }
    Error::Failed {
        command,
        status,
        stderr: said.lines().last().unwrap_or("no message").to_owned(),
    }
}
