//! Options from a profile ([`entries`]) or a configuration file ([`parse`]): [`FileOption`].
//!
//! A key with its value becomes the option of that name, before the typed options. One parser reads
//! both, with the same bounds and errors; the last of an option counts.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::io::ErrorKind::{NotADirectory, NotFound, Other, PermissionDenied};
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Args as _};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::Failure;
use super::options::Options;
use crate::trusted;

/// Includes the files of `profiles/` by name.
macro_rules! profiles {
    ($($name:literal),*) => {
        [$(($name, include_str!(concat!("../../../../profiles/", $name, ".toml")))),*]
    };
}

/// Profiles of jumbo itself: programs for which another option than the default is better.
const BUILT_IN: [(&str, &str); 2] = profiles!["node", "postgresql"];

#[derive(Debug)]
pub(super) struct FileOption {
    pub(super) key: String,
    /// The option as typed; `None` for a disabled switch.
    pub(super) word: Option<OsString>,
    /// File and line.
    pub(super) from: String,
}

/// Options of the profile in the file `requested`, or of that name. A name never means a file in the
/// current folder, which may be another user's.
pub(super) fn entries(requested: &Path) -> Result<Vec<FileOption>, Failure> {
    let shown = requested.to_string_lossy();
    if !shown.contains('/') {
        return entries_of_known(&shown);
    }
    let hint = format!("profiles that come with jumbo: {}", names());
    let text = trusted::read(requested).map_err(|error| unread(requested, &error, &hint))?;
    in_text(&shown, &text)
}

fn in_text(shown: &str, text: &str) -> Result<Vec<FileOption>, Failure> {
    let shown = format!("profile {shown}");
    parse(&shown, text, None).map_err(|error| Failure::own(format!("cannot use {shown}: {error}")))
}

/// Options of a profile of [`known`], regardless of files in the current folder.
pub(super) fn entries_of_known(name: &str) -> Result<Vec<FileOption>, Failure> {
    let (shown, text) = named(name)?;
    in_text(&shown, &text)
}

/// Names of all profiles: the built-in ones, and those in the configuration folders.
pub(crate) fn known() -> BTreeSet<String> {
    let folders = folders().map(|folder| folder.join("jumbo/profiles"));
    let files = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let own =
        files.filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".toml")?.to_owned()));
    let built_in = BUILT_IN.iter().map(|(name, _)| (*name).to_owned());
    own.chain(built_in).collect()
}

fn unread(file: &Path, error: &io::Error, hint: &str) -> Failure {
    let file = file.display();
    let hint = match error.kind() {
        Other => "name a regular file that only you or root can write, such as a copy of your own",
        _ => hint,
    };
    Failure::own(format!("cannot read profile {file}: {error}\nhint: {hint}"))
}

/// Configuration folders: the user's, and the system's.
pub(super) fn folders() -> impl DoubleEndedIterator<Item = PathBuf> {
    let home = std::env::var_os("XDG_CONFIG_HOME")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    [home, Some(PathBuf::from("/etc"))].into_iter().flatten()
}

/// Reads a file that may be missing. HOME may be /dev/null, or a folder of another user without
/// access.
pub(super) fn read(file: &Path) -> io::Result<Option<String>> {
    // The variables of the folders may be another user's: `/etc/../home/user`.
    let systems = ["/etc", "/etc/jumbo/profiles"].map(Path::new);
    let read = match file
        .parent()
        .is_some_and(|folder| systems.contains(&folder))
    {
        true => trusted::read_systems(file),
        false => trusted::read(file),
    };
    match read {
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => Ok(None),
        Err(error) if error.kind() == PermissionDenied && fs::metadata(file).is_err() => Ok(None),
        read => read.map(Some),
    }
}

fn named(name: &str) -> Result<(String, String), Failure> {
    for folder in folders() {
        let file = folder.join(format!("jumbo/profiles/{name}.toml"));
        match read(&file) {
            Ok(Some(text)) => return Ok((file.display().to_string(), text)),
            Ok(None) => {}
            Err(error) => {
                let hint = format!("name a file: --profile ./{name}.toml");
                return Err(unread(&file, &error, &hint));
            }
        }
    }
    let built_in = BUILT_IN.iter().find(|(known, _)| *known == name);
    built_in
        .map(|(known, text)| ((*known).to_owned(), (*text).to_owned()))
        .ok_or_else(|| {
            let known = known();
            let nearest = known
                .iter()
                .min_by_key(|known| strsim::levenshtein(known, name));
            let nearest = nearest.map_or("", String::as_str);
            let all: Vec<_> = known.iter().map(String::as_str).collect();
            let all = all.join(", ");
            Failure::own(format!(
                "there is no profile `{name}`\nhint: the nearest is {nearest}; known are {all}; a file \
                 has a path: ./{name}"
            ))
        })
}

fn names() -> String {
    BUILT_IN.map(|(name, _)| name).join(", ")
}

