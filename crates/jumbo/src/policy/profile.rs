//! [`Profile`]: the options of `jumbo run` in a file.

use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use toml::de::DeTable;

use super::{FreeMode, HeapMode, MAX_FREE_WORKERS, PoolRequest, ReaperMode};
use crate::units::Bytes;

/// What a profile can say. Its keys are the names of the options, and an option on the command line
/// wins over its key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct Profile {
    /// `--heap`
    pub heap: Option<HeapMode>,
    /// `--pool`
    pub pool: Option<PoolRequest>,
    /// `--overcommit`
    #[serde(default, deserialize_with = "size")]
    pub overcommit: Option<Bytes>,
    /// `--warm`
    pub warm: Option<bool>,
    /// `--maps`
    pub maps: Option<Switch>,
    /// `--max-waste`
    pub max_waste: Option<u32>,
    /// `--free`
    pub free: Option<FreeMode>,
    /// `--free-workers`
    pub free_workers: Option<u32>,
    /// `--reaper`
    pub reaper: Option<ReaperMode>,
    /// `--supervise`
    pub supervise: Option<bool>,
    /// `--no-follow`
    pub no_follow: Option<bool>,
    /// `--report`
    pub report: Option<ReportFormat>,
    /// `--report-file`
    pub report_file: Option<PathBuf>,
    /// `--quiet`
    pub quiet: Option<bool>,
}

/// Something that is done or is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Switch {
    /// It is done.
    On,
    /// It is not.
    Off,
}

/// The form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// None at all.
    None,
}

/// Why a profile cannot be used. Lines count from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A key that is not an option.
    #[error("line {line}: there is no option `{key}`{}", nearest(key))]
    UnknownKey {
        /// Where.
        line: usize,
        /// What was written.
        key: String,
    },
    /// A value that its option does not take, or text that is not TOML.
    #[error("line {line}: {what}")]
    Syntax {
        /// Where.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
}

const KEYS: [&str; 14] = [
    "heap",
    "pool",
    "overcommit",
    "warm",
    "maps",
    "max-waste",
    "free",
    "free-workers",
    "reaper",
    "supervise",
    "no-follow",
    "report",
    "report-file",
    "quiet",
];

/// The most that `max-waste` can be, in percent: as much again as was asked for.
pub const MAX_WASTE: u32 = 100;

/// A size as it is typed: `"512M"`.
fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

fn nearest(key: &str) -> String {
    let spelled = key.replace('_', "-");
    let scored = KEYS
        .iter()
        .map(|known| (strsim::jaro(known, &spelled), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, known)| format!("; the nearest is `{known}`"))
        .unwrap_or_default()
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// [`ProfileError`], for the first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, ProfileError> {
        let line = |span: Option<Range<usize>>| {
            let before = text
                .get(..span.map_or(0, |span| span.start))
                .unwrap_or(text);
            1 + before.bytes().filter(|byte| *byte == b'\n').count()
        };
        let syntax = |error: toml::de::Error| ProfileError::Syntax {
            line: line(error.span()),
            what: error.message().to_owned(),
        };
        let table = DeTable::parse(text).map_err(syntax)?;
        let mut unknown: Vec<_> = table
            .get_ref()
            .keys()
            .filter(|key| !KEYS.contains(&key.get_ref().as_ref()))
            .collect();
        unknown.sort_unstable_by_key(|key| key.span().start);
        if let Some(key) = unknown.first() {
            return Err(ProfileError::UnknownKey {
                line: line(Some(key.span())),
                key: key.get_ref().to_string(),
            });
        }
        let profile: Self = toml::from_str(text).map_err(syntax)?;
        if let Some(workers) = profile
            .free_workers
            .filter(|workers| !(1..=MAX_FREE_WORKERS).contains(workers))
        {
            let value = table
                .get_ref()
                .get("free-workers")
                .map(|value| value.span());
            return Err(ProfileError::Syntax {
                line: line(value),
                what: format!("free-workers is {workers}, and must be 1 to {MAX_FREE_WORKERS}"),
            });
        }
        if let Some(percent) = profile.max_waste.filter(|percent| *percent > MAX_WASTE) {
            let value = table.get_ref().get("max-waste").map(|value| value.span());
            return Err(ProfileError::Syntax {
                line: line(value),
                what: format!("max-waste is {percent}, and at most {MAX_WASTE} (percent)"),
            });
        }
        Ok(profile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_can_be_set() {
        let profile = Profile::parse(
            "# all of them\nheap = \"off\"\npool = \"4G:1G\"\novercommit = \"512M\"\nwarm = true\nmaps = \"on\"\nmax-waste = 10\nfree = \"background\"\n\
             free-workers = 2\nreaper = \"off\"\nsupervise = true\nno-follow = true\n\
             report = \"json\"\nreport-file = \"/tmp/r\"\nquiet = false\n",
        );
        let expected = Profile {
            heap: Some(HeapMode::Off),
            pool: Some("4G:1G".parse().unwrap()),
            overcommit: Some(Bytes(512 << 20)),
            warm: Some(true),
            maps: Some(Switch::On),
            max_waste: Some(10),
            free: Some(FreeMode::Background),
            free_workers: Some(2),
            reaper: Some(ReaperMode::Off),
            supervise: Some(true),
            no_follow: Some(true),
            report: Some(ReportFormat::Json),
            report_file: Some(PathBuf::from("/tmp/r")),
            quiet: Some(false),
        };
        assert_eq!(profile, Ok(expected));
        assert_eq!(Profile::parse(""), Ok(Profile::default()));
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_nearest() {
        for (text, message) in [
            (
                "\nheep = 1",
                "line 2: there is no option `heep`; the nearest is `heap`",
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
            let error = Profile::parse(text).unwrap_err().to_string();
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
            ("quiet = ", 1),
        ] {
            let error = Profile::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("line {line}: ")), "{error}");
        }
    }

    #[test]
    fn the_nearest_is_found_for_every_key() {
        for key in KEYS {
            assert!(nearest(&key[1..]).contains(&format!("`{key}`")), "{key}");
        }
    }
}
