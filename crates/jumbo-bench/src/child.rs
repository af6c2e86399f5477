//! Fresh processes, one a sample: [`Launch`] says how one is started, [`worker`] what, [`answer`] runs it.
//!
//! A process that has freed memory is not the process that allocated it: its allocator keeps some, its address
//! space is laid out differently. So no two samples ever come from one process.
//!
//! A worker asks the kernel to be killed with its parent ([`die_with_parent`]), so an interrupted measurement
//! leaves no gigabytes behind.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use jumbo::policy::{FreeMode, ReaperMode};
use jumbo::units::Bytes;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::de::DeserializeOwned;

use crate::Error;

/// How a program is started: the one thing in which the sides of a comparison differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// As it is.
    Plain,
    /// With glibc's own switch for huge pages.
    Tunable,
    /// With `jumbo run`, with these options.
    Jumbo(Options),
}

/// Options of `jumbo run`; what is `None` or false is not typed, and has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `--free`.
    pub free: Option<FreeMode>,
    /// `--free-workers`.
    pub free_workers: Option<u32>,
    /// `--reaper`.
    pub reaper: Option<ReaperMode>,
    /// `--supervise`: jumbo stays the program's parent.
    pub supervise: bool,
    /// `--heap=mimalloc`.
    pub mimalloc: bool,
    /// `--pool`, which keeps its pages when the program has threads.
    pub pool: Option<Bytes>,
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

impl Options {
    /// None of them.
    pub const NONE: Self = Self {
        free: None,
        free_workers: None,
        reaper: None,
        supervise: false,
        mimalloc: false,
        pool: None,
    };

    /// As they are typed.
    fn words(self) -> Vec<String> {
        let free = self.free.map(|mode| format!("--free={}", mode.name()));
        let workers = self.free_workers.map(|n| format!("--free-workers={n}"));
        let reaper = self.reaper.map(|mode| format!("--reaper={}", mode.name()));
        let supervise = self.supervise.then(|| "--supervise".to_owned());
        let heap = self.mimalloc.then(|| "--heap=mimalloc".to_owned());
        let pool = self
            .pool
            .map(|size| format!("--pool={}M,nofork", size.0 >> 20));
        let all = [free, workers, reaper, supervise, heap, pool];
        all.into_iter().flatten().collect()
    }
}

impl Launch {
    /// `jumbo run` as most people type it.
    pub const JUMBO: Self = Self::Jumbo(Options::NONE);

    /// The name of this side in a table.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::Plain => "plain".into(),
            Self::Tunable => "hugetlb=1".into(),
            Self::Jumbo(options) => {
                let words = std::iter::once("jumbo run".to_owned()).chain(options.words());
                words.collect::<Vec<_>>().join(" ").into()
            }
        }
    }

    /// The command that starts `program` this way, with nothing on its stdin.
    pub fn command(self, jumbo: &Path, program: &OsStr) -> Command {
        let mut command = match self {
            Self::Plain | Self::Tunable => Command::new(program),
            Self::Jumbo(options) => {
                let mut command = Command::new(jumbo);
                command.args(["run", "--report=none"]).args(options.words());
                command.arg("--").arg(program);
                command
            }
        };
        for variable in NEUTRAL {
            command.env_remove(variable);
        }
        if self == Self::Tunable {
            command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        }
        command.stdin(Stdio::null());
        command
    }
}

/// The words after `jumbo` that start a worker: the program that is measured.
const WORKER: [&str; 2] = ["bench", "worker"];

/// The command that starts a worker this way; `words` say which, and what it is to do.
pub fn worker(launch: Launch, jumbo: &Path, words: &[&str]) -> Command {
    let mut command = launch.command(jumbo, jumbo.as_os_str());
    command.args(WORKER).args(words);
    command
}

/// Runs `command` to its end and parses the JSON that it prints.
///
/// # Errors
/// [`Error::Start`], [`Error::Failed`], [`Error::Answer`].
pub fn answer<T: DeserializeOwned>(command: &mut Command) -> Result<T, Error> {
    let stdout = run(command)?;
    serde_json::from_slice(&stdout).map_err(|source| Error::Answer {
        command: line(command),
        source,
    })
}

/// Runs `command` to its end and returns what it prints.
///
/// # Errors
/// [`Error::Start`], [`Error::Failed`].
pub fn run(command: &mut Command) -> Result<Vec<u8>, Error> {
    let output = command.output().map_err(|source| Error::Start {
        command: line(command),
        source,
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(Error::Failed {
        command: line(command),
        status: output.status,
        stderr: stderr.lines().last().unwrap_or("no message").to_owned(),
    })
}

/// Has the kernel kill this process when its parent is gone.
pub fn die_with_parent() {
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

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_sample_is_parsed() {
        let sample: Vec<u64> = answer(&mut shell("echo '[1, 2]'")).unwrap();
        assert_eq!(sample, [1, 2]);
    }

    #[test]
    fn failures_say_what_ran_and_why() {
        let cases = [
            (
                "echo out of memory >&2; exit 3",
                "exit status: 3: out of memory",
            ),
            ("kill -9 $$", "signal: 9 (SIGKILL): no message"),
            ("echo nonsense", "printed no sample"),
        ];
        for (script, message) in cases {
            let error = answer::<Vec<u64>>(&mut shell(script))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(message) && error.contains("sh -c"),
                "{error}"
            );
        }
        let error = answer::<u64>(&mut Command::new("/nonexistent")).unwrap_err();
        assert!(error.to_string().starts_with("cannot start `/nonexistent`"));
    }

    #[test]
    fn options_are_typed_where_they_are_set() {
        assert_eq!(Launch::JUMBO.name(), "jumbo run");
        let options = Options {
            free: Some(FreeMode::Background),
            free_workers: Some(4),
            reaper: Some(ReaperMode::Off),
            supervise: true,
            mimalloc: true,
            pool: Some(Bytes(64 << 20)),
        };
        let command = Launch::Jumbo(options).command(Path::new("/j"), OsStr::new("/p"));
        assert_eq!(
            line(&command),
            "/j run --report=none --free=background --free-workers=4 --reaper=off \
             --supervise --heap=mimalloc --pool=64M,nofork -- /p"
        );
    }

    #[test]
    fn the_sides_differ_in_nothing_but_the_launch() {
        let jumbo = Path::new("/j");
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
