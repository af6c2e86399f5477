//! Fresh processes, one a sample: [`Launch`] says how one is started, [`ask`] has it do a task, and a [`Talk`] goes on for
//! longer.
//!
//! A process that has freed memory is not the process that allocated it: its allocator keeps some, its address
//! space is laid out differently. So no two samples ever come from one process.
//!
//! A worker asks the kernel to be killed with its parent ([`die_with_parent`]), so an interrupted measurement
//! leaves no gigabytes behind.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::claim::{self, Claim};
use crate::program::Peer;
use crate::worker::{Figures, Task};
use crate::{Error, Settings};

/// How a program is started: the one thing in which the sides of a comparison differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    /// As it is.
    Plain,
    /// With glibc's own switch for huge pages.
    Tunable,
    /// With `jumbo run`, with these options as they are typed.
    Jumbo(String),
    /// With another allocator, as LD_PRELOAD brings it in.
    Preload(Peer),
}

/// What a user may have set that changes how `malloc` behaves, and would change every side at once.
const NEUTRAL: [&str; 9] = [
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "JUMBO_ORDERS",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
];

impl Launch {
    /// `jumbo run` as most people type it.
    pub(crate) const JUMBO: Self = Self::Jumbo(String::new());

    /// The name of this side in a table.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Tunable => "hugetlb=1".to_owned(),
            Self::Preload(peer) => peer.name.to_owned(),
            Self::Jumbo(options) => format!("jumbo run {options}").trim_end().to_owned(),
        }
    }

    /// The command that starts `program` this way, with nothing else that changes how `malloc` behaves.
    pub(crate) fn command(&self, jumbo: &Path, program: &OsStr) -> Command {
        self.command_without(&NEUTRAL, jumbo, program)
    }

    /// The same without those `variables` only: what else is set belongs to the program.
    pub(crate) fn command_without(
        &self,
        variables: &[&str],
        jumbo: &Path,
        program: &OsStr,
    ) -> Command {
        let mut command = Command::new(program);
        if let Self::Jumbo(options) = self {
            command = Command::new(jumbo);
            command.arg("run");
            if !options.contains("--report") && !options.contains("--quiet") {
                command.arg("--report=none");
            }
            command
                .args(options.split_whitespace())
                .arg("--")
                .arg(program);
        }
        for variable in variables {
            command.env_remove(variable);
        }
        match self {
            Self::Plain | Self::Jumbo(_) => {}
            Self::Tunable => {
                command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
            }
            Self::Preload(peer) => {
                command
                    .env("LD_PRELOAD", &peer.library)
                    .envs(peer.set.iter().copied());
            }
        }
        command
    }
}

/// The command that starts a worker this way: the `jumbo` executable once more.
pub(crate) fn worker(launch: &Launch, settings: &Settings, task: &Task) -> Command {
    worker_in(settings.jumbo.as_os_str(), launch, settings, task)
}

/// The same in `program`, a copy of that executable.
pub(crate) fn worker_in(
    program: &OsStr,
    launch: &Launch,
    settings: &Settings,
    task: &Task,
) -> Command {
    let mut command = launch.command(&settings.jumbo, program);
    let task = serde_json::to_string(task).unwrap_or_default();
    command.args(["bench", "worker", &task]);
    command
}

/// Has a worker do `task`, and returns the figures of a sample of which the claims hold.
pub(crate) fn ask(
    settings: &Settings,
    (launch, task): &(Launch, Task),
    claims: &[Claim],
) -> Result<Figures, Error> {
    ask_in(settings.jumbo.as_os_str(), settings, (launch, task), claims)
}

/// The same in `program`, a copy of the `jumbo` executable.
pub(crate) fn ask_in(
    program: &OsStr,
    settings: &Settings,
    (launch, task): (&Launch, &Task),
    claims: &[Claim],
) -> Result<Figures, Error> {
    let command = worker_in(program, launch, settings, task);
    let mut worker = Talk::start(command, Stdio::piped())?;
    let figures: Figures = worker.hear()?;
    worker.end()?;
    claim::check(claims, launch, &figures)?;
    Ok(figures)
}

