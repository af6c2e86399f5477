//! `jumbo rehearse`, for jumbo itself: makes the system calls of a program's parent.
//!
//! `jumbo run` starts it where a seccomp filter is at work, to see whether it lives.

use std::process::ExitCode;

/// The subcommand.
pub(crate) const NAME: &str = "rehearse";

/// Make the system calls of `jumbo run --report`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Without it this does nothing
    #[arg(long)]
    report: bool,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    match args.report {
        true => crate::run::rehearse(),
        false => Ok(ExitCode::SUCCESS),
    }
}
