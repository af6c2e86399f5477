//! A command that can be run plain and under jumbo, and the comparison of the two.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::build;
use super::report::Report;
use super::running::Running;

/// More options for every `jumbo run`, to have all tests judge another way of running: `--heap=mimalloc`, say.
const MORE_OPTIONS: &str = "JUMBO_TEST_OPTIONS";
/// How long one run may take, unless a test says otherwise.
const BOUND: Duration = Duration::from_secs(180);

/// A command to be run any number of times, each time within a bound.
#[derive(Clone)]
pub(crate) struct Program {
    argv: Vec<OsString>,
    around: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    folder: Option<PathBuf>,
    stdin: Vec<u8>,
    bound: Duration,
    jumbo: PathBuf,
    /// Keeps the copy that [`Self::jumbo`] points at.
    _installed: Option<Arc<tempfile::TempDir>>,
}

/// How a run ended.
pub(crate) struct Ran {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Program {
    pub(crate) fn new(command: impl AsRef<OsStr>) -> Self {
        Self {
            argv: vec![command.as_ref().to_owned()],
            around: Vec::new(),
            env: Vec::new(),
            folder: None,
            stdin: Vec::new(),
            bound: BOUND,
            jumbo: build::jumbo().to_owned(),
            _installed: None,
        }
    }

    /// `sh -c script`.
    pub(crate) fn shell(script: &str) -> Self {
        Self::new("sh").args(["-c", script])
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.argv.push(arg.as_ref().to_owned());
        self
    }

    pub(crate) fn args<A: AsRef<OsStr>>(self, args: impl IntoIterator<Item = A>) -> Self {
        args.into_iter().fold(self, Self::arg)
    }

