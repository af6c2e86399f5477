//! `jumbo bench`.

use std::process::ExitCode;

/// Measure jumbo against its baselines, side by side in one run
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
