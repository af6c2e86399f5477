//! `jumbo rehearse`, internal: makes the system calls of `jumbo run --report`.
//!
//! `jumbo run` starts it under a seccomp filter, to test whether the filter kills it.

use std::process::ExitCode;

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
