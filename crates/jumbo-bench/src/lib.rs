//! The measurements behind `jumbo bench`: a module for each table, and what they share.
//!
//! A table consists of sides (each a launch, a `task` and claims) and of rows that compare two
//! sides. All tables share one engine:
//! - `group`: measures the sides in turn, so that drift of the machine affects all of them alike,
//!   and makes the rows.
//! - `task`: the work of a measured process. `work`: a fresh process for each sample. `launch`: the
//!   way it starts, the only difference between sides. [`worker`]: the process itself.
//!   `json_child`: the JSON lines between the two.
//! - `claim`: checks that a sample is what its side claims. `figures`: the figures of a sample.
//! - [`table`]: rows that compare two sides of one run, as `--json` prints them. [`stats`]: medians
//!   and spreads. [`machine`]: the machine that was measured.
//! - [`interrupt`]: signals that end a measurement. [`published`]: sources of published figures.
//! - `keeper`: kernel knobs, set for a sample and restored. `elf`: a worker with one more segment.
//! - [`memory`]: memory of a process, free memory of the host, warm-up. `life`: memory allocated
//!   and freed.
//! - [`program`]: unmodified programs, as `jumbo compare` runs them.
//!
//! The tables: [`heap`], [`free`], [`exit`], [`mod@pool`], [`text`], [`files`], [`mod@populate`], [`shmem`], [`vmemmap`],
//! [`mod@fork`], [`latency`], [`programs`].
//!
//! Invariants: every table also compares the baseline with itself (the A/A row), which shows the
//! noise. Every sample reports its memory, which is checked before the sample counts.

mod claim;
mod elf;
mod error;
pub mod exit;
mod figures;
#[expect(unsafe_code, reason = "maps a file, and reads the mapping")]
pub mod files;
pub mod fork;
pub mod free;
mod group;
pub mod heap;
#[expect(unsafe_code, reason = "calls sigaction")]
pub mod interrupt;
mod json_child;
mod keeper;
pub mod latency;
mod launch;
#[expect(unsafe_code, reason = "calls fork by name, as a program does")]
mod life;
pub mod machine;
pub mod memory;
pub mod pool;
pub mod populate;
pub mod program;
pub mod programs;
pub mod published;
pub mod shmem;
pub mod stats;
pub mod table;
mod task;
pub mod text;
pub mod vmemmap;
mod work;
pub mod worker;

use std::num::NonZeroUsize;
use std::path::PathBuf;

pub use error::Error;
use indicatif::ProgressBar;

/// Settings of every table.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The `jumbo` executable: the launcher under test, and the program that it starts.
    pub jumbo: PathBuf,
    /// Number of measured rounds, after the warm-up.
    pub rounds: NonZeroUsize,
    /// Progress bar of the table.
    pub progress: ProgressBar,
    /// Prints one line per run where the bar is not visible.
    pub line: Option<fn(&str)>,
}

impl Settings {
    /// Shows `message` beside the bar, or prints it.
    pub(crate) fn show_progress(&self, message: String) {
        if let Some(line) = self.line {
            line(&message);
        }
        self.progress.set_message(message);
    }
}

/// Folder for temporary files, on a disk if there is one.
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
