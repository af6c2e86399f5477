//! `jumbo run`.

use std::process::ExitCode;

/// Run a program with its memory on huge pages
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
