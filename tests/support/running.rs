//! A running command: collects its output, waits for its end, and kills the rest on drop.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};

use super::program::Ran;
use super::wait;

/// A running command in a process group of its own, killed on drop.
pub(crate) struct Running {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Reader,
    stderr: Reader,
    deadline: Instant,
    command: String,
}

impl Running {
    pub(crate) fn spawn(mut command: Command, input: &[u8], timeout: Duration) -> Self {
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = Reader::of(child.stdout.take().unwrap());
        let stderr = Reader::of(child.stderr.take().unwrap());
        let mut stdin = child.stdin.take();
        if !input.is_empty() {
            let mut pipe = stdin.take().unwrap();
            let input = input.to_owned();
            // Ends with the pipe: after the last byte, or when the reader has gone.
            std::thread::spawn(move || {
                let _ = pipe.write_all(&input);
            });
        }
        let deadline = Instant::now() + timeout;
        Self {
            child,
            stdin,
            stdout,
            stderr,
            deadline,
            command: format!("{command:?}"),
        }
    }

    /// Returns the started process: the program itself, or the launcher.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the one child of the launcher: the program.
    #[track_caller]
    pub(crate) fn child(&self) -> Pid {
        let launcher = self.pid().as_raw_nonzero();
        let children = format!("/proc/{launcher}/task/{launcher}/children");
        let text =
            fs::read_to_string(&children).unwrap_or_else(|error| panic!("{children}: {error}"));
        let pids: Vec<i32> = text
            .split_whitespace()
            .map(|pid| pid.parse().unwrap())
            .collect();
        let [pid] = pids.as_slice() else {
            panic!("one child of {}, not {pids:?}", self.command)
        };
        Pid::from_raw(*pid).unwrap()
    }

    /// Waits until the program has printed a line that starts with `prefix`; returns the whole
    /// line.
    #[track_caller]
    pub(crate) fn wait_for_line(&self, prefix: &str) -> String {
        let left = self.deadline.saturating_duration_since(Instant::now());
        wait::until(
            &format!("a line `{prefix}...` of {}", self.command),
            left,
            || {
                // Checked first: a closed pipe means that all output has been read.
                let closed = self.stdout.is_closed();
                let text = self.stdout.so_far();
                let found = text
                    .split_inclusive('\n')
                    .find(|line| line.starts_with(prefix));
                if found.is_none() && closed {
                    panic!(
                        "no line `{prefix}...` in:\n{text}\n{}",
                        self.stderr.so_far()
                    );
                }
                found
                    .filter(|line| line.ends_with('\n'))
                    .map(|line| line.trim_end().to_owned())
            },
        )
    }

    /// Waits until the launcher, which reports, has sampled the program in its present state.
    #[track_caller]
    pub(crate) fn wait_until_sampled(&self) {
        let path = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        // The launcher sleeps between two scans, and samples after some scans if memory has grown
        // clearly.
        let sleeps = || -> u64 {
            let status = fs::read_to_string(&path).unwrap();
            let line =
                (status.lines()).find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse().unwrap()
        };
        let enough = sleeps() + 150;
        wait::until("the launcher's looks", wait::TIMEOUT, || {
            (sleeps() >= enough).then_some(())
        });
    }

    /// Writes to the program's standard input.
    pub(crate) fn write(&mut self, text: &str) {
        self.stdin
            .as_mut()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
    }

    /// Reports whether the process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        let pidfd = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty()).unwrap();
        let mut ready = [rustix::event::PollFd::new(
            &pidfd,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut ready, Some(&rustix::time::Timespec::default())).unwrap() > 0
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for this process alone, as a supervisor does: its children may go on.
    pub(crate) fn reap(&mut self) {
        self.child.wait().unwrap();
    }

    /// Closes the standard input, if still open, and waits for the end.
    pub(crate) fn wait(mut self) -> Ran {
        drop(self.stdin.take());
        let ended = self.child.try_wait().unwrap().is_some() || self.poll();
        if !ended {
            self.kill();
        }
        let status = self.child.wait().unwrap();
        // Children may still hold the output open; that has a timeout, too.
        let ran = Ran {
            status,
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
        };
        assert!(ended, "not done in time: {}\n{ran:?}", self.command);
        ran
    }

    /// Reports whether the process ended in time.
    fn poll(&self) -> bool {
        let pidfd = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty()).unwrap();
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec::try_from(left).unwrap();
        let mut ready = [rustix::event::PollFd::new(
            &pidfd,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut ready, Some(&timeout)).unwrap() > 0
    }

    fn kill(&self) {
        let _ = rustix::process::kill_process_group(self.pid(), Signal::KILL);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The group may have members after its leader has ended.
        self.kill();
        let _ = self.child.wait();
    }
}

/// A thread that reads a pipe to its end; the text is readable meanwhile.
struct Reader {
    text: Arc<Mutex<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let shared = Arc::clone(&text);
        let thread = std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe
                .read_until(b'\n', &mut line)
                .is_ok_and(|length| length > 0)
            {
                shared
                    .lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Self {
            text,
            thread: Some(thread),
        }
    }

    fn so_far(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    fn is_closed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn finish(&mut self) -> String {
        wait::until("the end of the output", wait::TIMEOUT, || {
            self.is_closed().then_some(())
        });
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        self.so_far()
    }
}
