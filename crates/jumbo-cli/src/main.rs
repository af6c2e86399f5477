//! The `jumbo` command line: one file or folder per subcommand.
//!
//! stdout is data; messages go to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage. Others:
//! - `run`: those of the program, and 125, 126 and 127 of jumbo itself.
//! - `pool`, `thp`, `vmemmap`, `promote`, `files prime`: 3 when only a part of the request was done.
//! - `compare`: 3 when the output or exit status differed.
//! - `pool wait`, `wait`: 124 when the wait timed out.

#![cfg_attr(not(test), no_main)]

mod bench;
mod cdi;
mod compare;
mod compat;
mod doctor;
mod export;
mod files;
mod fleet;
mod kill;
mod knobs;
mod manual;
mod page;
mod plan;
mod planned;
mod pool;
mod promote;
mod rehearse;
mod run;
mod signal;
mod status;
mod text;
mod thp;
mod top;
mod trusted;
mod unit;
mod value;
mod view;
mod vmemmap;
mod wait;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Huge pages for the whole life of a program's memory.
#[derive(Debug, Parser)]
#[command(name = "jumbo", version, max_term_width = 80)]
#[command(after_help = "Examples:
  jumbo run -- ./program             # on huge pages, with a report
  jumbo compare -- ./program         # what that gains
  jumbo doctor                       # what to fix on this host

Exit status: 0 done; 1 failed; 2 wrong usage. Commands that have others name them.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Status(status::Args),
    Top(top::Args),
    Doctor(doctor::Args),
    Promote(promote::Args),
    Kill(kill::Args),
    Wait(wait::Args),
    Export(export::Args),
    Plan(plan::Args),
    Pool(pool::Args),
    Thp(thp::Args),
    Vmemmap(vmemmap::Args),
    Files(files::Args),
    Text(text::Args),
    Cdi(cdi::Args),
    Unit(unit::Args),
    Compare(compare::Args),
    Fleet(fleet::Args),
    Bench(bench::Args),
    #[command(hide = true)]
    Rehearse(rehearse::Args),
    #[command(hide = true)]
    Library(run::library::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// Parses the command line of `jumbo run` without the parser of all commands. `None` for other
/// commands, `--help` and errors: the full parser handles these.
///
/// Building the full parser takes longer than everything else before the exec of PROGRAM.
fn parse_run() -> Option<Command> {
    let mut arguments = std::env::args_os().skip(1);
    let is_run = arguments.next()? == "run";
    let args = is_run.then(|| run::Args::read(arguments.collect()))?;
    args.map(Command::Run)
}

/// Entry point that the C library calls, without Rust's runtime in between: see [`run::begin`].
#[cfg(not(test))]
#[expect(unsafe_code, reason = "the C library finds main by its name")]
#[unsafe(no_mangle)]
extern "C" fn main(_count: std::ffi::c_int, _arguments: *const *const std::ffi::c_char) -> i32 {
    // exit flushes stdout's buffer; a return would not.
    std::process::exit(start())
}

#[cfg(test)]
fn main() {
    start();
}

fn start() -> i32 {
    run::begin();
    let code = command();
    // std has no public conversion from ExitCode to a number.
    let number = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
    number.map_or(1, i32::from)
}

fn command() -> ExitCode {
    if let Some(code) = compat::main() {
        return code;
    }
    let parse = || Cli::try_parse().unwrap_or_else(|error| view::refuse(&error));
    let result = match parse_run().unwrap_or_else(|| parse().command) {
        Command::Run(args) => run::main(args),
        Command::Status(args) => status::main(args),
        Command::Top(args) => top::main(&args),
        Command::Doctor(args) => doctor::main(args),
        Command::Promote(args) => promote::main(args),
        Command::Kill(args) => kill::main(args),
        Command::Wait(args) => wait::main(&args),
        Command::Export(args) => export::main(&args),
        Command::Plan(args) => plan::main(&args),
        Command::Pool(args) => pool::main(args),
        Command::Thp(args) => thp::main(&args),
        Command::Vmemmap(args) => vmemmap::main(&args),
        Command::Files(args) => files::main(&args),
        Command::Text(args) => text::main(&args),
        Command::Cdi(args) => cdi::main(&args),
        Command::Unit(args) => unit::main(&args),
        Command::Compare(args) => compare::main(args),
        Command::Fleet(args) => fleet::main(&args),
        Command::Bench(args) => bench::main(args),
        Command::Rehearse(args) => rehearse::main(&args),
        Command::Library(args) => run::library::main(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
    };
    result.unwrap_or_else(|error| {
        // The reader of the output may close the pipe early (`jumbo status | head`): no failure.
        if view::is_broken_pipe(&error) {
            return ExitCode::SUCCESS;
        }
        view::tell(&view::in_words(&error));
        ExitCode::FAILURE
    })
}
