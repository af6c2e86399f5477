//! The `jumbo` command: glue between the library and its users, one file a subcommand.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Huge pages for the whole life of a program's memory.
#[derive(Debug, Parser)]
#[command(name = "jumbo", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {}

fn main() -> ExitCode {
    match Cli::parse().command {}
}
