//! `jumbo bench`: the tables of `jumbo-bench`, with progress on stderr and the figures on stdout.

mod render;

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as _, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use jumbo::units::Bytes;
use jumbo_bench::heap::{self, worker};
use jumbo_bench::{Progress, Settings, child};

use crate::view::{self, Align, View};

/// Measure jumbo against its baselines, side by side in one run
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    table: Option<Table>,
}

#[derive(Debug, Subcommand)]
enum Table {
    /// Allocate, pointer-chase and free: plain, glibc's hugetlb tunable, `jumbo run`; and what jumbo costs
    Heap(Heap),
    /// The program that a table measures
    #[command(subcommand, hide = true)]
    Worker(Worker),
}

#[derive(Debug, clap::Args)]
struct Heap {
    #[command(flatten)]
    common: Common,
    /// Bytes of objects to allocate; 2G, or 256M with --quick
    #[arg(long, value_parser = load_size)]
    size: Option<Bytes>,
}

/// What all tables take.
#[derive(Debug, clap::Args)]
struct Common {
    /// Less work: done in under 50 seconds
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Rounds to measure after the warm-up; 7, or 5 with --quick
    #[arg(long, value_name = "N")]
    rounds: Option<NonZeroUsize>,
}

#[derive(Debug, Subcommand)]
enum Worker {
    Load { size: Bytes },
    Free,
}

/// With fewer the spread says little.
const MIN_ROUNDS: usize = 5;

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.table {
        None => list()?,
        Some(Table::Heap(heap)) => measure_heap(&heap)?,
        Some(Table::Worker(worker)) => work(&worker)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The tables that there are, as the help has them.
fn list() -> anyhow::Result<()> {
    let mut view = View::stdout();
    view.table([("command", Align::Left), ("table", Align::Left)], tables())?;
    Ok(view.finish()?)
}

fn tables() -> Vec<[String; 2]> {
    let command = Args::augment_args(clap::Command::new("bench"));
    let tables = command
        .get_subcommands()
        .filter(|table| !table.is_hide_set());
    tables
        .map(|table| {
            let about = table.get_about().map(ToString::to_string);
            [
                format!("jumbo bench {}", table.get_name()),
                about.unwrap_or_default(),
            ]
        })
        .collect()
}

fn measure_heap(args: &Heap) -> anyhow::Result<()> {
    let default = if args.common.quick {
        256 << 20
    } else {
        2 << 30
    };
    let size = args.size.unwrap_or(Bytes(default));
    let progress = Bar::new();
    let table = heap::measure(&args.common.settings()?, size, &progress).map_err(hinted)?;
    progress.0.finish_and_clear();
    args.common.print(&table)
}

fn work(worker: &Worker) -> anyhow::Result<()> {
    child::die_with_parent();
    let sample = match *worker {
        Worker::Load { size } => serde_json::to_string(&worker::load(size)?)?,
        Worker::Free => serde_json::to_string(&worker::small_free()?)?,
    };
    println!("{sample}");
    Ok(())
}

impl Common {
    fn settings(&self) -> anyhow::Result<Settings> {
        let default = NonZeroUsize::MIN.saturating_add(if self.quick { 4 } else { 6 });
        let rounds = self.rounds.unwrap_or(default);
        if rounds.get() < MIN_ROUNDS {
            eprintln!("jumbo: fewer than {MIN_ROUNDS} rounds: the spread says little");
        }
        Ok(Settings {
            jumbo: std::env::current_exe().context("cannot find the jumbo executable")?,
            rounds,
        })
    }

    fn print(&self, table: &jumbo_bench::table::Table) -> anyhow::Result<()> {
        if self.json {
            return view::json(table);
        }
        let mut view = View::stdout();
        render::show(&mut view, table)?;
        Ok(view.finish()?)
    }
}

/// The error with what to do about it.
fn hinted(error: jumbo_bench::Error) -> anyhow::Error {
    match error.hint() {
        Some(hint) => anyhow::anyhow!("{error}\nhint: {hint}"),
        None => error.into(),
    }
}

fn load_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if size < heap::MIN_SIZE {
        return Err(format!(
            "the least size that can be measured is {}",
            heap::MIN_SIZE
        ));
    }
    Ok(size)
}

/// Progress on stderr: a bar on a terminal, nothing in a pipe.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg} {eta}") {
            bar.set_style(style);
        }
        Self(bar)
    }
}

impl Progress for Bar {
    fn begin(&self, steps: usize) {
        self.0.set_length(steps as u64);
        self.0.enable_steady_tick(Duration::from_secs(1));
    }

    fn step(&self, what: &str) {
        // The step that begins is not done yet.
        if !self.0.message().is_empty() {
            self.0.inc(1);
        }
        self.0.set_message(what.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_the_tables_and_not_the_worker() {
        let commands: Vec<_> = tables().into_iter().map(|[command, _]| command).collect();
        assert_eq!(commands, ["jumbo bench heap"]);
    }

    #[test]
    fn a_load_below_the_least_size_is_refused() {
        assert_eq!(load_size("2G"), Ok(Bytes(2 << 30)));
        assert!(load_size("1M").unwrap_err().contains("32 MiB"));
        assert!(load_size("much").is_err());
    }
}
