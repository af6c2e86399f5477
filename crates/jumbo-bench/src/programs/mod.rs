//! `jumbo bench programs`: real programs, plain against every mode of ours and every allocator that a user would preload.
//!
//! `list` has the programs. What is not installed is missing from the table, with what installs it; so is a program that fails,
//! and of one that fails in some way alone the figures of that way.
//! Each has a folder of its own, in TMPDIR or /var/tmp, which goes with the table.
//!
//! Losses stand in the table as gains do.

mod list;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex_lite::{Captures, Regex};
use tempfile::TempDir;

use crate::group::Group;
use crate::launch::on_path;
use crate::program::{Notes, Program, Server, Way};
use crate::table::Table;
use crate::{Error, Settings, group};
use list::{Entry, FILES, PROGRAMS};

/// The row that holds against the best of all peers.
const BEST: (&str, &str) = ("hashmap", "hashmap_vs_best_peer");

/// The names of the programs that there are, and what each does.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    PROGRAMS.iter().map(|entry| (&*entry.key, &*entry.what))
}

/// A program that is ready to be measured.
struct Ready {
    entry: &'static Entry,
    program: Program,
    notes: Notes,
    /// Goes when this is dropped.
    _folder: TempDir,
}

/// Measures the programs of those names, or all, in those ways; with less to do where `quick` is set.
///
/// # Errors
/// [`Error`].
pub fn measure(
    settings: &Settings,
    names: &[String],
    ways: &[Way],
    quick: bool,
) -> Result<Table, Error> {
    let mut table = Table::new("programs", "real programs".to_owned(), settings)?;
    let mut all = Vec::new();
    let is_wanted = |entry: &&Entry| names.is_empty() || names.contains(&entry.key);
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
        group_of(settings, what, &ready.notes, ways)
    });
    let mut table = group::measure(settings, table, groups.collect())?;
    let (key, name) = BEST;
    let against = ways
        .iter()
        .filter_map(|way| table.ratio_of(&way.peer_row(key)?));
    let best = against.min_by(|one, other| one.median.total_cmp(&other.median));
    if let Some(best) = best {
        table.also(name.to_owned(), best);
    }
    Ok(table)
}

fn group_of<'a>(
    settings: &'a Settings,
    (key, program): (&'static str, &'a Program),
    notes: &'a Notes,
    ways: &'a [Way],
) -> Group<'a> {
    let mut group = notes.group(settings, program, key, key, ways);
    group.optional = |error| !matches!(error, Error::Interrupted(_));
    // Without plain runs there is nothing to compare with; without another way there are the others.
    group.spare = 1..1 + ways.len();
    group
}

impl Entry {
    /// Whether it is installed, and all that comes before it is measured.
    fn ready(&'static self, quick: bool) -> Result<Ready, Error> {
        let absent = |what: &str| Error::Way(format!("no {what}; hint: {}", self.hint()));
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
        let other = match is_root {
            true => "setpriv --reuid=postgres --regid=postgres --clear-groups",
            false => "",
        };
        let size = self.size[usize::from(quick)].to_string();
        let words = [
            ("SIZE", size.as_str()),
            ("FOLDER", &folder.path().to_string_lossy()),
            ("BIN", &bin.to_string_lossy()),
            ("PYTHON", &python),
            ("USER", if is_root { "root" } else { "" }),
            ("AS", other),
        ];
        let filled = |text: &str| replaced(text, &words);
        for (name, text) in FILES.iter().filter(|(name, _)| *name == self.file) {
            let path = folder.path().join(name);
            let written = fs::write(&path, filled(text));
            written.map_err(|error| Error::Program(path.display().to_string(), error))?;
        }
        // A word that becomes several, or none, is a command.
        let words = self.run.iter().flat_map(|word| match word.as_str() {
            "AS" => other.split_whitespace().map(str::to_owned).collect(),
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
            server: self.serves.as_ref().map(|serves| Server {
                ready: Some(filled(&serves.ready)),
                setup: Some(filled(&serves.setup)).filter(|setup| !setup.is_empty()),
                load: Some(filled(&serves.load)),
                says: serves.says,
                ..Server::default()
            }),
            must_succeed: true,
            ..Program::default()
        };
        if !self.once.is_empty() {
            program.shell(&filled(&self.once))?;
        }
        Ok(Ready {
            entry: self,
            program,
            notes: Notes::default(),
            _folder: folder,
        })
    }

    fn hint(&self) -> String {
        match self.install.starts_with("pip") {
            true => self.install.clone(),
            false => format!("apt install {}", self.install),
        }
    }
}

/// `text` with values in place of these words, where they are no part of a longer word in capitals.
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

/// Where a program is: on the PATH, or where Debian has those of servers.
fn find(program: &str) -> Option<PathBuf> {
    let servers = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let mut servers: Vec<_> = servers.map(|version| version.path().join("bin")).collect();
    servers.sort_unstable();
    // Wrappers of the same names are on the PATH.
    let server = servers.iter().rev().map(|folder| folder.join(program));
    let server = server.into_iter().find(|path| path.is_file());
    server.or_else(|| on_path(program, std::iter::once("/usr/sbin".into())))
}

/// A Python that has a module: the interpreter itself, not a shim that starts it.
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
    use crate::table::Missing;

    #[test]
    fn words_are_replaced_where_they_stand_alone() {
        let words = [("SIZE", "9"), ("AS", "y SIZE")];
        assert_eq!(
            replaced("-n SIZE0 SIZES to_SIZE", &words),
            "-n 90 SIZES to_9"
        );
        assert_eq!(replaced("AS x -DBASE AS", &words), "y SIZE x -DBASE y SIZE");
    }

    #[test]
    fn a_way_in_which_a_program_fails_has_no_figures_and_says_why() {
        let (settings, notes) = (Settings::for_tests(), Notes::default());
        let ways = [Way::peer("tunable").unwrap()];
        let script = "echo no such luck >&2; test -z \"$GLIBC_TUNABLES\"";
        let program = Program {
            words: ["sh", "-c", script].map(Into::into).to_vec(),
            must_succeed: true,
            ..Program::default()
        };
        let group = group_of(&settings, ("x", &program), &notes, &ways);
        let table = Table::new("t", String::new(), &settings).unwrap();
        let table = group::measure(&settings, table, vec![group]).unwrap();
        assert!(table.ratio_of("x_aa").is_some());
        assert!(table.ratio_of(&ways[0].row("x")).is_none());
        let Missing { what, why } = &table.missing[0];
        assert_eq!(*what, "x");
        for part in ["hugetlb=1: ", "exit status: 1", "no such luck"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn what_is_not_installed_says_what_installs_it() {
        assert!(find("no-such-program").is_none() && find("sh").is_some());
        assert!(interpreter("no_such_module").is_none());
        let refused = |needs: &[&str], install: &str| {
            let entry: &'static Entry = Box::leak(Box::new(Entry {
                needs: needs.iter().copied().map(String::from).collect(),
                install: install.to_owned(),
                ..Entry::default()
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
