//! `jumbo doctor`.

use std::process::ExitCode;

/// Find what keeps memory off huge pages on this host, and say how to mend it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
