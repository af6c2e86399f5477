//! `jumbo text`: program text on huge pages, without the library; one file a subcommand.

mod align;

use std::path::PathBuf;
use std::process::ExitCode;

use jumbo_host::kernel::Root;

/// Prepare the text of programs for huge pages
///
/// Two conditions let all processes map a program's text by PMD. Its file offset equals its address
/// modulo the huge page size (`align` makes such a copy), and the page cache has it in huge folios
/// (`jumbo files prime` reads it so). The program itself then runs without jumbo. `jumbo files show`
/// tells what a file lacks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo text align /usr/bin/python3 -o /opt/python3
  jumbo files prime /opt/python3")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Align(align::Args),
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let (root, json) = (Root::at(&args.root), args.json);
    match &args.command {
        Command::Align(args) => align::main(&root, args, json),
    }
}
