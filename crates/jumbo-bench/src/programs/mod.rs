//! `jumbo bench programs`: real programs, plain, in each mode of jumbo, and with each allocator
//! that a user would preload.
//!
//! The table reports programs that are not installed, with the command that installs them, programs
//! that fail, and single ways in which a program fails. Each program has a temporary folder in
//! TMPDIR or /var/tmp.

mod list;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use jumbo_host::whole_file::{self, Existing};
use regex_lite::{Captures, Regex};
use tempfile::TempDir;

use crate::group::Group;
use crate::launch::on_path;
use crate::program::{Observations, Program, Server, Way};
use crate::table::Table;
use crate::{Error, Settings, group};
use list::{FILES, PROGRAMS, ProgramEntry};

/// Names of the programs, and their descriptions.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    PROGRAMS.iter().map(|entry| (&*entry.key, &*entry.what))
}

struct PreparedProgram {
    entry: &'static ProgramEntry,
    program: Program,
    observations: Observations,
    _folder: TempDir,
}

/// Measures the named programs, or all, in those ways; `quick` reduces their work.
pub fn measure(
    settings: &Settings,
    names: &[String],
    ways: &[Way],
    quick: bool,
) -> Result<Table, Error> {
    let mut table = Table::new("programs", "real programs".to_owned(), settings)?;
    let mut all = Vec::new();
    let is_wanted = |entry: &&ProgramEntry| names.is_empty() || names.contains(&entry.key);
    for entry in PROGRAMS.iter().filter(is_wanted) {
        settings
            .progress
            .set_message(format!("preparing {}", entry.key));
        match entry.ready(quick) {
            Ok(ready) => all.push(ready),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Err(why) => table.missing(&entry.key, why.to_string()),
        }
    }
    let groups = all.iter().map(|ready| {
        let what = (&*ready.entry.key, &ready.program);
        group_of(settings, what, &ready.observations, ways)
    });
    group::measure(settings, table, groups.collect())
}

fn group_of<'a>(
    settings: &'a Settings,
    (key, program): (&'static str, &'a Program),
    observations: &'a Observations,
    ways: &'a [Way],
) -> Group<'a> {
    let mut group = observations.group(settings, program, key, key, ways);
    group.optional = |error| !matches!(error, Error::Interrupted(_));
    // The plain side is required; any other may be missing.
    group.spare = 1..1 + ways.len();
    group
}

impl ProgramEntry {
    /// Checks the requirements and does all that precedes the measurement.
    fn ready(&'static self, quick: bool) -> Result<PreparedProgram, Error> {
        let absent = |what: &str| {
            let apt = match self.install.starts_with("pip") {
                true => "",
                false => "apt install ",
            };
            Error::Way(format!("no {what}; hint: {apt}{}", self.install))
        };
        let mut bin = None;
        let mut python = String::new();
        for need in &self.needs {
            if let Some(module) = need.strip_prefix("python:") {
                python = interpreter(module).ok_or_else(|| absent(&format!("module {module}")))?;
                continue;
            }
            let path = find(need).ok_or_else(|| absent(need))?;
            if need == "python3" {
                python = interpreter("sys").ok_or_else(|| absent(need))?;
            }
            bin.get_or_insert(path);
        }
        let folder = folder()?;
        let bin = bin
            .as_deref()
            .and_then(Path::parent)
            .unwrap_or(Path::new("/"));
        let is_root = rustix::process::geteuid().is_root();
        let drop_root = match is_root {
            true => "setpriv --reuid=postgres --regid=postgres --clear-groups",
            false => "",
        };
        let size = self.size[usize::from(quick)].to_string();
        let words = [
            ("SIZE", size.as_str()),
            ("KEY", &self.key),
            ("FOLDER", &folder.path().to_string_lossy()),
            ("BIN", &bin.to_string_lossy()),
            ("PYTHON", &python),
            ("USER", if is_root { "root" } else { "" }),
            ("AS", drop_root),
        ];
        let filled = |text: &str| replaced(text, &words);
        for (name, text) in FILES.iter().filter(|(name, _)| *name == self.file) {
            let path = folder.path().join(name);
            let written = whole_file::write(&path, filled(text).as_bytes(), 0o644, Existing::Keep);
            written.map_err(|error| Error::Program(path.display().to_string(), error))?;
        }
        // The word AS becomes several words, or none.
        let words = self.run.iter().flat_map(|word| match word.as_str() {
            "AS" => drop_root.split_whitespace().map(str::to_owned).collect(),
            word => vec![filled(word)],
        });
        let words = words.filter(|word| !word.ends_with("--user="));
        let mut words: Vec<_> = words.map(Into::into).collect();
        if let Some(path) = words
            .first()
            .and_then(|first: &std::ffi::OsString| find(first.to_str()?))
        {
            words[0] = path.into();
        }
        let program = Program {
            words,
            folder: Some(folder.path().to_owned()),
            server: (!self.load.is_empty()).then(|| Server {
                ready: Some(filled(&self.ready)),
                setup: Some(filled(&self.setup)).filter(|setup| !setup.is_empty()),
                load: Some(filled(&self.load)),
                says: self.says,
                ..Server::default()
            }),
            must_succeed: true,
            ..Program::default()
        };
        if !self.once.is_empty() {
            program.shell(&filled(&self.once))?;
        }
        Ok(PreparedProgram {
            entry: self,
            program,
            observations: Observations::default(),
            _folder: folder,
        })
    }
}

