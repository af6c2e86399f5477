//! The measurements behind `jumbo bench`: each table a module, each round alternating.
//!
//! What the tables share:
//! - [`rounds`]: runs the variants in turn, so that a drift of the machine falls on all of them.
//! - [`stats`]: what many samples come to.
//! - [`table`]: rows that hold two sides of one run against each other; what `--json` prints.
//! - [`machine`]: where it was measured.
//! - [`child`]: a fresh process for each sample, started the same way but for the one thing compared.
//!
//! - [`memory`]: what a process has, and when memory is free again. `claim`: whether that is what was to be measured.
//!
//! The tables: [`heap`], [`free`], [`exit`], [`mod@pool`].
//!
//! Invariants: every table holds the baseline against itself as well (the A/A row), so that noise is seen for
//! what it is; and every sample says what memory it had, which is checked before the sample counts.

pub mod child;
mod claim;
mod error;
pub mod exit;
pub mod free;
pub mod heap;
pub mod machine;
pub mod memory;
pub mod pool;
pub mod rounds;
pub mod stats;
pub mod table;

use std::num::NonZeroUsize;
use std::path::PathBuf;

pub use error::Error;

/// What every table needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The `jumbo` executable: the launcher that is measured, and the program that it is measured on.
    pub jumbo: PathBuf,
    /// How many rounds are measured, after the warm-up.
    pub rounds: NonZeroUsize,
}

/// Who is told how far a table has come.
pub trait Progress {
    /// A table of so many steps begins.
    fn begin(&self, steps: usize);
    /// The next step begins: what it measures.
    fn step(&self, what: &str);
}
