//! `--profile`: options from a file, [`read`].
//!
//! A key and its value are read as the option of that name is: by the same parser, with the same bounds and the same words for
//! what is wrong.

use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args as _, FromArgMatches as _};
use toml::de::{DeTable, DeValue};

use super::Failure;
use super::options::Options;

/// The profiles that come with jumbo, by name: of programs for which another option than the default is better.
const BUILT_IN: [(&str, &str); 4] = [
    ("cpython", include_str!("../../../../profiles/cpython.toml")),
    ("duckdb", include_str!("../../../../profiles/duckdb.toml")),
    ("node", include_str!("../../../../profiles/node.toml")),
    (
        "postgresql",
        include_str!("../../../../profiles/postgresql.toml"),
    ),
];

/// The options of the profile in the file `asked`, or of that name.
pub(super) fn read(asked: &Path) -> Result<Options, Failure> {
    // A folder of that name (`redis`, say) is no profile.
    let is_file = || fs::metadata(asked).is_ok_and(|metadata| metadata.is_file());
    let name = asked.to_str().filter(|name| !name.contains('/'));
    let (shown, text) = match name.filter(|_| !is_file()) {
        Some(name) => named(name)?,
        None => {
            let text = fs::read_to_string(asked).map_err(|error| {
                Failure::own(format!(
                    "cannot read profile {}: {error}\nhint: profiles that come with jumbo: {}",
                    asked.display(),
                    names()
                ))
            })?;
            (asked.display().to_string(), text)
        }
    };
    parse(&text).map_err(|error| Failure::own(format!("cannot use profile {shown}: {error}")))
}

fn named(name: &str) -> Result<(String, String), Failure> {
    let home = std::env::var_os("XDG_CONFIG_HOME")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let folders = [home, Some(PathBuf::from("/etc"))];
    for folder in folders.into_iter().flatten() {
        let file = folder.join(format!("jumbo/profiles/{name}.toml"));
        let shown = file.display().to_string();
        match fs::read_to_string(&file) {
            Ok(text) => return Ok((shown, text)),
            // HOME may be /dev/null.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {}
            Err(error) => {
                return Err(Failure::own(format!(
                    "cannot read profile {shown}: {error}\nhint: name a file: --profile ./{name}.toml"
                )));
            }
        }
    }
    let built_in = BUILT_IN.iter().find(|(known, _)| *known == name);
    built_in
        .map(|(known, text)| ((*known).to_owned(), (*text).to_owned()))
        .ok_or_else(|| {
            Failure::own(format!(
                "there is no profile `{name}`\nhint: profiles that come with jumbo: {}",
                names()
            ))
        })
}

fn names() -> String {
    BUILT_IN.map(|(name, _)| name).join(", ")
}

/// The options in `text`, or the first thing that is wrong with it, and where.
fn parse(text: &str) -> Result<Options, String> {
    let line = |span: Range<usize>| {
        let before = text.get(..span.start).unwrap_or(text);
        1 + before.bytes().filter(|byte| *byte == b'\n').count()
    };
    let table = DeTable::parse(text).map_err(|error| {
        let line = line(error.span().unwrap_or_default());
        format!("line {line}: {}", error.message())
    })?;
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut options = Options::default();
    for (key, value) in entries {
        let option = option(key.get_ref(), value.get_ref());
        let option = option.map_err(|what| format!("line {}: {what}", line(key.span())))?;
        options = options.or(option);
    }
    Ok(options)
}

