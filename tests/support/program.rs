//! A command that can run plain and under jumbo, and the comparison of both runs.

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

/// Variable with further options of every `jumbo run`, such as `--heap=glibc`, to test another
/// mode.
const MORE_OPTIONS: &str = "JUMBO_TEST_OPTIONS";
/// Default timeout of one run.
const RUN_TIMEOUT: Duration = Duration::from_secs(180);

/// A command that can run any number of times, each time with a timeout.
#[derive(Clone)]
pub(crate) struct Program {
    argv: Vec<OsString>,
    around: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    folder: Option<PathBuf>,
    stdin: Vec<u8>,
    timeout: Duration,
    jumbo: PathBuf,
    /// Keeps the copy that [`Self::jumbo`] points at.
    _installed: Option<Arc<tempfile::TempDir>>,
}

/// Result of a run.
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
            timeout: RUN_TIMEOUT,
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

    /// Adds the time that the program works to the timeout.
    pub(crate) fn working_for(mut self, time: Duration) -> Self {
        self.timeout = RUN_TIMEOUT + time;
        self
    }

    /// Puts a command such as `prlimit --as=N` around the program, and around jumbo, if used.
    pub(crate) fn around<A: AsRef<OsStr>>(mut self, argv: impl IntoIterator<Item = A>) -> Self {
        self.around
            .extend(argv.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Runs the program as a user without privilege: `nobody` if the tests run as root.
    pub(crate) fn unprivileged(self) -> Self {
        self.installed().user("nobody")
    }

    /// Copies jumbo to a folder that every user can reach: the build folder may be closed.
    pub(crate) fn installed(mut self) -> Self {
        let folder = build::world_readable_folder();
        // Another process writes it: a child of another test could inherit our descriptor open for
        // writing, and execve would fail (ETXTBSY).
        let copied = Command::new("cp")
            .args([build::jumbo(), &build::preload(), folder.path()])
            .status();
        assert!(copied.unwrap().success());
        self.jumbo = folder.path().join("jumbo");
        self._installed = Some(Arc::new(folder));
        self
    }

    /// Runs the program as another user if the tests run as root.
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

    /// Runs the program without jumbo.
    pub(crate) fn plain(&self) -> Ran {
        self.start(&[], &[]).wait()
    }

    /// Runs the program under `jumbo run`, which replaces itself with it.
    pub(crate) fn jumbo(&self) -> Ran {
        self.jumbo_with(&[])
    }

    /// Runs the program under `jumbo run OPTIONS`.
    pub(crate) fn jumbo_with(&self, options: &[&str]) -> Ran {
        self.start_jumbo(options).wait()
    }

    /// Runs another subcommand of jumbo in the same environment.
    pub(crate) fn jumbo_itself(&self, arguments: &[&str]) -> Ran {
        self.itself().args(arguments).plain()
    }

    /// Returns jumbo itself as a program to run plain.
    pub(crate) fn itself(&self) -> Self {
        Self {
            argv: vec![self.jumbo.clone().into()],
            ..self.clone()
        }
    }

    /// Runs the program under a `jumbo run` that writes a report.
    pub(crate) fn reported(&self) -> (Ran, Report) {
        self.reported_with(&[])
    }

    /// Like [`Self::reported`], with more options.
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
        // Whether base pages take less time depends on the host and the moment.
        let is_measured = options
            .iter()
            .any(|option| option.starts_with("--first-touch"));
        let first_touch = (!is_measured).then_some("--first-touch=huge");
        let options: Vec<_> = first_touch
            .into_iter()
            .chain(options.iter().copied())
            .collect();
        self.start(&[self.jumbo.as_os_str(), "run".as_ref()], &options)
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
        // A process group of its own, so that a timeout can kill all of it.
        command.process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running::spawn(command, &self.stdin, self.timeout)
    }
}

/// Path of a future report, written when the program ends.
pub(crate) struct ReportFile {
    folder: tempfile::TempDir,
}

impl ReportFile {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = build::world_readable_folder();
        // The user of the program writes it.
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

    /// Reads the report; panics with `ran` if there is none.
    pub(crate) fn read(&self, ran: &Ran) -> Report {
        match fs::read_to_string(self.path()) {
            Ok(text) => Report::parse(&text),
            Err(error) => panic!("no report: {error}\n{ran:?}"),
        }
    }
}

impl Ran {
    /// Returns the exit status as a shell shows it in `$?`.
    pub(crate) fn shell_status(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap())
    }

    /// Panics with the output unless the status is 0.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert!(self.status.success(), "{self:?}");
        self
    }

    /// Returns the number after `name=` in the program's output.
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

/// Returns the last lines of a long text.
fn end_of(text: &str) -> &str {
    let from = text.len().saturating_sub(4000);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at));
    &text[from.unwrap_or(0)..]
}

/// Runs the program plain, under a `jumbo run` that execs it, and under one that reports. Checks
/// that output and exit status are the same; returns the plain run and the report.
#[track_caller]
pub(crate) fn assert_same(program: &Program) -> (Ran, Report) {
    let plain = program.plain();
    assert_alike(&plain, &program.jumbo(), "jumbo run");
    let (reported, report) = program.reported();
    assert_alike(&plain, &reported, "jumbo run --report");
    (plain, report)
}

/// Panics with both runs unless output and status are the same.
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
