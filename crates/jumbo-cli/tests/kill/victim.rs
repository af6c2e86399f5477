//! Processes to end, and the command that ends them.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Memory of a victim, in bytes, all on base pages.
pub(crate) const VICTIM_BYTES: u64 = 300 << 20;

pub(crate) const NOBODY: u32 = 65534;

/// Defines `take`, which fills `size` bytes of base pages with a pattern, and `say`, which reports
/// a step.
const PRELUDE: &str = "
import ctypes, mmap, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
# Ignored in what a shell starts in the background, and inherited.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
def take(size):
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::4096] = b'J' * (size // 4096)
    return memory
def say(word):
    sys.stdout.write(word + '\\n')
    sys.stdout.flush()
def forever():
    while True:
        signal.pause()
";

/// A Python program that has printed `ready`; killed and reaped on drop.
pub(crate) struct Victim {
    child: Child,
    stdout: BufReader<ChildStdout>,
    lines: Vec<String>,
}

impl Victim {
    /// Starts a victim with `VICTIM_BYTES` of memory that sleeps.
    pub(crate) fn plain() -> Self {
        Self::start("")
    }

    /// Starts a victim with `VICTIM_BYTES` of memory that runs `script` and then sleeps.
    pub(crate) fn start(script: &str) -> Self {
        Self::of(Command::new("python3").args(["-c", &with_memory(script)]))
    }

    /// Starts a command and waits until it prints `ready`.
    pub(crate) fn of(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // A process group of its own, with its parent in the session: in an orphaned group, as
            // under setsid(1), the kernel ignores SIGTSTP.
            .process_group(0)
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut victim = Self {
            child,
            stdout,
            lines: Vec::new(),
        };
        victim.expect("ready");
        victim
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the victim prints the line `word`.
    pub(crate) fn expect(&mut self, word: &str) {
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).unwrap();
            assert!(read > 0, "it ended before it said `{word}`");
            if line.trim_end() == word {
                return;
            }
            self.lines.push(line.trim_end().to_owned());
        }
    }

    /// Returns the rest of an earlier line that begins with `prefix`.
    pub(crate) fn earlier_line(&self, prefix: &str) -> &str {
        let mut lines = self.lines.iter();
        lines.find_map(|line| line.strip_prefix(prefix)).unwrap()
    }

    /// Returns a field of /proc/PID/status.
    pub(crate) fn status(&self, key: &str) -> String {
        status(self.pid(), key)
    }

    pub(crate) fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.pid()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end and returns the signal that caused it.
    pub(crate) fn ended_by(mut self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt as _;
        self.child.wait().unwrap().signal()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn with_memory(script: &str) -> String {
    format!("{PRELUDE}\nmemory = take({VICTIM_BYTES})\n{script}\nsay('ready')\nforever()\n")
}

pub(crate) fn status(pid: u32, key: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(name, _)| *name == key);
    found.map_or_else(String::new, |(_, value)| value.trim().to_owned())
}

pub(crate) fn jumbo(arguments: &[&str], pid: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    command.arg("kill").args(arguments).arg(pid.to_string());
    command
}

/// Runs `jumbo kill --json ARGUMENTS PID` and returns its row and its exit code.
pub(crate) fn kill(arguments: &[&str], pid: u32) -> (Value, Option<i32>) {
    let output = jumbo(arguments, pid).arg("--json").output().unwrap();
    (row(&output), output.status.code())
}

pub(crate) fn row(output: &Output) -> Value {
    let page: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    page["processes"][0].clone()
}

/// A copy of the command that every user can run: the build folder may be closed to others.
pub(crate) struct Installed {
    folder: tempfile::TempDir,
}

impl Installed {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        // cp(1) writes it: another test's child could inherit our descriptor open for writing, and
        // execve would fail (ETXTBSY).
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_jumbo"))
            .arg(folder.path())
            .status();
        assert!(copied.unwrap().success());
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).unwrap();
        Self { folder }
    }

    pub(crate) fn as_nobody(&self) -> Command {
        let mut command = Command::new(self.folder.path().join("jumbo"));
        command.uid(NOBODY).gid(NOBODY);
        command
    }
}

/// Waits until `condition` holds; fails after a minute.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Reports that a test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
pub(crate) fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    eprintln!("SKIP {name}: {reason}");
}