/// A process that hears and says lines of JSON.
pub(crate) struct Talk {
    pub(crate) child: Child,
    /// What was typed to start it.
    pub(crate) command: String,
    from: Option<BufReader<ChildStdout>>,
}

impl Talk {
    /// Starts it; the last line on its standard error is in the error where it fails, if that is a pipe.
    pub(crate) fn start(mut command: Command, stderr: Stdio) -> Result<Self, Error> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let line = line(&command);
        let started = command.stderr(stderr).spawn();
        let mut child = started.map_err(|error| Error::Start(line.clone(), error))?;
        Ok(Self {
            from: child.stdout.take().map(BufReader::new),
            child,
            command: line,
        })
    }

    /// Says something to it.
    pub(crate) fn say(&mut self, what: &impl Serialize) -> Result<(), Error> {
        let text = serde_json::to_string(what).map_err(io::Error::from)?;
        let to = self.child.stdin.as_mut();
        Ok(to.map_or(Ok(()), |to| writeln!(to, "{text}"))?)
    }

    /// What it says next; [`Error::Failed`] where it has ended instead.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        let mut text = String::new();
        let read = self.from.as_mut().map(|from| from.read_line(&mut text));
        if read.unwrap_or(Ok(0))? == 0 {
            let status = self.child.wait()?;
            return Err(self.failed(status));
        }
        serde_json::from_str(&text).map_err(|error| Error::Answer(self.command.clone(), error))
    }

    /// Waits for its end, having nothing more to say: its input ends.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        match self.child.wait()? {
            status if status.success() => Ok(()),
            status => Err(self.failed(status)),
        }
    }

    /// That it ended in another way than it was to, with the last that it said.
    pub(crate) fn failed(&mut self, status: ExitStatus) -> Error {
        let mut said = Vec::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().last().unwrap_or("no message").to_owned();
        Error::Failed(self.command.clone(), status, last)
    }
}

impl Drop for Talk {
    /// A process whose input ends ends by itself, and says itself what failed.
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Has the kernel kill this process when its parent is gone.
pub(crate) fn die_with_parent() {
    // Where it is refused the worker still ends by itself, a moment later.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

/// The command as a user would type it.
pub(crate) fn line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(program: &str, script: &str) -> Result<Vec<u64>, String> {
        let mut command = Command::new(program);
        command.args(["-c", script]);
        let talk = Talk::start(command, Stdio::piped());
        talk.and_then(|mut talk| talk.hear())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_said_is_parsed_and_failures_say_what_ran_and_why() {
        assert_eq!(answer("sh", "echo '[1, 2]'"), Ok(vec![1, 2]));
        for (script, message) in [
            (
                "echo out of memory >&2; exit 3",
                "exit status: 3: out of memory",
            ),
            ("kill -9 $$", "signal: 9 (SIGKILL): no message"),
            ("echo nonsense", "printed no sample"),
        ] {
            let error = answer("sh", script).unwrap_err();
            assert!(
                error.contains(message) && error.contains("sh -c"),
                "{error}"
            );
        }
        let error = answer("/nonexistent", "").unwrap_err();
        assert!(error.starts_with("cannot start `/nonexistent"), "{error}");
    }

    #[test]
    fn the_sides_differ_in_nothing_but_the_launch() {
        let jumbo = Path::new("/j");
        let options = Launch::Jumbo("--heap=glibc --pool=64M".to_owned());
        let typed = line(&options.command(jumbo, OsStr::new("/p")));
        assert_eq!(typed, "/j run --report=none --heap=glibc --pool=64M -- /p");
        assert_eq!(options.name(), "jumbo run --heap=glibc --pool=64M");
        assert_eq!(Launch::JUMBO.name(), "jumbo run");
        for launch in [Launch::Plain, Launch::Tunable, Launch::JUMBO] {
            let command = launch.command(jumbo, OsStr::new("/p"));
            assert!(line(&command).ends_with("/p"));
            let set: Vec<_> = command
                .get_envs()
                .filter(|(_, value)| value.is_some())
                .collect();
            assert_eq!(set.len(), usize::from(launch == Launch::Tunable));
        }
    }
}
