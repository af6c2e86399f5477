//! Configuration files, jumbo.toml: [`layered`], and `--show-config`: [`show`].
//!
//! The last of an option counts, in this order: the system's file, the user's, a profile of the
//! command line, the command line. In a file, options for all programs come before those of the
//! program; the options of a profile come where the file names it. Only the last profile is used.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches};
use serde_json::json;

use super::args::{Args, command};
use super::profile::{self, FileOption};
use super::{Failure, OFF};
use crate::view::{self, View};

/// Options that files set for a program, each once, in their order; without a program those for all
/// programs. `typed` is the profile of the command line.
pub(super) fn layered(
    folders: impl Iterator<Item = PathBuf>,
    program: Option<&OsStr>,
    typed: Option<&Path>,
) -> Result<Vec<FileOption>, Failure> {
    let mut found = Vec::new();
    for folder in folders {
        let file = folder.join("jumbo.toml");
        let failed = |why: String| {
            let file = file.display();
            Failure::own(format!(
                "cannot use {file}: {why}\nhint: fix it, or leave it out with jumbo run --no-config"
            ))
        };
        let Some(text) = profile::read(&file).map_err(|error| failed(error.to_string()))? else {
            continue;
        };
        let name = file.display().to_string();
        let parse = |counts: &dyn Fn(&str) -> bool| profile::parse(&name, &text, Some(counts));
        if program.is_none() {
            // --show-config without a program: errors in any section count.
            parse(&|_| true).map_err(failed)?;
        }
        let counts = |section: &str| program.is_some_and(|program| program == section);
        found.extend(parse(&counts).map_err(failed)?);
    }
    let last = found.iter().rposition(|entry| entry.key == "profile");
    let mut entries: Vec<FileOption> = Vec::new();
    let mut add = |entry: FileOption| {
        entries.retain(|earlier| earlier.key != entry.key);
        entries.push(entry);
    };
    for (index, entry) in found.into_iter().enumerate() {
        if typed.is_none()
            && Some(index) == last
            && let Some(name) = entry.word.as_ref().and_then(|word| word.to_str())
        {
            let name = name.trim_start_matches("--profile=");
            let named =
                |failure: Failure| Failure::own(format!("{}: {}", entry.from, failure.message));
            profile::entries(&beside(&entry.from, name))
                .map_err(named)?
                .into_iter()
                .for_each(&mut add);
        }
        add(entry);
    }
    if let Some(typed) = typed {
        profile::entries(typed)?.into_iter().for_each(&mut add);
    }
    Ok(entries)
}

/// Path of the profile that a configuration file names, with the line as its source `from`: a
/// relative path stands beside the file, a bare name stays one.
fn beside(from: &str, name: &str) -> PathBuf {
    let file = from.rsplit_once(", line ").map_or(from, |(file, _)| file);
    match Path::new(file).parent() {
        Some(folder) if name.contains('/') => folder.join(name),
        _ => PathBuf::from(name),
    }
}

/// Prints each option with its value and the source of the value.
pub(super) fn show(args: &Args, entries: &[FileOption]) -> anyhow::Result<()> {
    let typed = || std::env::args_os().skip(2);
    let words = entries.iter().filter_map(|entry| entry.word.clone());
    let words: Vec<OsString> = words.chain(typed()).collect();
    let (all, typed) = (matches(words)?, matches(typed().collect())?);
    let is_set =
        |matches: &ArgMatches, id| matches.value_source(id) == Some(ValueSource::CommandLine);
    let mut rows = Vec::new();
    for option in command().get_arguments() {
        let (id, Some(name)) = (option.get_id().as_str(), option.get_long()) else {
            continue;
        };
        // Not options that files may set.
        let mut about = "help show-config no-config dry-run print-env json".split(' ');
        if about.any(|about| about == name) {
            continue;
        }
        let file = entries.iter().rfind(|entry| entry.key == name);
        let from = match file {
            _ if is_set(&typed, id) => "command line",
            Some(entry) => &entry.from,
            None => "default",
        };
        let help = option
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let usual = help
            .split_once("[default: ")
            .map(|(_, usual)| usual.trim_end_matches(']'));
        let value = match option.get_action() {
            ArgAction::SetTrue => all.get_flag(id).to_string(),
            _ => match all.get_raw(id).and_then(Iterator::last) {
                Some(value) => value.to_string_lossy().into_owned(),
                None => usual.unwrap_or(view::NONE).to_owned(),
            },
        };
        rows.push((name.to_owned(), value, from.to_owned()));
    }
    if super::is_off() {
        view::tell(&format!(
            "{OFF}: jumbo run starts the program without all of this"
        ));
    }
    if args.json {
        let row = |(name, value, from)| (name, json!({ "value": value, "from": from }));
        return view::json(&rows.into_iter().map(row).collect::<BTreeMap<_, _>>());
    }
    let mut view = View::default();
    view.table(
        "<option|<value|<from",
        rows.into_iter().map(|row| [row.0, row.1, row.2]),
    );
    Ok(view.print()?)
}

fn matches(words: Vec<OsString>) -> Result<ArgMatches, clap::Error> {
    command().try_get_matches_from(words)
}
