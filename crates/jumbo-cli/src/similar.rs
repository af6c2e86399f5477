//! Hint at the option nearest to an unknown one: [`hinted`].
//!
//! clap's own hint is often `--help`, which is rarely the intended option.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory as _, Error};
use strsim::levenshtein;

use crate::Cli;

/// Options of every command.
const COMMON_OPTIONS: [&str; 2] = ["help", "version"];

/// Replaces clap's hint by an option of the command itself, if that is as near.
pub(crate) fn hinted(mut error: Error) -> Error {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let Some(ContextValue::String(found)) = error.get(ContextKind::SuggestedArg) else {
        return error;
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let words = std::env::args().skip(1);
    let better = better(&Cli::command(), words, typed, found);
    if let Some(better) = better {
        error.insert(ContextKind::SuggestedArg, ContextValue::String(better));
    }
    error
}

/// Finds an option of the command that `words` name. `None` unless `found` is an option of every
/// command, and no nearer to `typed`.
fn better(
    command: &Command,
    words: impl Iterator<Item = String>,
    typed: &str,
    found: &str,
) -> Option<String> {
    let [typed, found] = [typed, found].map(|text| text.trim_start_matches('-'));
    if !COMMON_OPTIONS.contains(&found) {
        return None;
    }
    let mut command = command;
    for word in words {
        match command.find_subcommand(&word) {
            Some(inner) => command = inner,
            None => break,
        }
    }
    let own = command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set());
    let own = own.filter_map(|argument| argument.get_long());
    let own = own.filter(|long| !COMMON_OPTIONS.contains(long));
    let (steps, long) = own.map(|long| (levenshtein(typed, long), long)).min()?;
    (steps <= levenshtein(typed, found)).then(|| format!("--{long}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_command_precede_common_ones() {
        let better = |typed, found: &str| {
            let words = ["run", "--x"].map(String::from);
            better(&Cli::command(), words.into_iter(), typed, found)
        };
        assert_eq!(better("--heep", "--help").as_deref(), Some("--heap"));
        assert_eq!(better("--helpp", "--help"), None);
        assert_eq!(better("--reprt", "--report"), None);
    }
}
