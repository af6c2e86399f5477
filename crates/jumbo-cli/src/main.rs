//! The `jumbo` command: glue between the library and its users, one file a subcommand.
//!
//! stdout is data, stderr is talk. Exit codes: 0 done, 1 failed, 2 wrong usage; `run` has those of
//! the program it runs, and 125, 126 and 127 of its own; `pool`, `thp`, `vmemmap`, `promote` and `text prime`
//! have 3 for a part of what was asked; `compare` has 3 for a program that did something else;
//! `pool wait` and `wait` have 124 for a wait in vain.

#![cfg_attr(not(test), no_main)]

mod bench;
mod cdi;
mod compare;
mod doctor;
mod export;
mod fleet;
mod kill;
mod knobs;
mod manual;
mod page;
mod plan;
mod pool;
mod power;
mod promote;
mod rehearse;
mod run;
mod signal;
mod similar;
mod status;
mod text;
mod thp;
mod top;
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
  jumbo doctor                       # what to mend on this host

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

/// The command line of `jumbo run`, read without the tree of all other commands; `None` for the
/// rest.
///
/// The tree takes more time than everything else that happens before PROGRAM. It has the words for
/// help and wrong usage.
fn run_alone() -> Option<Command> {
    let mut arguments = std::env::args_os().skip(1);
    let is_run = arguments.next()? == "run";
    let args = is_run.then(|| run::Args::read(arguments.collect()))?;
    args.map(Command::Run)
}

/// The C library calls this, without Rust's runtime in between: see [`run::begin`].
#[cfg(not(test))]
#[expect(unsafe_code, reason = "the C library finds main by its name")]
#[unsafe(no_mangle)]
extern "C" fn main(_count: std::ffi::c_int, _arguments: *const *const std::ffi::c_char) -> i32 {
    // Not by returning: what stdout holds back is written.
    std::process::exit(start())
}

/// The test harness takes its place.
#[cfg(test)]
fn main() {
    start();
}

fn start() -> i32 {
    run::begin();
    let code = command();
    // The standard library tells the number of an ExitCode to its own runtime alone.
    let number = (0..=u8::MAX).find(|number| ExitCode::from(*number) == code);
    number.map_or(1, i32::from)
}

fn command() -> ExitCode {
    let parse = || Cli::try_parse().unwrap_or_else(|error| similar::hinted(error).exit());
    let result = match run_alone().unwrap_or_else(|| parse().command) {
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
        // The reader of our output may stop when it has enough (`jumbo status | head`): that is no
        // failure.
        if view::is_broken_pipe(&error) {
            return ExitCode::SUCCESS;
        }
        view::tell(&view::in_words(&error));
        ExitCode::FAILURE
    })
}
