//! `jumbo status`.

use std::process::ExitCode;

/// Show what is huge on this host or in a process, what is not, and why
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
