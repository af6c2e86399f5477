//! A program that runs: [`Running`]. It is started in a process group of its own, what it says is hashed as it comes, and
//! nothing of it is left when this is dropped.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher as _;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::tree;
use jumbo_host::teardown::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use super::served::Served;
use crate::Error;
use crate::figures::cpu_ms;
use crate::interrupt;
use crate::launch::line;

/// How long a program may take to end that was asked to, and how long its output may stay open behind its end.
const GRACE: Duration = Duration::from_secs(10);

/// A signal is seen so much later at most.
const LOOK: Duration = Duration::from_millis(200);

/// The size of the end of its output that is kept: for a message, and for the figures of a load.
const KEPT: usize = 64 << 10;

/// The output of a program to one stream. Two are equal when as many bytes came, with the same
/// hash.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    bytes: u64,
    hash: u64,
    /// The last line that says something.
    pub(super) last: String,
    /// The end of it.
    pub(super) end: String,
}

/// How a run ended, and what it said.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// stdout and stderr; `None` where a process that it left behind still has the stream.
    pub(super) said: [Option<Said>; 2],
    /// Of it and of those that it waited for.
    pub(super) user_ms: f64,
    pub(super) system_ms: f64,
    /// Of the largest of its processes.
    pub(super) rss_bytes: f64,
    pub(super) faults: f64,
    /// The figures that the load printed that it served, where it did.
    pub(super) served: Option<Served>,
}

/// A process, and those that it starts.
pub(super) struct Running {
    process: Process,
    /// The command as a user would type it.
    pub(super) command: String,
    streams: Option<[Receiver<io::Result<Said>>; 2]>,
}

impl PartialEq for Said {
    fn eq(&self, other: &Self) -> bool {
        (self.bytes, self.hash) == (other.bytes, other.hash)
    }
}

