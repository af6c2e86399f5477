//! A running program: [`ProgramRun`]. It has a process group of its own, its output is hashed, and
//! on drop no process of it remains.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher as _;
use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use jumbo_host::kernel::Root;
use jumbo_host::kernel::process::{Process, tree, wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

use super::served::Served;
use crate::Error;
use crate::figures::ms;
use crate::interrupt;
use crate::launch::line;

/// Maximum time until a program ends after SIGTERM, and until its output closes after its end.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum delay until a signal is noticed.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Kept end of the output: for messages, and for the figures of a load.
const KEPT_OUTPUT_BYTES: usize = 64 << 10;

/// Output to one stream. Two are equal if their lengths and hashes are.
#[derive(Clone, Debug, Default)]
pub(super) struct Output {
    bytes: u64,
    hash: u64,
    pub(super) last: String,
    pub(super) end: String,
}

#[derive(Clone, Debug)]
pub(super) struct RunResult {
    pub(super) status: ExitStatus,
    /// stdout and stderr; `None` if a remaining process keeps the stream open.
    pub(super) output: [Option<Output>; 2],
    /// CPU time of the process and of the descendants that it waited for.
    pub(super) user_ms: f64,
    pub(super) system_ms: f64,
    pub(super) rss_bytes: f64,
    pub(super) faults: f64,
    /// Figures that the load printed, if this is its server.
    pub(super) served: Option<Served>,
}

pub(super) struct ProgramRun {
    process: Process,
    pub(super) command: String,
    streams: Option<[Receiver<io::Result<Output>>; 2]>,
}

impl PartialEq for Output {
    fn eq(&self, other: &Self) -> bool {
        (self.bytes, self.hash) == (other.bytes, other.hash)
    }
}

impl ProgramRun {
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
        let [(to_out, out), (to_err, err)] = [channel(), channel()];
        let running = Self {
            process,
            command: command_line.clone(),
            streams: Some([out, err]),
        };
        let heard =
            listen(child.stdout.take(), to_out).and_then(|()| listen(child.stderr.take(), to_err));
        heard.map_err(|error| Error::Start(command_line, error))?;
        Ok(running)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.process.is_gone()
    }

    /// Waits for the end of the program; false after `timeout`. Calls `sample` repeatedly, which
    /// returns the time until its next call.
    pub(super) fn wait(
        &self,
        timeout: Option<Duration>,
        sample: &mut dyn FnMut() -> Duration,
    ) -> Result<bool, Error> {
        let clock = Instant::now();
        loop {
            interrupt::check()?;
            let left = timeout.map_or(SIGNAL_CHECK_INTERVAL, |timeout| {
                timeout.saturating_sub(clock.elapsed())
            });
            let pause = sample().min(left).min(SIGNAL_CHECK_INTERVAL);
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

    /// Sends SIGTERM, and after a timeout SIGKILL.
    pub(super) fn stop(&self) -> Result<(), Error> {
        let _ = self.process.signal(libc::SIGTERM);
        let clock = Instant::now();
        while clock.elapsed() < TERMINATION_TIMEOUT {
            if self.ended_within(SIGNAL_CHECK_INTERVAL)? {
                return Ok(());
            }
        }
        self.signal_group(Signal::KILL);
        Ok(())
    }

    fn signal_group(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.pid().cast_signed()) {
            // ESRCH: the group is empty.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Reaps the program and kills the rest of its process group, which would disturb the next run.
    pub(super) fn reap(mut self) -> Result<RunResult, Error> {
        let streams = self.streams.take();
        // Before the wait: afterwards the ID of the group may be reused.
        self.signal_group(Signal::KILL);
        let (status, usage) = wait(self.pid().cast_signed())?;
        let clock = Instant::now();
        let hear = |stream: &Receiver<io::Result<Output>>| {
            let left = TERMINATION_TIMEOUT.saturating_sub(clock.elapsed()) / 10;
            stream.recv_timeout(left).ok().transpose()
        };
        let output = match &streams {
            Some([out, err]) => [hear(out)?, hear(err)?],
            None => [None, None],
        };
        Ok(RunResult {
            status,
            output,
            user_ms: ms(usage.user),
            system_ms: ms(usage.system),
            rss_bytes: usage.max_rss as f64,
            faults: usage.minor as f64,
            served: None,
        })
    }

    /// Replaces `error`, which came up while it was serving, by its own failure if it has ended.
    pub(super) fn blame(self, error: Error) -> Error {
        if matches!(error, Error::Interrupted(_)) || !self.is_gone() {
            return error;
        }
        let command = self.command.clone();
        match self.reap() {
            Ok(ended) => Error::Failed(command, ended.status, ended.last_line()),
            Err(error) => error,
        }
    }

    /// Waits for the end of the program, or a signal; [`Error::Failed`] if it failed.
    pub(super) fn succeed(self, sample: &mut dyn FnMut() -> Duration) -> Result<RunResult, Error> {
        self.wait(None, sample)?;
        let command = self.command.clone();
        let ended = self.reap()?;
        match ended.status.success() {
            true => Ok(ended),
            false => Err(Error::Failed(command, ended.status, ended.last_line())),
        }
    }
}

impl RunResult {
    /// Last line of stderr, or of stdout if stderr is empty.
    pub(super) fn last_line(&self) -> String {
        let [out, err] = &self.output;
        let mut output = [err, out].into_iter().flatten().map(|output| &output.last);
        let last = output.find(|last| !last.is_empty()).cloned();
        last.unwrap_or_else(|| "no message".to_owned())
    }
}

impl Drop for ProgramRun {
    /// A run that was not reaped (after an error or a signal) still has its streams.
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
        // Init reaps orphans; all memory should be free on return.
        let clock = Instant::now();
        let is_left = |process: &Process| !process.is_gone();
        while tree.iter().any(is_left) && clock.elapsed() < TERMINATION_TIMEOUT {
            thread::sleep(Duration::from_millis(1));
        }
        let _ = wait(self.pid().cast_signed());
    }
}

/// Reads a stream to its end, in a new thread.
fn listen(
    stream: Option<impl Read + Send + 'static>,
    sender: Sender<io::Result<Output>>,
) -> io::Result<()> {
    let read = move || {
        let output = stream.map_or(Ok(Output::default()), hash);
        // The receiver is gone if the run was given up.
        let _ = sender.send(output);
    };
    thread::Builder::new().spawn(read).map(drop)
}

fn hash(mut stream: impl Read) -> io::Result<Output> {
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
        tail.drain(..tail.len().saturating_sub(KEPT_OUTPUT_BYTES));
    }
    let tail = String::from_utf8_lossy(&tail);
    let mut lines = tail.lines().rev().map(str::trim);
    let last = lines.find(|line| !line.is_empty()).unwrap_or_default();
    Ok(Output {
        bytes,
        hash: hasher.finish(),
        last: last.to_owned(),
        end: tail.into_owned(),
    })
}

/// Makes the standard library use fork(2) instead of the vfork(2) of posix_spawn(3). At execve(2)
/// the kernel adds the RSS before it to the peak: after vfork that is our whole RSS; after fork
/// only what was copied, which is less than a program that does nothing has.
///
/// The closure, whose presence prevents vfork, has the program killed at the end of this process.
fn forks(command: &mut Command) {
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
}

/// Resets the peak RSS of this process, which a child inherits. If the file is not writable, the
/// figure is too large on all sides.
///
/// # References
/// proc_pid_clear_refs(5), Linux 4.0
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ProgramRun {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        ProgramRun::start(&Root::host(), command).unwrap()
    }

    fn ended(script: &str) -> RunResult {
        let running = shell(script);
        assert!(running.wait(None, &mut || SIGNAL_CHECK_INTERVAL).unwrap());
        running.reap().unwrap()
    }

    #[test]
    fn output_and_exit_status_are_compared() {
        let (one, two) = (ended("echo a; exit 3"), ended("echo a; echo b >&2; exit 3"));
        assert_eq!((one.status, one.output[0].is_some()), (two.status, true));
        assert_eq!(one.output[0], two.output[0]);
        assert_ne!(one.output[1], two.output[1]);
        assert_eq!((one.last_line(), two.last_line()), ("a".into(), "b".into()));
        assert_ne!(ended("kill -9 $$").status, one.status);
    }

    #[test]
    fn time_and_memory_of_children_count() {
        let ended = ended("dd if=/dev/zero of=/dev/null bs=64M count=2 2>&1; :");
        assert!(ended.rss_bytes > f64::from(64 << 20), "{ended:?}");
        assert!(ended.user_ms + ended.system_ms > 0.0 && ended.faults > 0.0);
    }

    #[test]
    fn an_aborted_run_leaves_no_process() {
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
            assert!(clock.elapsed() < TERMINATION_TIMEOUT);
        }
    }
}
