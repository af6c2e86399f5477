//! [`Error`]: reasons why a table has no figures.

use std::io;
use std::process::ExitStatus;

use jumbo::units::Bytes;
use jumbo_host::kernel::FileError;
use rustix::io::Errno;

pub(crate) const QUIET_HINT: &str = "measure while no other program allocates memory";

pub(crate) const SIZE_HINT: &str = "measure less, with --size";

/// Reason why a table has no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot start.
    #[error("cannot start `{0}`: {1}")]
    Start(String, io::Error),
    /// The command failed; the last line of its stderr.
    #[error("`{0}` failed with {1}: {2}")]
    Failed(String, ExitStatus, String),
    /// The command printed something other than a sample.
    #[error("`{0}` printed no sample: {1}")]
    Answer(String, serde_json::Error),
    /// The sample does not match a claim of its side: what was found, and a hint.
    #[error("{0}")]
    Claim(String, &'static str),
    /// The measurement would exhaust the memory of the host: needed and available memory.
    #[error("the measurement needs {0} of memory and {1} is available")]
    Memory(Bytes, Bytes),
    /// Memory cannot be mapped, touched or unmapped.
    #[error("cannot map, touch or unmap memory: {0}")]
    Map(io::Error),
    /// Memory that was freed is taken by another program, or was never given back.
    #[error("{0} of the freed memory did not become free")]
    NotBack(Bytes),
    /// Communication with a measured process failed, or waiting for it.
    #[error("cannot communicate with the measured process: {0}")]
    Pipe(#[from] io::Error),
    /// The allocator under test is out of memory.
    #[error("malloc of {0} failed")]
    Malloc(Bytes),
    /// A measured program has a wrong result, such as lost memory.
    #[error("the measured program has a wrong result: {0}")]
    Corrupt(String),
    /// The program under test cannot be built in this folder.
    #[error("cannot build the measured program in {0}: {1}")]
    Program(String, io::Error),
    /// A server was not ready in time: seconds, probe, and last output.
    #[error("the server is not ready after {0} s: `{1}`: {2}")]
    NotReady(u64, String, String),
    /// The command, which a server was to serve, did not end within so many seconds.
    #[error("`{0}` did not end within {1} s")]
    Endless(String, u64),
    /// The load was to print a number of milliseconds on its last line, and printed this.
    #[error("`{0}` printed no figure: its last line is {1:?}")]
    NoFigure(String, String),
    /// Unknown or missing way to start a program.
    #[error("{0}")]
    Way(String),
    /// A signal ended the measurement.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// A pool is out of pages.
    #[error(transparent)]
    Pool(#[from] jumbo::pool::Error),
    /// A pool cannot be created.
    #[error("cannot create a pool: {0}")]
    Setup(#[from] jumbo::pool::SetupError),
    /// The text of a program cannot be read into the page cache.
    #[error(transparent)]
    Prime(#[from] jumbo_host::segments::Error),
    /// Kernel knobs cannot be set or restored.
    #[error("{0}: {1}")]
    Kernel(&'static str, String),
    /// A table of page descriptors refused a request.
    #[error(transparent)]
    Vmemmap(#[from] jumbo::vmemmap::Error),
    /// A kernel file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Pipe(errno.into())
    }
}

impl Error {
    /// A sample that does not match its claims; [`Error::of_side`] adds the name of the side.
    pub(crate) fn claim(found: impl Into<String>, hint: &'static str) -> Self {
        Self::Claim(found.into(), hint)
    }

    /// Adds the name of the side to the error.
    pub(crate) fn of_side(self, side: &str) -> Self {
        match self {
            Self::Claim(found, hint) => Self::Claim(
                format!("side `{side}` does not meet its claim: {found}"),
                hint,
            ),
            other => other,
        }
    }

    /// Reports whether another program most likely disturbed the sample: the next one may succeed.
    pub(crate) fn is_disturbed(&self) -> bool {
        matches!(self, Self::Claim(..) | Self::NotBack(_))
    }

    /// Reports whether the host lacks the resources for a row at the moment.
    pub(crate) fn is_of_host(&self) -> bool {
        self.is_disturbed() || matches!(self, Self::Memory(..))
    }

    /// Reports whether the host lacks a feature, or the user the right to use it.
    pub(crate) fn is_absence(&self) -> bool {
        self.is_of_host() || matches!(self, Self::Kernel(..) | Self::Program(..) | Self::Setup(_))
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Claim(_, hint) => Some(hint),
            Self::Start(_, error) if error.kind() == io::ErrorKind::WouldBlock => {
                Some("raise the limit of processes (`ulimit -u`), or pids.max of the control group")
            }
            Self::Memory(..) => Some(SIZE_HINT),
            Self::NotBack(_) => Some(QUIET_HINT),
            Self::NotReady(..) => {
                Some("--ready CMD is a command that succeeds once the server is up")
            }
            Self::Program(..) => Some("let TMPDIR name a folder on a disk with room for it"),
            _ => None,
        }
    }
}
