//! The tools of libhugetlbfs by their names: `hugectl`, `hugeadm` and `hugeedit`, as links to
//! `jumbo`.
//!
//! A tool translates its options into command lines of `jumbo`, and executes those. An option is
//! translated, or refused with the reason; none is without effect in silence. See
//! `docs/libhugetlbfs.md`, which has a row for each.

mod hugeadm;
mod hugectl;
mod hugeedit;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::Arg;

use crate::view;

/// Exit code: wrong usage.
const USAGE: u8 = 2;

/// Words of one command of `jumbo`.
type Words = Vec<OsString>;

/// Runs the tool whose name this process was started by; `None` under other names.
pub(crate) fn main() -> Option<ExitCode> {
    let name = std::env::args_os().next()?;
    let commands = match Path::new(&name).file_name().and_then(OsStr::to_str)? {
        "hugectl" => parse(hugectl::REFUSED).and_then(|args: hugectl::Args| args.commands()),
        "hugeadm" => parse(hugeadm::REFUSED).and_then(|args: hugeadm::Args| args.commands()),
        "hugeedit" => parse(hugeedit::REFUSED).and_then(|args: hugeedit::Args| args.commands()),
        _ => return None,
    };
    let code = match commands {
        Ok(commands) => execute(commands),
        Err(error) => {
            view::tell(&view::in_words(&error));
            return Some(ExitCode::from(USAGE));
        }
    };
    Some(code.unwrap_or_else(|error| {
        view::tell(&view::in_words(&error));
        ExitCode::FAILURE
    }))
}

/// Options without a counterpart, each with the name of its value, if any, and the reason.
type Refusals = &'static [(&'static str, &'static str)];

fn parse<T: clap::Parser>(refused: Refusals) -> anyhow::Result<T> {
    read(refused, std::env::args_os()).unwrap_or_else(|error| view::refuse(&error))
}

/// # Errors
/// The inner one: an option without a counterpart.
fn read<T: clap::Parser>(
    refused: Refusals,
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<anyhow::Result<T>, clap::Error> {
    let matches = command::<T>(refused).try_get_matches_from(words)?;
    let given = |(option, _): &&(&str, &str)| matches.contains_id(option);
    if let Some((option, why)) = refused.iter().find(given) {
        let name = option.split('=').next().unwrap_or_default();
        return Ok(Err(anyhow::anyhow!("--{name} is refused: {why}")));
    }
    T::from_arg_matches(&matches).map(Ok)
}

/// Returns the options of a tool, and those without a counterpart below them.
fn command<T: clap::CommandFactory>(refused: Refusals) -> clap::Command {
    let options = refused.iter().map(|(option, why)| {
        let (name, value) = option.split_once('=').unwrap_or((option, "VALUE"));
        let takes = option.contains('=');
        Arg::new(*option)
            .long(name)
            .value_name(value)
            .num_args(usize::from(takes)..=1)
            .require_equals(!takes)
            .help(why.lines().next().unwrap_or_default())
            .help_heading("Refused")
    });
    T::command().args(options)
}

/// Executes the commands in turn, up to the first that fails. This process becomes the last one, so
/// that a program keeps its process ID.
fn execute(mut commands: Vec<Words>) -> anyhow::Result<ExitCode> {
    let jumbo = || {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("jumbo");
        command
    };
    let Some(last) = commands.pop() else {
        return Ok(ExitCode::SUCCESS);
    };
    for words in commands {
        let status = jumbo().args(words).status().context("cannot start jumbo")?;
        if !status.success() {
            let code = status.code().or(status.signal().map(|signal| 128 + signal));
            let code = code.and_then(|code| u8::try_from(code).ok());
            return Ok(ExitCode::from(code.unwrap_or(1)));
        }
    }
    Err(jumbo().args(last).exec()).context("cannot start jumbo")
}

/// Returns the words of a command.
fn words<'a>(words: impl IntoIterator<Item = &'a str>) -> Words {
    words.into_iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    /// Returns the commands of a line, or the message.
    pub(super) fn translated<T: clap::Parser>(
        line: &str,
        refused: Refusals,
        commands: impl Fn(&T) -> anyhow::Result<Vec<Words>>,
    ) -> Result<Vec<String>, String> {
        let args = read::<T>(refused, line.split(' ')).map_err(|error| error.to_string())?;
        let commands = args
            .and_then(|args| commands(&args))
            .map_err(|error| error.to_string())?;
        let line = |words: Words| words.join(OsStr::new(" ")).into_string().unwrap();
        Ok(commands.into_iter().map(line).collect())
    }

    #[test]
    fn each_option_has_a_row_in_the_document() {
        let document = include_str!("../../../../docs/libhugetlbfs.md");
        let tools = [
            command::<hugectl::Args>(hugectl::REFUSED),
            command::<hugeadm::Args>(hugeadm::REFUSED),
            command::<hugeedit::Args>(hugeedit::REFUSED),
        ];
        let mut options = 0;
        for argument in tools.iter().flat_map(clap::Command::get_arguments) {
            if let Some(name) = argument.get_long() {
                options += 1;
                let is_there = ["`", " ", "["].map(|end| format!("`--{name}{end}"));
                assert!(
                    is_there.iter().any(|text| document.contains(text)),
                    "--{name}"
                );
            }
        }
        assert!(options > 40, "{options}");
    }

    /// All command lines that the tools make parse.
    #[test]
    fn translated_lines_are_of_jumbo() {
        let lines = [
            translated(
                "hugectl --heap --text --data --shm -v x y",
                hugectl::REFUSED,
                hugectl::Args::commands,
            ),
            translated(
                "hugectl --heap=2M --share-text --dry-run x",
                hugectl::REFUSED,
                hugectl::Args::commands,
            ),
            translated(
                "hugeadm --pool-pages-min 2M:+1 --hard --dry-run",
                hugeadm::REFUSED,
                hugeadm::Args::commands,
            ),
            translated(
                "hugeadm --thp-always --explain",
                hugeadm::REFUSED,
                hugeadm::Args::commands,
            ),
            translated(
                "hugeedit --text x",
                hugeedit::REFUSED,
                hugeedit::Args::commands,
            ),
        ];
        for line in lines.into_iter().flat_map(Result::unwrap) {
            let words = ["jumbo"].into_iter().chain(line.split(' '));
            let parsed = crate::Cli::try_parse_from(words);
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }
}
