//! `jumbo bench all`: all tables in turn, in one JSON document and one HTML page.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::Context as _;
use clap::Parser;
use clap::builder::PossibleValuesParser;
use indicatif::ProgressStyle;
use jumbo_bench::machine::{Machine, knobs};
use jumbo_bench::{interrupt, table};
use jumbo_host::kernel::Root;
use jumbo_host::whole_file::{self, Existing};
use serde::Serialize;

use super::{Table, bar, hinted};
use crate::page;
use crate::signal::end_by;
use crate::value::positive;
use crate::view::{View, escaped, tell};

/// Tables in turn.
const TABLES: [&str; 12] = [
    "heap", "free", "exit", "pool", "text", "files", "populate", "shmem", "vmemmap", "fork",
    "latency", "programs",
];

/// Programs with --quick: all programs would take a quarter of an hour.
const QUICK_PROGRAMS: [&str; 7] = [
    "hashmap",
    "graph",
    "python",
    "redis_fork",
    "sqlite",
    "sort",
    "zstd",
];

/// A table that cannot be measured here is reported with the reason, and the next follows. Files
/// are written atomically after each table. After an interrupt they have the tables measured so
/// far, and are marked as incomplete.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Less work: under eight minutes on a quiet machine with 2 processors; of `programs` a few
    #[arg(long)]
    quick: bool,
    /// Rounds to measure after the warm-up; 7, or 5 with --quick
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>, allow_negative_numbers = true)]
    rounds: Option<NonZeroUsize>,
    /// Write a page with all tables and plots; it needs no other file and no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write all tables as one JSON document
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only these tables
    #[arg(long, value_name = "TABLE,...", value_delimiter = ',', hide_possible_values = true,
        value_parser = PossibleValuesParser::new(TABLES))]
    only: Vec<String>,
    /// Skip these tables
    #[arg(long, value_name = "TABLE,...", value_delimiter = ',', hide_possible_values = true,
        value_parser = PossibleValuesParser::new(TABLES))]
    skip: Vec<String>,
}

/// All results, for JSON and HTML.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    pub(crate) version: &'static str,
    /// Start, in seconds since 1970.
    pub(crate) began: u64,
    pub(crate) seconds: f64,
    pub(crate) quick: bool,
    /// Whether all tables were tried without an interruption.
    pub(crate) complete: bool,
    /// State before the first table.
    pub(crate) machine: Machine,
    /// Values by the path of the kernel's file.
    pub(crate) knobs: BTreeMap<String, String>,
    pub(crate) tables: Vec<Measured>,
    pub(crate) not_measured: Vec<NotMeasured>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    #[serde(flatten)]
    pub(crate) table: table::Table,
    pub(crate) seconds: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct NotMeasured {
    pub(crate) table: &'static str,
    pub(crate) why: String,
}

#[derive(Parser)]
struct TableCommand {
    #[command(subcommand)]
    table: Table,
}

pub(super) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let html = args.html.as_deref().map(page::target).transpose()?;
    let json = args.json.as_deref().map(page::target).transpose()?;
    anyhow::ensure!(
        html.is_none() || html != json,
        "--html and --json name the same file"
    );
    let is_wanted = |name: &str| {
        let named = |names: &[String]| names.iter().any(|it| it == name);
        (args.only.is_empty() || named(&args.only)) && !named(&args.skip)
    };
    let wanted: Vec<_> = TABLES.into_iter().filter(|name| is_wanted(name)).collect();
    anyhow::ensure!(
        !wanted.is_empty(),
        "no table is left\nhint: name others with --only, or fewer with --skip"
    );
    let (root, clock) = (Root::host(), Instant::now());
    let began = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut document = Document {
        version: env!("CARGO_PKG_VERSION"),
        began: began.unwrap_or_default().as_secs(),
        seconds: 0.0,
        quick: args.quick,
        complete: false,
        machine: Machine::read(&root)?,
        knobs: knobs(&root),
        tables: Vec::new(),
        not_measured: Vec::new(),
    };
    let bar = bar();
    if let Ok(style) = ProgressStyle::with_template("{bar:20} {prefix}: {wide_msg} {eta}") {
        bar.set_style(style);
    }
    interrupt::watch();
    for (at, &name) in wanted.iter().enumerate() {
        if interrupt::asked().is_some() {
            break;
        }
        let (number, all) = (at + 1, wanted.len());
        bar.reset();
        bar.set_length(0);
        bar.set_prefix(format!("{name}, {number} of {all}"));
        if bar.is_hidden() {
            tell(&format!("{name}, table {number} of {all}"));
        }
        let start = Instant::now();
        let table = args.table(name)?;
        let settings = table.common().settings(bar.clone())?;
        let measured = table.measure(&settings);
        let seconds = start.elapsed().as_secs_f64();
        document.seconds = clock.elapsed().as_secs_f64();
        match measured.map_err(hinted) {
            Ok(measured) => {
                let mut view = View::default();
                view.heading(name);
                table.show(&mut view, &measured);
                view.print()?;
                document.tables.push(Measured {
                    table: measured,
                    seconds,
                });
            }
            // The signal probably caused the error.
            Err(_) if interrupt::asked().is_some() => {}
            Err(why) => {
                let why = why.to_string();
                tell(&format!("{name} was not measured: {why}"));
                document.not_measured.push(NotMeasured { table: name, why });
            }
        }
        document.complete = number == all && interrupt::asked().is_none();
        write(&document, html.as_deref(), json.as_deref())?;
    }
    if let Some(signal) = interrupt::asked() {
        return Ok(end_by(signal));
    }
    anyhow::ensure!(!document.tables.is_empty(), "no table could be measured");
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Parses the command line of one table, for its default sizes.
    fn table(&self, name: &str) -> anyhow::Result<Table> {
        let mut words = vec!["bench".to_owned(), name.to_owned()];
        words.extend(self.quick.then(|| "--quick".to_owned()));
        words.extend(self.rounds.map(|rounds| format!("--rounds={rounds}")));
        if self.quick && name == "programs" {
            words.extend(QUICK_PROGRAMS.map(str::to_owned));
        }
        Ok(TableCommand::try_parse_from(words)?.table)
    }
}

fn write(document: &Document, html: Option<&Path>, json: Option<&Path>) -> anyhow::Result<()> {
    let put = |path: Option<&Path>, text: &dyn Fn() -> anyhow::Result<String>| match path {
        Some(path) => whole_file::write(path, text()?.as_bytes(), 0o644, Existing::Publish)
            .with_context(|| format!("cannot write {}", path.display())),
        None => Ok(()),
    };
    put(json, &|| {
        Ok(escaped(serde_json::to_string_pretty(document)?) + "\n")
    })?;
    put(html, &|| Ok(page::bench(document)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_all_tables() {
        let all = ["all"].into_iter().chain(TABLES);
        let all: Vec<_> = all.map(|name| format!("jumbo bench {name}")).collect();
        let listed = super::super::tables().into_iter();
        assert_eq!(listed.map(|[command, _]| command).collect::<Vec<_>>(), all);
        let args = TableCommand::try_parse_from(["bench", "heap"]).map(|one| one.table);
        assert!(matches!(args, Ok(Table::Heap(_))));
    }
}
