//! `jumbo rehearse`, for jumbo itself: makes the system calls that give memory back, or those of a program's parent.
//!
//! `jumbo run` starts it where a seccomp filter is at work, to see whether it lives.

use std::process::ExitCode;

use clap::ValueEnum;

/// The subcommand.
pub(crate) const NAME: &str = "rehearse";

/// Make system calls of jumbo
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which; without any this does nothing
    #[arg(value_enum)]
    calls: Vec<Calls>,
}

/// What is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Calls {
    /// Those that give memory back
    Free,
    /// Those of `jumbo run --report`
    Report,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let asked = |calls| args.calls.contains(&calls);
    if asked(Calls::Free) {
        jumbo_inside::gather::rehearse()?;
    }
    if asked(Calls::Report) {
        return crate::run::rehearse();
    }
    Ok(ExitCode::SUCCESS)
}
