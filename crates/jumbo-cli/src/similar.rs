//! The option that was most likely meant, where there is none of the typed name: [`hinted`].
//!
//! clap picks one by a measure under which `--help` is as good as any other option, and asking for
//! help is rarely what was meant.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory as _, Error};
use strsim::levenshtein;

use crate::Cli;

/// Every command has these.
const OF_ALL: [&str; 2] = ["help", "version"];

/// The same error, with a hint at an option of the command itself where that is as near as the one
/// clap found.
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

/// An option of the command that `words` name, where `found` is one that every command has and no
/// nearer to `typed`.
fn better(
    command: &Command,
    words: impl Iterator<Item = String>,
    typed: &str,
    found: &str,
) -> Option<String> {
    let [typed, found] = [typed, found].map(|text| text.trim_start_matches('-'));
    if !OF_ALL.contains(&found) {
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
    let own = own.filter(|long| !OF_ALL.contains(long));
    let (steps, long) = own.map(|long| (levenshtein(typed, long), long)).min()?;
    (steps <= levenshtein(typed, found)).then(|| format!("--{long}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_of_the_command_comes_before_one_of_all() {
        let better = |typed, found: &str| {
            let words = ["run", "--x"].map(String::from);
            better(&Cli::command(), words.into_iter(), typed, found)
        };
        assert_eq!(better("--heep", "--help").as_deref(), Some("--heap"));
        assert_eq!(better("--helpp", "--help"), None);
        assert_eq!(better("--reprt", "--report"), None);
    }
}
