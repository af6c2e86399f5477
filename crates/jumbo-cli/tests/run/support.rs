//! Start of jumbo and of programs, with deadlines.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Mode of `jumbo run`: it becomes the program or stays its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Exec,
    Parent,
}

pub(crate) const MODES: [Mode; 2] = [Mode::Exec, Mode::Parent];

/// Preload library beside the tested command.
pub(crate) fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        Path::new(env!("CARGO_BIN_EXE_jumbo")).with_file_name("libjumbo_preload.so")
    })
}

/// `jumbo run` in a mode, without a visible report; the caller appends the program.
pub(crate) fn run(mode: Mode) -> Command {
    let mut jumbo = jumbo();
    jumbo.arg("run");
    match mode {
        Mode::Exec => jumbo.arg("--quiet"),
        Mode::Parent => jumbo.args(["--report", "--report-file", "/dev/null"]),
    };
    jumbo.arg("--");
    jumbo
}

/// The command, without the variables that jumbo sets.
pub(crate) fn jumbo() -> Command {
    let mut jumbo = Command::new(env!("CARGO_BIN_EXE_jumbo"));
    for variable in [
        "LD_PRELOAD",
        "GLIBC_TUNABLES",
        "JUMBO_ORDERS",
        "JUMBO_PRELOAD",
        "JUMBO",
    ] {
        jumbo.env_remove(variable);
    }
    jumbo
}

pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn stdout(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Creates an executable file. Another process writes it: a child of another test could inherit our
/// descriptor open for writing, and execve would fail (ETXTBSY).
pub(crate) fn executable(path: &Path, text: &str) {
    let script = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let made = Command::new("sh")
        .args(["-c", script])
        .arg(path)
        .arg(text)
        .status();
    assert!(made.unwrap().success());
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until `condition` holds; fails after a minute.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process that is killed on drop.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// End of a Python program that waits until jumbo has sampled its present state. jumbo sleeps
/// between two scans; up to some 100 scans may pass until the next sample.
pub(crate) const WAIT_FOR_SAMPLE: &str = "
import os, time
def above(pid):
    return open(f'/proc/{pid}/stat').read().rsplit(') ')[1].split()[1]
jumbo = above('self')
while open(f'/proc/{jumbo}/comm').read() != 'jumbo\\n':
    jumbo = above(jumbo)
def sleeps():
    status = open(f'/proc/{jumbo}/status').read()
    return int(status.split('\\nvoluntary_ctxt_switches:')[1].split()[0])
enough, end = sleeps() + 300, time.monotonic() + 60
while sleeps() < enough and time.monotonic() < end:
    time.sleep(0.005)
";

/// Returns the child that runs the program `name`. Below a filter jumbo has had another child
/// before.
pub(crate) fn child_of(pid: i32, name: &str) -> i32 {
    let is_named = |child: &i32| {
        std::fs::read_to_string(format!("/proc/{child}/comm"))
            .is_ok_and(|comm| comm.trim_end() == name)
    };
    let mut program = None;
    until("a child that runs the program", || {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        let pids = children.split_ascii_whitespace();
        program = pids.map(|pid| pid.parse().unwrap()).find(is_named);
        program.is_some()
    });
    program.unwrap()
}

/// Returns the state letter of a process; `None` after its end.
pub(crate) fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

pub(crate) fn kill(pid: i32, signal: &str) {
    // The shell's own: kill(1) is of a package that a bare machine lacks.
    let status = Command::new("sh")
        .args(["-c", "kill -s \"$0\" \"$1\"", signal, &pid.to_string()])
        .status();
    assert!(status.unwrap().success(), "kill -s {signal} {pid}");
}

/// Reports that a test cannot run here. With `JUMBO_TEST_STRICT=1` that is a failure.
pub(crate) fn skip(name: &str, reason: &str) {
    assert!(
        std::env::var_os("JUMBO_TEST_STRICT").is_none_or(|value| value != "1"),
        "SKIP {name}: {reason} (JUMBO_TEST_STRICT=1)"
    );
    eprintln!("SKIP {name}: {reason}");
}
