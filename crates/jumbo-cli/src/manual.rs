//! `jumbo completions` and `jumbo man`, generated from the definition of the command line.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;
use jumbo_host::whole_file::{self, Existing};

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
    // To memory first: the generator panics on a write error.
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
    let mut command = super::Cli::command().disable_help_subcommand(true);
    command.build();
    match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
            pages(&command, dir)
                .with_context(|| format!("cannot write manual pages into {}", dir.display()))?;
        }
        None => print(&page(&command)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages of a command and of its subcommands.
fn pages(command: &Command, dir: &Path) -> io::Result<()> {
    for subcommand in command
        .get_subcommands()
        .filter(|subcommand| !subcommand.is_hide_set())
    {
        pages(subcommand, dir)?;
    }
    let name = Man::new(command.clone()).get_filename();
    let page = page(command)?;
    whole_file::write(&dir.join(name), &page, 0o644, Existing::Publish)
}

/// Returns the page of `clap_mangen`, with the sections of `after_help` as sections. Lists are not
/// filled: filled examples could not be copied.
fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let source = concat!("jumbo ", env!("CARGO_PKG_VERSION"));
    let none = None::<&str>;
    Man::new(command.clone().after_help(none).after_long_help(none))
        .date(env!("JUMBO_DATE"))
        .source(source)
        .manual("User Commands")
        .render(&mut page)?;
    let end = command.get_after_long_help().or(command.get_after_help());
    let end = end.map(ToString::to_string);
    for part in end.unwrap_or_default().split("\n\n") {
        let (title, text) = section(part);
        if text.is_empty() {
            continue;
        }
        writeln!(page, ".SH \"{}\"", title.to_uppercase())?;
        match text.strip_prefix('\n') {
            Some(list) => {
                writeln!(page, ".nf")?;
                for line in list.lines() {
                    writeln!(page, "{}", escaped(line.strip_prefix("  ").unwrap_or(line)))?;
                }
                writeln!(page, ".fi")?;
            }
            None => writeln!(page, "{}", escaped(text.trim_start()))?,
        }
    }
    Ok(page)
}

/// Splits a part into its title, `Examples:` or `Exit status:`, and its text. Without a title it is
/// notes.
fn section(part: &str) -> (&str, &str) {
    let titled = part.split_once(':').filter(|(title, _)| {
        // A longer text before the colon is a sentence.
        title.split(' ').count() <= 2 && title.starts_with(char::is_uppercase)
    });
    titled.unwrap_or(("Notes", part))
}

/// Escapes a line of text for roff.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    // `\&`: a dot at the start of a line would begin a request.
    format!("\\&{line}")
}