/// One option, as if it had been typed.
fn option(key: &str, value: &DeValue<'_>) -> Result<Options, String> {
    let command = Options::augment_args(clap::Command::new("profile").no_binary_name(true));
    let command = command.disable_help_flag(true);
    let is_switch = command.get_arguments().any(|option| {
        option.get_long() == Some(key) && matches!(option.get_action(), ArgAction::SetTrue)
    });
    let typed = match value {
        DeValue::Boolean(false) if is_switch => return Ok(Options::default()),
        DeValue::Boolean(true) if is_switch => format!("--{key}"),
        DeValue::Boolean(value) => format!("--{key}={value}"),
        DeValue::String(value) => format!("--{key}={value}"),
        DeValue::Integer(value) => format!("--{key}={value}"),
        _ => return Err(format!("{key} is neither a text, a number, true nor false")),
    };
    let matches = command.try_get_matches_from([typed]);
    matches
        .and_then(|matches| Options::from_arg_matches(&matches))
        .map_err(|error| {
            // Without what is about the command line: how it is used, and where its help is.
            let words = error.render().to_string();
            let words = words.split("\n\nUsage:").next().unwrap_or_default();
            let words = words.split("\n\nFor more").next().unwrap_or_default();
            words.trim_start_matches("error: ").trim_end().to_owned()
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::options::{Patterns, ReportFormat, Sizes, Switch};
    use jumbo::units::Bytes;
    use jumbo_host::policy::{DataMode, FreeMode, HeapMode, Keep, ReaperMode, ShmMode, TextMode};

    #[test]
    fn every_option_can_be_set() {
        let profile = parse(
            "# all of them\nheap = \"off\"\npool = \"4G:1G\"\novercommit = \"512M\"\nwarm = true\nmaps = \"on\"\ntext = \"shared\"\ndata = \"off\"\nlibs = \"libLLVM*,libclang*\"\nshm = \"user\"\nshm-sizes = \"64K,2M\"\nmax-waste = 10\nbounded = true\nkeep = \"10%\"\nfree = \"background\"\n\
             free-workers = 2\nreaper = \"off\"\nno-follow = true\n\
             report = \"json\"\nreport-file = \"/tmp/r\"\nquiet = true\n",
        );
        let expected = Options {
            heap: Some(HeapMode::Off),
            pool: Some("4G:1G".parse().unwrap()),
            overcommit: Some(Bytes(512 << 20)),
            warm: true,
            maps: Some(Switch::On),
            text: Some(TextMode::Shared),
            data: Some(DataMode::Off),
            libs: Some(Patterns(String::from("libLLVM*/libclang*"))),
            shm: Some(ShmMode::User),
            shm_sizes: Some(Sizes((2 << 20) + (64 << 10))),
            max_waste: Some(10),
            bounded: true,
            keep: Some(Keep::Percent(10)),
            free: Some(FreeMode::Background),
            free_workers: Some(2),
            reaper: Some(ReaperMode::Off),
            no_follow: true,
            report: Some(ReportFormat::Json),
            report_file: Some(PathBuf::from("/tmp/r")),
            quiet: true,
        };
        assert_eq!(profile, Ok(expected));
        assert_eq!(parse(""), Ok(Options::default()));
        assert_eq!(parse("quiet = false"), Ok(Options::default()));
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest() {
        for (text, line, nearest) in [
            ("\nheapp = 1", 2, "'--heap'"),
            ("max_waste = 1", 1, "'--max-waste'"),
            ("maps = \"on\"\n\nreports = 1\nzzz = 2", 3, "'--report'"),
            ("[heap.x]\ny = 1", 1, ""),
            ("help = true", 1, ""),
        ] {
            let error = parse(text).unwrap_err();
            let start = format!("line {line}: ");
            assert!(
                error.starts_with(&start) && error.contains(nearest),
                "{error}"
            );
            assert!(
                !error.contains("Usage") && !error.contains("--help'."),
                "{error}"
            );
        }
    }

    #[test]
    fn a_value_that_does_not_fit_names_its_line() {
        for (text, line) in [
            ("heap = \"on\"\nmaps = 3", 2),
            ("\n\nheap = \"maybe\"", 3),
            ("pool = \"0\"", 1),
            ("overcommit = \"x\"", 1),
            ("max-waste = -1", 1),
            ("max-waste = 101", 1),
            ("keep = \"101%\"", 1),
            ("free-workers = 0", 1),
            ("maps = true", 1),
            ("quiet = \"yes\"", 1),
            ("quiet = ", 1),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")), "{error}");
        }
    }
}