/// Parses the `text` of `file`; an error names its line.
///
/// In a profile all keys are options. In a configuration file, tables are sections for programs:
/// `sections` selects by name, and their options follow those for all programs.
pub(super) fn parse(
    file: &str,
    text: &str,
    sections: Option<&dyn Fn(&str) -> bool>,
) -> Result<Vec<FileOption>, String> {
    let line = |span: Range<usize>| {
        let before = text.get(..span.start).unwrap_or(text);
        1 + before.bytes().filter(|byte| *byte == b'\n').count()
    };
    let table = DeTable::parse(text).map_err(|error| {
        let line = line(error.span().unwrap_or_default());
        format!("line {line}: {}", error.message())
    })?;
    let table = table.get_ref();
    let mut options = Options::augment_args(clap::Command::new("file").no_binary_name(true));
    options = options.disable_help_flag(true);
    if sections.is_some() {
        options = options.arg(Arg::new("profile").long("profile"));
    }
    let below = |name: &str, value: &DeValue<'_>| match value {
        DeValue::Table(_) => sections.map(|counts| counts(name)),
        _ => None,
    };
    let mut found: Vec<_> = table
        .iter()
        .filter_map(|(key, value)| match below(key.get_ref(), value.get_ref()) {
            None => Some(vec![(false, key, value)]),
            Some(false) => None,
            Some(true) => {
                let section = value.get_ref().as_table()?.iter();
                Some(section.map(|(key, value)| (true, key, value)).collect())
            }
        })
        .flatten()
        .collect();
    // The profile that a section names comes before the options of the section.
    found.sort_by_key(|(is_below, key, _)| {
        (*is_below, key.get_ref() != "profile", key.span().start)
    });
    let entry = |(_, key, value): (bool, &Spanned<DeString<'_>>, &Spanned<DeValue<'_>>)| {
        let line = line(key.span());
        let word = word(options.clone(), key.get_ref(), value.get_ref());
        Ok(FileOption {
            key: key.get_ref().to_string(),
            word: word.map_err(|why| format!("line {line}: {why}"))?,
            from: format!("{file}, line {line}"),
        })
    };
    found.into_iter().map(entry).collect()
}

/// Formats an option as typed; `None` for a disabled switch.
fn word(
    command: clap::Command,
    key: &str,
    value: &DeValue<'_>,
) -> Result<Option<OsString>, String> {
    let is_switch = command.get_arguments().any(|option| {
        option.get_long() == Some(key) && matches!(option.get_action(), ArgAction::SetTrue)
    });
    let typed = match value {
        DeValue::Boolean(false) if is_switch => return Ok(None),
        DeValue::Boolean(true) if is_switch => format!("--{key}"),
        DeValue::Boolean(value) => format!("--{key}={value}"),
        DeValue::String(value) => format!("--{key}={value}"),
        DeValue::Integer(value) => format!("--{key}={value}"),
        _ => return Err(format!("{key} is neither a text, a number, true nor false")),
    };
    match command.try_get_matches_from([&typed]) {
        Ok(_) => Ok(Some(typed.into())),
        Err(error) => {
            // Drops the usage and help of the command line.
            let words = error.render().to_string();
            let words = words.split("\n\nUsage:").next().unwrap_or_default();
            let words = words.split("\n\nFor more").next().unwrap_or_default();
            Err(words.trim_start_matches("error: ").trim_end().to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::options::{ReportFormat, ThpMode};
    use clap::FromArgMatches as _;
    use jumbo::units::Bytes;
    use jumbo_host::policy::{
        DataMode, FilesMode, FreeMode, HeapMode, Keep, MaxWaste, ReaperMode, ShmMode, TextMode,
    };

    fn parse(text: &str) -> Result<Vec<FileOption>, String> {
        super::parse("file", text, None)
    }

    fn options(text: &str) -> Options {
        let command = Options::augment_args(clap::Command::new("run").no_binary_name(true));
        let words = parse(text).unwrap().into_iter();
        let matches = command.try_get_matches_from(words.filter_map(|entry| entry.word));
        Options::from_arg_matches(&matches.unwrap()).unwrap()
    }

    #[test]
    fn every_option_can_be_set() {
        let profile = options(
            "# all of them\nheap = \"off\"\npool = \"4G:1G\"\novercommit = \"512M\"\nwarm = true\nmaps = \"on\"\ntext = \"shared\"\ndata = \"off\"\nfiles = \"on\"\nlibs = \"libLLVM*,libclang*\"\nshm = \"hugetlb\"\nshm-sizes = \"64K,2M\"\nmax-waste = 10\nfirst-touch = \"huge\"\nkeep = \"10%\"\nfree = \"background\"\n\
             free-workers = 2\npopulate-workers = 3\nthp = \"madvise\"\nreaper = \"off\"\nno-follow = true\n\
             report = \"json\"\nreport-file = \"/tmp/r\"\nquiet = false\n",
        );
        let expected = Options {
            heap: Some(HeapMode::Off),
            pool: Some("4G:1G".parse().unwrap()),
            overcommit: Some(Bytes(512 << 20)),
            warm: true,
            maps: Some(true),
            text: Some(TextMode::Shared),
            data: Some(DataMode::Off),
            files: Some(FilesMode::On),
            libs: Some(String::from("libLLVM*/libclang*")),
            shm: Some(ShmMode::Hugetlb),
            shm_sizes: Some((2 << 20) + (64 << 10)),
            max_waste: Some(MaxWaste::Percent(10)),
            first_touch: Some(true),
            keep: Some(Keep::Percent(10)),
            free: Some(FreeMode::Background),
            free_workers: Some(2),
            populate_workers: Some(3),
            thp: Some(ThpMode::Madvise),
            reaper: Some(ReaperMode::Off),
            no_follow: true,
            report: Some(ReportFormat::Json),
            report_file: Some(PathBuf::from("/tmp/r")),
            quiet: false,
        };
        assert_eq!(profile, expected);
        assert_eq!(options(""), Options::default());
        assert!(options("report = \"json\"\nquiet = true") == options("quiet = true"));
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
    fn an_invalid_value_names_its_line() {
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
