//! Files with a reason for each line: [`PlannedFile`], made from templates: [`fill`].
//!
//! A printed file can be copied as it is: reasons are comments of its format.
//!
//! A template has the format of its files. `== READER PATH` begins a file, and `# WHY` is the
//! reason of the line below it. A line is repeated for each value of its `{NAME}`s, and omitted if
//! a name has no value. `{?NAME}` prints nothing and only tests for a value. A name without a value
//! in the path omits the whole file.

use std::io::{self, Write as _};

use clap::ValueEnum as _;
use serde::Serialize;

use crate::view::{Stdout, WIDTH, filled};

/// The part of a system that reads a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ConfigReader {
    /// sysctl.d(5): settings below /proc/sys
    Sysctl,
    /// tmpfiles.d(5): pools by node, THP
    Tmpfiles,
    /// The kernel command line, as update-grub(8) reads it
    CommandLine,
    /// systemd units: limits, environment, mounts
    Systemd,
    /// The configuration of the program
    Config,
    /// A pod; not in the default output
    Kubernetes,
}

/// A line and its reason; a line without a reason belongs to the line above it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct FileLine {
    pub(crate) line: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(crate) why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PlannedFile {
    pub(crate) path: String,
    pub(crate) reader: ConfigReader,
    pub(crate) lines: Vec<FileLine>,
}

impl PlannedFile {
    /// Text of the file, with its path and the reasons as comments.
    pub(crate) fn text(&self) -> String {
        let is_xml = self.path.ends_with(".xml");
        let comment = |indent: &str, text: &str| {
            let (open, close) = if is_xml {
                ("<!-- ", " -->")
            } else {
                ("# ", "")
            };
            let text = filled(
                "",
                &format!("{text}{close}"),
                0,
                WIDTH - indent.len() - open.len(),
            );
            // An XML comment may have several lines.
            let next = if is_xml { "     " } else { open };
            format!(
                "{indent}{open}{}\n",
                text.replace('\n', &format!("\n{indent}{next}"))
            )
        };
        let mut text = comment("", &self.path);
        for FileLine { line, why } in &self.lines {
            let indent = &line[..line.len() - line.trim_start().len()];
            if !why.is_empty() {
                text += &comment(indent, why);
            }
            text += &format!("{line}\n");
        }
        text
    }
}

/// Prints the files, ready to be copied.
pub(crate) fn print<'a>(files: impl IntoIterator<Item = &'a PlannedFile>) -> io::Result<()> {
    let texts: Vec<_> = files.into_iter().map(PlannedFile::text).collect();
    Stdout::lock().write_all(texts.join("\n").as_bytes())
}

/// Values of each name in templates.
pub(crate) type Values = Vec<(&'static str, Vec<String>)>;

/// Converts an array, an option or a range into the values of a name.
pub(crate) fn all<T: ToString>(values: impl IntoIterator<Item = T>) -> Vec<String> {
    values.into_iter().map(|value| value.to_string()).collect()
}

/// Fills a template. Files without lines are omitted.
pub(crate) fn fill(template: &str, values: &Values) -> Vec<PlannedFile> {
    let mut files = Vec::new();
    for text in template.split("== ").skip(1) {
        let (head, body) = text.split_once('\n').unwrap_or_default();
        let (reader, path) = head.split_once(' ').unwrap_or_default();
        let (Ok(reader), Some(path)) = (ConfigReader::from_str(reader, true), set(path, values, 0))
        else {
            continue;
        };
        let (mut lines, mut why) = (Vec::new(), "");
        for line in body.lines().filter(|line| !line.is_empty()) {
            if let Some(text) = line.strip_prefix("# ") {
                why = text;
                continue;
            }
            let why = std::mem::take(&mut why);
            for at in 0..count(line, values) {
                let (Some(line), Some(reason)) = (set(line, values, at), set(why, values, at))
                else {
                    break;
                };
                // Repeated lines have one reason.
                let is_repeated = at > 0 && set(why, values, 0).as_ref() == Some(&reason);
                let why = if is_repeated { String::new() } else { reason };
                lines.push(FileLine { line, why });
            }
        }
        files.push(PlannedFile {
            path,
            reader,
            lines,
        });
    }
    files.retain(|file| !file.lines.is_empty());
    files
}

/// Names in a line, with their offsets.
fn names(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let name = |(start, _)| {
        let name = line[start + 1..].split('}').next()?;
        let is_name = name
            .chars()
            .all(|c| c.is_ascii_lowercase() || "?_".contains(c));
        is_name.then_some((start, name))
    };
    line.match_indices('{').filter_map(name)
}

fn values_of<'a>(values: &'a Values, name: &str) -> &'a [String] {
    let name = name.trim_start_matches('?');
    let found = values.iter().find(|(known, _)| *known == name);
    found.map_or(&[], |(_, values)| values)
}

/// Number of repetitions of a line.
fn count(line: &str, values: &Values) -> usize {
    let counts = names(line).filter(|(_, name)| !name.starts_with('?'));
    let counts = counts.map(|(_, name)| values_of(values, name).len());
    counts.max().unwrap_or(1)
}

/// Replaces each name by its value at index `at`, or by its last; `None` if a name has no value.
fn set(text: &str, values: &Values, at: usize) -> Option<String> {
    let (mut out, mut end) = (String::new(), 0);
    for (start, name) in names(text) {
        let of_name = values_of(values, name);
        let value = of_name.get(at).or(of_name.last())?;
        out += &text[end..start];
        out += if name.starts_with('?') { "" } else { value };
        end = start + name.len() + 2;
    }
    Some(out + &text[end..])
}