/// Replaces these words in `text`, unless they are part of a longer word in capitals.
fn replaced(text: &str, words: &[(&str, &str)]) -> String {
    let value = |found: &Captures<'_>| {
        let known = words.iter().find(|(word, _)| *word == &found[0]);
        known.map_or_else(|| found[0].to_owned(), |(_, value)| (*value).to_owned())
    };
    let capitals = Regex::new("[A-Z]+");
    capitals.map_or_else(
        |_| text.to_owned(),
        |all| all.replace_all(text, value).into_owned(),
    )
}

/// Finds a program in Debian's folders of PostgreSQL, or in the PATH.
fn find(program: &str) -> Option<PathBuf> {
    let servers = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let mut servers: Vec<_> = servers.map(|version| version.path().join("bin")).collect();
    servers.sort_unstable();
    // The PATH has wrappers of the same names.
    let server = servers.iter().rev().map(|folder| folder.join(program));
    let server = server.into_iter().find(|path| path.is_file());
    server.or_else(|| on_path(program, std::iter::once("/usr/sbin".into())))
}

/// Finds a Python interpreter that has the module: the interpreter, not a shim.
fn interpreter(module: &str) -> Option<String> {
    ["python3", "/usr/bin/python3"]
        .into_iter()
        .find_map(|python| {
            let script = format!("import sys, {module}; print(sys.executable)");
            let output = Command::new(python).args(["-c", &script]).output().ok()?;
            let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
            Some(path).filter(|path| output.status.success() && !path.is_empty())
        })
}

fn folder() -> Result<TempDir, Error> {
    let base = crate::on_disk();
    let folder = tempfile::Builder::new()
        .prefix("jumbo-bench-")
        .tempdir_in(&base);
    folder.map_err(|error| Error::Program(base.display().to_string(), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{Launch, Peer};
    use crate::table::Missing;

    #[test]
    fn only_whole_words_are_replaced() {
        let words = [("SIZE", "9"), ("AS", "y SIZE")];
        assert_eq!(
            replaced("-n SIZE0 SIZES to_SIZE", &words),
            "-n 90 SIZES to_9"
        );
        assert_eq!(replaced("AS x -DBASE AS", &words), "y SIZE x -DBASE y SIZE");
    }

    #[test]
    fn a_failing_way_is_missing_with_its_reason() {
        let (settings, observations) = (Settings::for_tests(), Observations::default());
        let peer = Peer {
            name: "fails",
            library: std::path::PathBuf::new(),
            set: &[("FAILS", "1")],
        };
        let ways = [Way::of("peer_fails", Launch::Preload(peer))];
        let script = "echo no such luck >&2; test -z \"$FAILS\"";
        let program = Program {
            words: ["sh", "-c", script].map(Into::into).to_vec(),
            must_succeed: true,
            ..Program::default()
        };
        let group = group_of(&settings, ("x", &program), &observations, &ways);
        let table = Table::new("t", String::new(), &settings).unwrap();
        let table = group::measure(&settings, table, vec![group]).unwrap();
        assert!(table.ratio_of("x_aa").is_some());
        assert!(table.ratio_of(&ways[0].row("x")).is_none());
        let Missing { what, why } = &table.missing[0];
        assert_eq!(*what, "x");
        for part in ["fails: ", "exit status: 1", "no such luck"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn a_missing_program_has_an_install_hint() {
        assert!(find("no-such-program").is_none() && find("sh").is_some());
        assert!(interpreter("no_such_module").is_none());
        let refused = |needs: &[&str], install: &str| {
            let entry: &'static ProgramEntry = Box::leak(Box::new(ProgramEntry {
                needs: needs.iter().copied().map(String::from).collect(),
                install: install.to_owned(),
                ..ProgramEntry::default()
            }));
            let Err(error) = entry.ready(true) else {
                panic!("{needs:?} is there");
            };
            error.to_string()
        };
        assert_eq!(
            refused(&["sh", "no-such-program"], "a-package"),
            "no no-such-program; hint: apt install a-package"
        );
        assert_eq!(
            refused(&["python:no_such_module"], "pip install it"),
            "no module no_such_module; hint: pip install it"
        );
    }
}
