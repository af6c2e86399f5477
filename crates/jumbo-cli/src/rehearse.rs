//! `jumbo rehearse`, for jumbo itself: makes the system calls that give memory back.
//!
//! `jumbo run` starts it where a seccomp filter is at work, to see whether it lives.

use std::process::ExitCode;

/// The subcommand.
pub(crate) const NAME: &str = "rehearse";

/// Make the system calls of gather
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main() -> anyhow::Result<ExitCode> {
    jumbo::gather::rehearse()?;
    Ok(ExitCode::SUCCESS)
}
