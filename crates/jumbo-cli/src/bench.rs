//! `jumbo bench`: the tables of `jumbo-bench`, with progress on stderr and results on stdout.

pub(crate) mod all;
mod programs;
pub(crate) mod render;

use std::num::{NonZeroU32, NonZeroUsize};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args as _, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use jumbo::units::Bytes;
use jumbo_bench::{
    Error, Settings, exit, files, fork, free, heap, interrupt, latency, pool, populate, shmem,
    table, text, vmemmap, worker,
};
use jumbo_host::policy::MAX_FREE_WORKERS;

use crate::signal::end_by;
use crate::value::positive;
use crate::view::{self, View};

/// Measure jumbo against its baselines, side by side in one run
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo bench                        # which tables there are
  jumbo bench heap --quick
  jumbo bench pool --json >pool.json
  jumbo bench all --quick --html bench.html

Exit status: 0 measured; 1 failed; 2 wrong usage; 128+N signal N ended it.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Every table in turn, in one page and one JSON document
    All(all::Args),
    #[command(flatten)]
    Table(Table),
    /// The program that a table measures
    #[command(hide = true)]
    Worker { task: String },
}

#[derive(Debug, Subcommand)]
enum Table {
    /// Allocate, pointer-chase and free: plain, and `jumbo run`; and what jumbo costs
    #[command(mut_arg("size", |size| size.help("Bytes of objects to allocate; 2G, or 256M with --quick")))]
    Heap(Sized<{ heap::MIN_SIZE.0 }, { 2 << 30 }, { 256 << 20 }>),
    /// Free a large block: by one thread, by several, in the background; and what must not become
    /// slower
    #[command(mut_arg("size", |size| size.help("Bytes of the block; 8G, or 256M with --quick")))]
    Free(Free),
    /// End a large process: until `waitpid` returns, and until its memory is back
    #[command(mut_arg("size", |size| size.help("Bytes of memory that the process has; 8G, or 128M with --quick")))]
    Exit(Sized<{ exit::MIN_SIZE.0 }, { 8 << 30 }, { 128 << 20 }>),
    /// Use pages that a pool has, pages that it gets on demand, and pages without a pool
    #[command(mut_arg("size", |size| size.help("Bytes of STREAM's three arrays; 1536M, or 48M with --quick")))]
    Pool(Sized<{ pool::MIN_SIZE.0 }, { 1536 << 20 }, { 48 << 20 }>),
    /// Call functions of a program with much text: on 4 KiB pages, and on huge ones of each kind
    #[command(mut_arg("size", |size| size.help("Bytes of text; 256M, or 64M with --quick")))]
    Text(Sized<{ text::MIN_SIZE.0 }, { 256 << 20 }, { 64 << 20 }>),
    /// Read a data file that a program maps: in 4 KiB pages of the page cache, and primed
    #[command(mut_arg("size", |size| size.help("Bytes of the file; 2G, or 128M with --quick")))]
    Files(Sized<{ files::MIN_SIZE.0 }, { 2 << 30 }, { 128 << 20 }>),
    /// Make memory resident by one call: in 4 KiB pages, in huge ones by one thread, by `jumbo run`
    #[command(mut_arg("size", |size| size.help("Bytes of memory; 4G, or 256M with --quick")))]
    Populate(Sized<{ populate::MIN_SIZE.0 }, { 4 << 30 }, { 256 << 20 }>),
    /// Touch shared memory: in 4 KiB pages, in folios of each size, on hugetlb pages
    #[command(mut_arg("size", |size| size.help("Bytes of shared memory; 1G, or 64M with --quick")))]
    Shmem(Sized<{ shmem::MIN_SIZE.0 }, { 1 << 30 }, { 64 << 20 }>),
    /// Describe huge pages: with all descriptors, and with those of huge pages freed
    Vmemmap(Common),
    /// Fork a large process: how long the call takes, and the first writes after it
    Fork(Fork),
    /// Touch new allocations, one by one: plain, and `jumbo run`; in the median and at worst
    #[command(mut_arg("size", |size| size.help("Bytes of all allocations, each of 1 MiB; 3G, or 256M with --quick")))]
    Latency(Sized<{ latency::MIN_SIZE.0 }, { 3 << 30 }, { 256 << 20 }>),
    /// Run real programs: plain, `jumbo run` in its modes, glibc's tunable, jemalloc, tcmalloc, mimalloc
    Programs(programs::Args),
}

/// Options of a table with a size: the minimum, the default, and the default with --quick. The help
/// is at the table.
#[derive(Debug, clap::Args)]
struct Sized<const MIN: u64, const FULL: u64, const QUICK: u64> {
    #[command(flatten)]
    common: Common,
    #[arg(long, value_parser = |text: &str| at_least(Bytes(MIN), text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

impl<const MIN: u64, const FULL: u64, const QUICK: u64> Sized<MIN, FULL, QUICK> {
    fn size(&self) -> Bytes {
        let default = if self.common.quick { QUICK } else { FULL };
        self.size.unwrap_or(Bytes(default))
    }
}

#[derive(Debug, clap::Args)]
struct Free {
    #[command(flatten)]
    sized: Sized<{ free::MIN_SIZE.0 }, { 8 << 30 }, { 256 << 20 }>,
    /// Number of threads that free it: a row for each number; 1,2 with --quick
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32",
        default_value_if("quick", "true", "1,2"),
        value_parser = workers,
        allow_negative_numbers = true
    )]
    workers: Vec<NonZeroU32>,
}

