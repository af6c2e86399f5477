//! `--profile`: options from a file, [`read`].

use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::ops::Range;
use std::path::{Path, PathBuf};

use jumbo::policy::MAX_FREE_WORKERS;
use toml::de::DeTable;

use super::Failure;
use super::options::{MAX_WASTE, Options};

/// The profiles that come with jumbo, by name.
const BUILT_IN: [(&str, &str); 7] = [
    ("cpython", include_str!("../../../../profiles/cpython.toml")),
    ("duckdb", include_str!("../../../../profiles/duckdb.toml")),
    ("java", include_str!("../../../../profiles/java.toml")),
    ("mariadb", include_str!("../../../../profiles/mariadb.toml")),
    ("node", include_str!("../../../../profiles/node.toml")),
    (
        "postgresql",
        include_str!("../../../../profiles/postgresql.toml"),
    ),
    ("redis", include_str!("../../../../profiles/redis.toml")),
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
    let at = |span: Option<Range<usize>>, what: String| {
        let before = text
            .get(..span.map_or(0, |span| span.start))
            .unwrap_or(text);
        let line = 1 + before.bytes().filter(|byte| *byte == b'\n').count();
        format!("line {line}: {what}")
    };
    let syntax = |error: toml::de::Error| at(error.span(), error.message().to_owned());
    let table = DeTable::parse(text).map_err(syntax)?;
    let keys = keys();
    let unknown = table
        .get_ref()
        .keys()
        .filter(|key| !keys.contains(&key.get_ref().to_string()));
    if let Some(key) = unknown.min_by_key(|key| key.span().start) {
        let name = key.get_ref();
        let what = format!(
            "there is no option `{name}`; the nearest is `{}`",
            nearest(name)
        );
        return Err(at(Some(key.span()), what));
    }
    let options: Options = toml::from_str(text).map_err(syntax)?;
    let wrong = |key: &str, what: String| {
        let value = table.get_ref().get(key).map(|value| value.span());
        Err(at(value, format!("{key} is {what}")))
    };
    match (options.free_workers, options.max_waste) {
        (Some(workers), _) if !(1..=MAX_FREE_WORKERS).contains(&workers) => wrong(
            "free-workers",
            format!("{workers}, and must be 1 to {MAX_FREE_WORKERS}"),
        ),
        (_, Some(percent)) if percent > MAX_WASTE => wrong(
            "max-waste",
            format!("{percent}, and at most {MAX_WASTE} (percent)"),
        ),
        _ => Ok(options),
    }
}

/// The keys of a profile: the names of the options.
fn keys() -> Vec<String> {
    let command = <Options as clap::Args>::augment_args(clap::Command::new("profile"));
    let names = command.get_arguments().filter_map(|arg| arg.get_long());
    names.map(str::to_owned).collect()
}

/// The key that is spelled most like this one.
fn nearest(key: &str) -> String {
    let spelled = key.replace('_', "-");
    let likeness = |known: &String| strsim::normalized_damerau_levenshtein(known, &spelled);
    let best = keys()
        .into_iter()
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    best.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::options::{Patterns, ReportFormat, Sizes, Switch};
    use jumbo::policy::{DataMode, FreeMode, HeapMode, Keep, ReaperMode, ShmMode, TextMode};
    use jumbo::units::Bytes;

    #[test]
    fn every_option_can_be_set() {
        let profile = parse(
            "# all of them\nheap = \"off\"\npool = \"4G:1G\"\novercommit = \"512M\"\nwarm = true\nmaps = \"on\"\ntext = \"shared\"\ndata = \"off\"\nlibs = \"libLLVM*,libclang*\"\nshm = \"user\"\nshm-sizes = \"64K,2M\"\nmax-waste = 10\nkeep = \"10%\"\nfree = \"background\"\n\
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
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest() {
        for (text, message) in [
            (
                "\nheapp = 1",
                "line 2: there is no option `heapp`; the nearest is `heap`",
            ),
            (
                "max_waste = 1",
                "line 1: there is no option `max_waste`; the nearest is `max-waste`",
            ),
            (
                "maps = \"on\"\n\nreports = 1\nzzz = 2",
                "line 3: there is no option `reports`; the nearest is `report`",
            ),
            ("[heap.x]\ny = 1", "line 1: "),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(message), "{error}");
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
            ("quiet = ", 1),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")), "{error}");
        }
    }

    #[test]
    fn the_nearest_is_found_for_every_key() {
        for key in keys() {
            assert_eq!(nearest(&key[1..]), key);
        }
    }
}