    pub(crate) fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.into(), value.as_ref().to_owned()));
        self
    }

    pub(crate) fn folder(mut self, folder: &Path) -> Self {
        self.folder = Some(folder.to_owned());
        self
    }

    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = bytes.into();
        self
    }

    /// It works for so long, which is not to count.
    pub(crate) fn working_for(mut self, time: Duration) -> Self {
        self.bound = BOUND + time;
        self
    }

    /// Puts a command such as `prlimit --as=N` around the program, and around jumbo when there is one.
    pub(crate) fn around<A: AsRef<OsStr>>(mut self, argv: impl IntoIterator<Item = A>) -> Self {
        self.around
            .extend(argv.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Runs it as a user without any privilege: `nobody` where the tests run as root.
    pub(crate) fn unprivileged(self) -> Self {
        self.installed().user("nobody")
    }

    /// Takes jumbo from a place where every user can reach it, which the build folder need not be.
    pub(crate) fn installed(mut self) -> Self {
        let folder = build::world_readable_folder();
        // By another process: while this one held a program open for writing, a child that another test
        // just forked would hold it too, and running it would fail with ETXTBSY.
        let copied = Command::new("cp")
            .args([build::jumbo(), &build::preload(), folder.path()])
            .status();
        assert!(copied.unwrap().success());
        self.jumbo = folder.path().join("jumbo");
        self._installed = Some(Arc::new(folder));
        self
    }

    /// Runs it as another user, where the tests run as root.
    pub(crate) fn user(self, user: &str) -> Self {
        if !rustix::process::geteuid().is_root() {
            return self;
        }
        let (id, group) = (
            format!("--reuid={user}"),
            format!("--regid={}", primary_group(user)),
        );
        self.around(["setpriv", &id, &group, "--clear-groups"])
    }

    /// Runs it without jumbo.
    pub(crate) fn plain(&self) -> Ran {
        self.start(&[], &[]).wait()
    }

    /// Runs it under `jumbo run`, which replaces itself with the program.
    pub(crate) fn jumbo(&self) -> Ran {
        self.jumbo_with(&[])
    }

    /// Runs it under `jumbo run OPTIONS`.
    pub(crate) fn jumbo_with(&self, options: &[&str]) -> Ran {
        self.start_jumbo(options).wait()
    }

    /// Runs another command of its jumbo in its place.
    pub(crate) fn jumbo_itself(&self, arguments: &[&str]) -> Ran {
        self.itself().args(arguments).plain()
    }

    /// Its jumbo, as a program to be run plain.
    pub(crate) fn itself(&self) -> Self {
        Self {
            argv: vec![self.jumbo.clone().into()],
            ..self.clone()
        }
    }

    /// Runs it under a `jumbo run` that writes a report.
    pub(crate) fn reported(&self) -> (Ran, Report) {
        self.reported_with(&[])
    }

    /// [`Self::reported`], with more options.
    pub(crate) fn reported_with(&self, options: &[&str]) -> (Ran, Report) {
        let (running, report) = self.start_reported(options);
        let ran = running.wait();
        let report = report.read(&ran);
        (ran, report)
    }

    pub(crate) fn start_plain(&self) -> Running {
        self.start(&[], &[])
    }

    pub(crate) fn start_jumbo(&self, options: &[&str]) -> Running {
        self.start(&[self.jumbo.as_os_str(), "run".as_ref()], options)
    }

    pub(crate) fn start_reported(&self, options: &[&str]) -> (Running, ReportFile) {
        let file = ReportFile::new();
        let path = file.path();
        let mut all = vec!["--report=json", "--report-file", &path];
        all.extend(options);
        (self.start_jumbo(&all), file)
    }

    fn start(&self, launcher: &[&OsStr], options: &[&str]) -> Running {
        let more = std::env::var(MORE_OPTIONS).unwrap_or_default();
        let more = more
            .split_whitespace()
            .filter(|_| !launcher.is_empty())
            .map(OsStr::new);
        let options: Vec<&OsStr> = more.chain(options.iter().map(OsStr::new)).collect();
        let dashes = (!launcher.is_empty()).then_some(OsStr::new("--"));
        let mut words = (self.around.iter().map(OsString::as_os_str))
            .chain(launcher.iter().copied())
            .chain(options)
            .chain(dashes)
            .chain(self.argv.iter().map(OsString::as_os_str));
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .envs(self.env.iter().map(|(key, value)| (key, value)));
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        // A process group of its own, so that all of it can be killed when the bound is reached.
        command.process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running::spawn(command, &self.stdin, self.bound)
    }
}

/// Where a report will be, once the program has ended.
pub(crate) struct ReportFile {
    folder: tempfile::TempDir,
}

impl ReportFile {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = build::world_readable_folder();
        // The user who runs the program writes it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        Self { folder }
    }

    fn path(&self) -> String {
        self.folder
            .path()
            .join("report.json")
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// Reads it; `ran` is shown where there is none.
    pub(crate) fn read(&self, ran: &Ran) -> Report {
        match fs::read_to_string(self.path()) {
            Ok(text) => Report::parse(&text),
            Err(error) => panic!("no report: {error}\n{ran:?}"),
        }
    }
}

impl Ran {
    /// The exit status as a shell shows it in `$?`.
    pub(crate) fn shell_status(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap())
    }

    /// Panics, with what the program said, unless it exited with 0.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert!(self.status.success(), "{self:?}");
        self
    }

    /// The number after `name=` in the program's output.
    #[track_caller]
    pub(crate) fn number(&self, name: &str) -> u64 {
        let found = (self.stdout.split_whitespace())
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
        found.unwrap_or_else(|| panic!("no {name}= in {self:?}"))
    }
}

impl std::fmt::Debug for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            status,
            stdout,
            stderr,
        } = self;
        write!(
            f,
            "{status}\n--- stdout\n{}\n--- stderr\n{}",
            end_of(stdout),
            end_of(stderr)
        )
    }
}

/// The last lines of a long text.
fn end_of(text: &str) -> &str {
    let from = text.len().saturating_sub(4000);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at));
    &text[from.unwrap_or(0)..]
}

/// Runs the program plain, under a `jumbo run` that execs it, and under one that reports; output and
/// exit status must be the same. Returns the plain run and the report.
#[track_caller]
pub(crate) fn assert_same(program: &Program) -> (Ran, Report) {
    let plain = program.plain();
    assert_alike(&plain, &program.jumbo(), "jumbo run");
    let (reported, report) = program.reported();
    assert_alike(&plain, &reported, "jumbo run --report");
    (plain, report)
}

/// Panics with both unless output and status are the same.
#[track_caller]
pub(crate) fn assert_alike(plain: &Ran, jumbo: &Ran, how: &str) {
    let same = plain.stdout == jumbo.stdout
        && plain.stderr == jumbo.stderr
        && plain.shell_status() == jumbo.shell_status();
    assert!(same, "plain: {plain:?}\n\n{how}: {jumbo:?}");
}

fn primary_group(user: &str) -> String {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let line = users
        .lines()
        .find(|line| line.starts_with(&format!("{user}:")));
    let line = line.unwrap_or_else(|| panic!("no user {user} in /etc/passwd"));
    line.split(':').nth(3).unwrap().to_owned()
}
