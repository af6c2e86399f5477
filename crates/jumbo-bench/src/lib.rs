//! The measurements behind `jumbo bench`: a module for each table, and what they share.
//!
//! A table is data: its sides, each a launch, a `task` and the claims on it, and its rows. The
//! engine is one for all tables:
//! - `group`: measures sides in turn, so that a drift of the machine falls on all of them, and makes
//!   rows of them.
//! - `task`: all work of a process that is measured. `work`: a fresh process for each sample. `launch`: how it is
//!   started, the one thing compared. [`worker`]: that process. `talk`: the lines between the two.
//! - `claim`: whether a sample is what was to be measured. `figures`: the figures that it found.
//! - [`table`]: rows that hold two sides of one run against each other; what `--json` prints. [`stats`]: what many
//!   samples come to. [`machine`]: where it was measured.
//! - [`interrupt`]: a signal that asks for the end. [`published`]: where published figures come from.
//! - `keeper`: knobs of the kernel, set for a sample and put back. `elf`: a worker with a segment more.
//! - [`memory`]: what a process has, when memory is free again, and that it is warm. `life`: memory taken and given
//!   back.
//!
//! - [`program`]: programs that are not ours, as they are: what `jumbo compare` does.
//!
//! The tables: [`heap`], [`free`], [`exit`], [`mod@pool`], [`text`], [`shmem`], [`vmemmap`], [`mod@fork`], [`latency`], [`programs`].
//!
//! Invariants: every table holds the baseline against itself as well (the A/A row), so that noise is seen for
//! what it is; and every sample says what memory it had, which is checked before the sample counts.

mod claim;
mod elf;
mod error;
pub mod exit;
mod figures;
pub mod fork;
pub mod free;
mod group;
pub mod heap;
#[expect(unsafe_code, reason = "calls sigaction")]
pub mod interrupt;
mod keeper;
pub mod latency;
mod launch;
#[expect(unsafe_code, reason = "calls fork by name, as a program does")]
mod life;
pub mod machine;
pub mod memory;
pub mod pool;
pub mod program;
pub mod programs;
pub mod published;
pub mod shmem;
pub mod stats;
pub mod table;
mod talk;
mod task;
pub mod text;
pub mod vmemmap;
mod work;
pub mod worker;

use std::num::NonZeroUsize;
use std::path::PathBuf;

pub use error::Error;
use indicatif::ProgressBar;

/// The settings of every table.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The `jumbo` executable: the launcher that is measured, and the program that it is measured on.
    pub jumbo: PathBuf,
    /// How many rounds are measured, after the warm-up.
    pub rounds: NonZeroUsize,
    /// Shows how far a table has come.
    pub progress: ProgressBar,
    /// Prints the progress line by line, a line a run, where the bar cannot be seen.
    pub line: Option<fn(&str)>,
}

impl Settings {
    /// Shows `message` beside the bar, or prints it.
    pub(crate) fn say(&self, message: String) {
        if let Some(line) = self.line {
            line(&message);
        }
        self.progress.set_message(message);
    }
}

/// Where files are made: on a disk, if there is one.
fn on_disk() -> PathBuf {
    let on_disk = || PathBuf::from("/var/tmp");
    std::env::var_os("TMPDIR").map_or_else(on_disk, PathBuf::from)
}

#[cfg(test)]
impl Settings {
    fn for_tests() -> Self {
        Self {
            jumbo: "/j".into(),
            rounds: NonZeroUsize::MIN.saturating_add(1),
            progress: ProgressBar::hidden(),
            line: None,
        }
    }
}
