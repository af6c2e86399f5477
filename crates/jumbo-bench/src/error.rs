//! [`Error`]: why a table has no figures.

use std::io;
use std::process::ExitStatus;

use jumbo::units::Bytes;
use jumbo_host::kernel::FileError;
use rustix::io::Errno;

/// The hint where memory that was freed is not free.
pub(crate) const QUIET: &str = "measure on a machine on which nothing else takes memory";

/// The hint where memory does not suffice.
pub(crate) const LESS: &str = "measure less, with --size";

/// Why a table has no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This command cannot be started.
    #[error("cannot start `{0}`: {1}")]
    Start(String, io::Error),
    /// This command ended with an error; the last line that it wrote to stderr.
    #[error("`{0}` failed with {1}: {2}")]
    Failed(String, ExitStatus, String),
    /// This command printed something else than a sample.
    #[error("`{0}` printed no sample: {1}")]
    Answer(String, serde_json::Error),
    /// A run is not what it was to be, so comparing it would prove nothing: what it had and should have had, and what to
    /// do.
    #[error("the run {0}")]
    Claim(String, &'static str),
    /// The measurement would drive the machine out of memory: what it needs, and what is available.
    #[error("the measurement needs {0} of memory and {1} is available")]
    Memory(Bytes, Bytes),
    /// Memory cannot be mapped, touched or unmapped.
    #[error("cannot map, touch or unmap memory: {0}")]
    Map(io::Error),
    /// Memory that was freed is taken by another program, or was never given back.
    #[error("{0} of the memory that was freed did not become free")]
    NotBack(Bytes),
    /// A worker, or the process that measures it, cannot be talked to, waited for or ended.
    #[error("cannot direct the process that is measured: {0}")]
    Pipe(#[from] io::Error),
    /// The allocator under test has no memory.
    #[error("malloc of {0} failed")]
    Malloc(Bytes),
    /// The allocator under test did not keep what was stored in its memory.
    #[error("memory does not hold what was stored in it: {0}")]
    Corrupt(String),
    /// The program that is measured cannot be made in this folder.
    #[error("cannot make the program that is measured in {0}: {1}")]
    Program(String, io::Error),
    /// A server was not ready in time: what asked it, and the last that it said.
    #[error("the server is not ready after {0} s: `{1}`: {2}")]
    NotReady(u64, String, String),
    /// This command, which a server was to serve, did not end within so many seconds.
    #[error("`{0}` did not end: given up after {1} s")]
    Endless(String, u64),
    /// This load was to say a number of milliseconds on its last line, and said this.
    #[error("`{0}` says no figure: its last line is {1:?}")]
    NoFigure(String, String),
    /// There is no such way to start a program.
    #[error("{0}")]
    Way(String),
    /// This signal asked for the end.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// A pool has no page.
    #[error(transparent)]
    Pool(#[from] jumbo::pool::Error),
    /// A pool cannot be made.
    #[error("cannot make a pool: {0}")]
    Setup(#[from] jumbo::pool::SetupError),
    /// The text of a program cannot be brought into the page cache.
    #[error(transparent)]
    Prime(#[from] jumbo_host::segments::Error),
    /// These knobs of the kernel are not as they were set, or not as they were before.
    #[error("{0}: {1}")]
    Kernel(&'static str, String),
    /// A table of page descriptors refused what it was asked.
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
    /// A run is not what it was to be; [`Error::of_side`] adds which.
    pub(crate) fn claim(found: impl Into<String>, hint: &'static str) -> Self {
        Self::Claim(found.into(), hint)
    }

    /// The same error, with the name of the side on which it came.
    pub(crate) fn of_side(self, side: &str) -> Self {
        match self {
            Self::Claim(found, hint) => Self::Claim(
                format!("named `{side}` is not what its name says: {found}"),
                hint,
            ),
            other => other,
        }
    }

    /// True where a sample is not what it was to be, most likely because another program took memory or CPUs
    /// meanwhile: the next one may be.
    pub(crate) fn is_disturbed(&self) -> bool {
        matches!(self, Self::Claim(..) | Self::NotBack(_))
    }

    /// True where this host, as it is now, has not what a row needs.
    pub(crate) fn is_of_host(&self) -> bool {
        self.is_disturbed() || matches!(self, Self::Memory(..))
    }

    /// True where this host has not what rows need, or does not let this user have it.
    pub(crate) fn is_absence(&self) -> bool {
        self.is_of_host() || matches!(self, Self::Kernel(..) | Self::Program(..) | Self::Setup(_))
    }

    /// The advice on what to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Claim(_, hint) => Some(hint),
            Self::Memory(..) => Some(LESS),
            Self::NotBack(_) => Some(QUIET),
            Self::NotReady(..) => {
                Some("--ready CMD is a command that succeeds once the server is up")
            }
            Self::Program(..) => Some("let TMPDIR name a folder on a disk with room for it"),
            _ => None,
        }
    }
}