#[derive(Debug, clap::Args)]
struct Fork {
    #[command(flatten)]
    common: Common,
    /// Bytes of the process, rows for each; 256M with --quick. Sizes beyond the free memory are
    /// left out
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "1G,2G,4G,8G",
        default_value_if("quick", "true", "256M"),
        value_parser = |text: &str| at_least(fork::MIN_SIZE, text),
        allow_hyphen_values = true
    )]
    size: Vec<Bytes>,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// Less work: done in under 30 seconds on a quiet machine, `latency` and each of `programs` in
    /// some 80
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Rounds to measure after the warm-up; 7, or 5 with --quick
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>, allow_negative_numbers = true)]
    rounds: Option<NonZeroUsize>,
}

/// Minimum number of rounds for a meaningful spread.
pub(crate) const MIN_ROUNDS: usize = 5;

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        None => list()?,
        Some(Command::All(args)) => return all::main(&args),
        Some(Command::Table(table)) => return table.run(),
        Some(Command::Worker { task }) => worker::run(&task)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Table {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let common = self.common();
        let settings = common.settings(bar())?;
        // They leave servers, or a file, behind.
        if matches!(self, Self::Programs(_) | Self::Files(_)) {
            interrupt::watch();
        }
        let table = self.measure(&settings);
        settings.progress.finish_and_clear();
        if let Some(signal) = interrupt::asked() {
            return Ok(end_by(signal));
        }
        let table = table.map_err(hinted)?;
        view::page(common.json, &table, |view, table| self.show(view, table))
    }

    fn common(&self) -> &Common {
        match self {
            Self::Heap(Sized { common, .. })
            | Self::Free(Free {
                sized: Sized { common, .. },
                ..
            })
            | Self::Exit(Sized { common, .. })
            | Self::Pool(Sized { common, .. })
            | Self::Text(Sized { common, .. })
            | Self::Files(Sized { common, .. })
            | Self::Populate(Sized { common, .. })
            | Self::Shmem(Sized { common, .. })
            | Self::Vmemmap(common)
            | Self::Fork(Fork { common, .. })
            | Self::Latency(Sized { common, .. })
            | Self::Programs(programs::Args { common, .. }) => common,
        }
    }

    fn measure(&self, settings: &Settings) -> Result<table::Table, Error> {
        let quick = self.common().quick;
        match self {
            Self::Heap(it) => heap::measure(settings, it.size()),
            Self::Free(it) => free::measure(settings, it.sized.size(), &it.workers),
            Self::Exit(it) => exit::measure(settings, it.size()),
            Self::Pool(it) => pool::measure(settings, it.size(), quick),
            Self::Text(it) => text::measure(settings, it.size(), quick),
            Self::Files(it) => files::measure(settings, it.size()),
            Self::Populate(it) => populate::measure(settings, it.size()),
            Self::Shmem(it) => shmem::measure(settings, it.size()),
            Self::Vmemmap(_) => vmemmap::measure(settings, quick),
            Self::Fork(it) => fork::measure(settings, &it.size),
            Self::Latency(it) => latency::measure(settings, it.size(), quick),
            Self::Programs(it) => it.measure(settings),
        }
    }

    fn show(&self, view: &mut View, table: &table::Table) {
        match self {
            Self::Programs(it) => it.show(view, table),
            _ => render::show(view, table),
        }
    }
}

/// Lists all tables, as in the help.
fn list() -> anyhow::Result<()> {
    let mut view = View::default();
    view.table("<command|<table", tables());
    Ok(view.print()?)
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

impl Common {
    fn settings(&self, progress: ProgressBar) -> anyhow::Result<Settings> {
        let default = NonZeroUsize::MIN.saturating_add(if self.quick { 4 } else { 6 });
        let rounds = self.rounds.unwrap_or(default);
        if rounds.get() < MIN_ROUNDS {
            eprintln!("jumbo: fewer than {MIN_ROUNDS} rounds: the spread says little");
        }
        Ok(Settings {
            jumbo: std::env::current_exe().context("cannot find the jumbo executable")?,
            rounds,
            progress,
            line: None,
        })
    }
}

pub(crate) fn hinted(error: Error) -> anyhow::Error {
    match error.hint() {
        Some(hint) => anyhow::anyhow!("{error}\nhint: {hint}"),
        None => error.into(),
    }
}

fn at_least(min: Bytes, text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if size < min {
        return Err(format!("the least size that can be measured is {min}"));
    }
    Ok(size)
}

fn workers(text: &str) -> Result<NonZeroU32, String> {
    let workers: NonZeroU32 = positive(text)?;
    if workers.get() > MAX_FREE_WORKERS {
        return Err(format!("at most {MAX_FREE_WORKERS} threads free at once"));
    }
    Ok(workers)
}

/// Makes a progress bar on stderr, hidden in a pipe.
pub(crate) fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg} {eta} left") {
        bar.set_style(style);
    }
    let weak = bar.downgrade();
    let tick = move || loop {
        std::thread::sleep(std::time::Duration::from_secs(1));
        match weak.upgrade() {
            Some(bar) if !bar.is_finished() => bar.tick(),
            _ => break,
        }
    };
    if !bar.is_hidden() {
        // indicatif's own ticker panics where no thread can be made.
        let _ = std::thread::Builder::new().spawn(tick);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_sizes_have_bounds() {
        assert!(workers("1").is_ok() && workers("64").is_ok());
        for (wrong, why) in [
            ("0", "at least 1"),
            ("-1", "at least 1"),
            ("65", "at most 64"),
        ] {
            assert!(workers(wrong).unwrap_err().contains(why), "{wrong}");
        }
        let min = Bytes(32 << 20);
        assert_eq!(at_least(min, "2G"), Ok(Bytes(2 << 30)));
        assert!(at_least(min, "1M").unwrap_err().contains("32 MiB"));
        assert!(at_least(min, "much").is_err());
    }
}