impl Running {
    /// Starts it.
    pub(super) fn start(root: &Root, mut command: Command) -> Result<Self, Error> {
        let command_line = line(&command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        forget_peak();
        forks(&mut command);
        let started = command.process_group(0).spawn();
        let mut child = started.map_err(|error| Error::Start(command_line.clone(), error))?;
        let process = Process::open(root, child.id()).inspect_err(|_| {
            // It runs, and nothing would wait for it.
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let streams = [listen(child.stdout.take()), listen(child.stderr.take())];
        Ok(Self {
            process,
            command: command_line,
            streams: Some(streams),
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.process.is_gone()
    }

    /// Waits until it has ended, or `most` has passed: then false. `look` is called now and then, and says when to call
    /// it again.
    pub(super) fn wait(
        &self,
        most: Option<Duration>,
        look: &mut dyn FnMut() -> Duration,
    ) -> Result<bool, Error> {
        let clock = Instant::now();
        loop {
            interrupt::check()?;
            let left = most.map_or(LOOK, |most| most.saturating_sub(clock.elapsed()));
            let pause = look().min(left).min(LOOK);
            if self.ended_within(pause)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    fn ended_within(&self, pause: Duration) -> Result<bool, Error> {
        let pause = Timespec::try_from(pause).unwrap_or_default();
        match poll(
            &mut [PollFd::new(&self.process, PollFlags::IN)],
            Some(&pause),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(self.is_gone()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Asks it to end, and after a while has the kernel end it.
    pub(super) fn stop(&self) -> Result<(), Error> {
        let _ = self.process.signal(libc::SIGTERM);
        let clock = Instant::now();
        while clock.elapsed() < GRACE {
            if self.ended_within(LOOK)? {
                return Ok(());
            }
        }
        self.signal_group(Signal::KILL);
        Ok(())
    }

    fn signal_group(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.pid().cast_signed()) {
            // ESRCH: none is left.
            let _ = kill_process_group(group, signal);
        }
    }

    /// How it ended. What is left of its process group is ended too: it would disturb the next run.
    pub(super) fn reap(mut self) -> Result<Ended, Error> {
        let streams = self.streams.take();
        // Its ID, and so that of its group, is not given to another process before it is waited for.
        self.signal_group(Signal::KILL);
        let (status, usage) = wait4(self.pid())?;
        let clock = Instant::now();
        let hear = |stream: &Receiver<io::Result<Said>>| {
            let left = GRACE.saturating_sub(clock.elapsed()) / 10;
            stream.recv_timeout(left).ok().transpose()
        };
        let said = match &streams {
            Some([out, err]) => [hear(out)?, hear(err)?],
            None => [None, None],
        };
        Ok(Ended {
            status,
            said,
            user_ms: cpu_ms(usage.ru_utime),
            system_ms: cpu_ms(usage.ru_stime),
            rss_bytes: usage.ru_maxrss as f64 * 1024.0,
            faults: usage.ru_minflt as f64,
            served: None,
        })
    }

    /// The reason of `error`, which came while it was to serve: its own end, where it has ended.
    pub(super) fn blame(self, error: Error) -> Error {
        if matches!(error, Error::Interrupted(_)) || !self.is_gone() {
            return error;
        }
        let command = self.command.clone();
        match self.reap() {
            Ok(ended) => Error::Failed(command, ended.status, ended.last_words()),
            Err(error) => error,
        }
    }

    /// Waits for its end, or a signal, and returns how it ended; [`Error::Failed`] where that was with an error.
    pub(super) fn succeed(self, look: &mut dyn FnMut() -> Duration) -> Result<Ended, Error> {
        self.wait(None, look)?;
        let command = self.command.clone();
        let ended = self.reap()?;
        match ended.status.success() {
            true => Ok(ended),
            false => Err(Error::Failed(command, ended.status, ended.last_words())),
        }
    }
}

impl Ended {
    /// The last that it said, on stderr if it said something there.
    pub(super) fn last_words(&self) -> String {
        let [out, err] = &self.said;
        let mut said = [err, out].into_iter().flatten().map(|said| &said.last);
        let last = said.find(|last| !last.is_empty()).cloned();
        last.unwrap_or_else(|| "no message".to_owned())
    }
}

impl Drop for Running {
    /// Only one that was not waited for has its streams: an error came between, or a signal.
    fn drop(&mut self) {
        if self.streams.is_none() {
            return;
        }
        let (root, mut at) = (Root::host(), 0);
        let mut tree = vec![self.process.clone()];
        while let Some(process) = tree.get(at) {
            let children = tree::children(&root, process.pid());
            tree.extend(
                children
                    .iter()
                    .filter_map(|pid| Process::open(&root, *pid).ok()),
            );
            at += 1;
        }
        let _ = self.stop();
        self.signal_group(Signal::KILL);
        for process in &tree {
            let _ = process.signal(libc::SIGKILL);
        }
        // Init reaps those whose parent is gone; the memory of all of them is to be free when this returns.
        let clock = Instant::now();
        let is_left = |process: &Process| !process.is_gone();
        while tree.iter().any(is_left) && clock.elapsed() < GRACE {
            thread::sleep(Duration::from_millis(1));
        }
        let _ = wait4(self.pid());
    }
}

/// Reads a stream to its end, in a thread of its own.
fn listen(stream: Option<impl Read + Send + 'static>) -> Receiver<io::Result<Said>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let said = stream.map_or(Ok(Said::default()), hash);
        // The receiver is gone where the run was given up.
        let _ = sender.send(said);
    });
    receiver
}

fn hash(mut stream: impl Read) -> io::Result<Said> {
    let (mut hasher, mut bytes, mut tail) = (DefaultHasher::new(), 0, Vec::new());
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => &buffer[..read],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        hasher.write(read);
        bytes += read.len() as u64;
        tail.extend_from_slice(read);
        tail.drain(..tail.len().saturating_sub(KEPT));
    }
    let tail = String::from_utf8_lossy(&tail);
    let mut lines = tail.lines().rev().map(str::trim);
    let last = lines.find(|line| !line.is_empty()).unwrap_or_default();
    Ok(Said {
        bytes,
        hash: hasher.finish(),
        last: last.to_owned(),
        end: tail.into_owned(),
    })
}

/// Has the process be made by fork(2) and not by vfork(2), as posix_spawn(3) makes it. At execve(2) the kernel adds the memory that a
/// process has had so far to its peak: after vfork that is all of ours, after fork what was copied, which is less than a
/// program has that does nothing.
fn forks(command: &mut Command) {
    // SAFETY: does nothing at all; a closure is what keeps the standard library from vfork.
    unsafe { command.pre_exec(|| Ok(())) };
}

/// Resets the peak of this process, which a new one inherits. Where the file cannot be written the figure is too large on all
/// sides.
///
/// # References
/// proc_pid_clear_refs(5), Linux 4.0
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Waits for a child of this process, and returns what it and those that it waited for took.
///
/// # References
/// wait4(2)
fn wait4(pid: u32) -> Result<(ExitStatus, libc::rusage), Error> {
    // SAFETY: the structure is integers only, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let mut status = 0;
    loop {
        // SAFETY: the kernel writes a number and a `rusage` where these are.
        let waited = unsafe { libc::wait4(pid.cast_signed(), &raw mut status, 0, &raw mut usage) };
        match io::Error::last_os_error() {
            _ if waited >= 0 => return Ok((ExitStatus::from_raw(status), usage)),
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(Error::Pipe(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        Running::start(&Root::host(), command).unwrap()
    }

    fn ended(script: &str) -> Ended {
        let running = shell(script);
        assert!(running.wait(None, &mut || LOOK).unwrap());
        running.reap().unwrap()
    }

    #[test]
    fn what_it_says_and_how_it_ends_is_compared() {
        let (one, two) = (ended("echo a; exit 3"), ended("echo a; echo b >&2; exit 3"));
        assert_eq!((one.status, one.said[0].is_some()), (two.status, true));
        assert_eq!(one.said[0], two.said[0]);
        assert_ne!(one.said[1], two.said[1]);
        assert_eq!(
            (one.last_words(), two.last_words()),
            ("a".into(), "b".into())
        );
        assert_ne!(ended("kill -9 $$").status, one.status);
    }

    #[test]
    fn time_and_memory_of_children_count() {
        let ended = ended("dd if=/dev/zero of=/dev/null bs=64M count=2 2>&1; :");
        assert!(ended.rss_bytes > f64::from(64 << 20), "{ended:?}");
        assert!(ended.user_ms + ended.system_ms > 0.0 && ended.faults > 0.0);
    }

    #[test]
    fn nothing_is_left_of_a_run_that_is_given_up() {
        let running = shell("sleep 1000 & setsid sleep 1000 & wait");
        let root = Root::host();
        let mut children = Vec::new();
        while children.len() < 2 {
            children = tree::children(&root, running.pid());
        }
        drop(running);
        let clock = Instant::now();
        let is_there =
            |pid: &u32| Process::open(&root, *pid).is_ok_and(|process| !process.is_gone());
        while children.iter().any(is_there) {
            assert!(clock.elapsed() < GRACE);
        }
    }
}
