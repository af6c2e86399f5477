//! `jumbo completions` and `jumbo man`: from the definition of the command line itself, so that they
//! cannot fall behind it.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::view::Stdout;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo completions bash > ~/.local/share/bash-completion/completions/jumbo
  jumbo completions fish > ~/.config/fish/completions/jumbo.fish")]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

/// Print the manual page, or write those of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo man | man -l -
  jumbo man --dir ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write a page for jumbo and one for each of its commands into DIR
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    // Into memory first: the generator panics when it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "jumbo", &mut script);
    print(&script)?;
    Ok(ExitCode::SUCCESS)
}

fn print(text: &[u8]) -> io::Result<()> {
    let mut out = Stdout::lock();
    out.write_all(text)?;
    out.flush()
}

pub(crate) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
            clap_mangen::generate_to(super::Cli::command(), dir)
                .with_context(|| format!("cannot write manual pages into {}", dir.display()))?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(super::Cli::command()).render(&mut page)?;
            print(&page)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
