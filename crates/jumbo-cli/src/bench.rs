//! `jumbo bench`: the tables of `jumbo-bench`, with progress on stderr and the figures on stdout.

pub(crate) mod all;
mod programs;
pub(crate) mod render;

use std::io;
use std::num::{NonZeroU32, NonZeroUsize};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args as _, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use jumbo::units::Bytes;
use jumbo_bench::{
    Error, Settings, exit, fork, free, heap, interrupt, latency, pool, shmem, table, text, vmemmap,
    worker,
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
    /// Allocate, pointer-chase and free: plain, glibc's hugetlb tunable, `jumbo run`; and what jumbo costs
    Heap(Heap),
    /// Free a large block: by one thread, by several, in the background; and what must not become slower
    Free(Free),
    /// End a large process: until `waitpid` returns, and until its memory is back
    Exit(Exit),
    /// Use pages that a pool has, pages that it gets on demand, and pages without a pool
    Pool(Pool),
    /// Call functions of a program with much text: on 4 KiB pages, and on huge ones of each kind; and real programs
    Text(Text),
    /// Touch shared memory: in 4 KiB pages, in folios of each size, on hugetlb pages; and PostgreSQL, whose buffers it is
    Shmem(Shmem),
    /// Describe huge pages: with descriptors that are all there, and with those of huge pages given back
    Vmemmap(Vmemmap),
    /// Fork a large process: how long the call takes, and the first writes after it
    Fork(Fork),
    /// Touch new allocations, one by one: plain, glibc's hugetlb tunable, `jumbo run`; in the median and at worst
    Latency(Latency),
    /// Run real programs: plain, `jumbo run` in its modes, glibc's tunable, jemalloc, tcmalloc, mimalloc
    Programs(programs::Args),
}

#[derive(Debug, clap::Args)]
struct Heap {
    #[command(flatten)]
    common: Common,
    /// Bytes of objects to allocate; 2G, or 256M with --quick
    #[arg(long, value_parser = |text: &str| at_least(heap::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

#[derive(Debug, clap::Args)]
struct Free {
    #[command(flatten)]
    common: Common,
    /// Bytes of the block; 8G, or 256M with --quick
    #[arg(long, value_parser = |text: &str| at_least(free::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
    /// How many threads free it: a row for each number; 1,2 with --quick
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
struct Exit {
    #[command(flatten)]
    common: Common,
    /// Bytes of memory that the process has; 8G, or 128M with --quick
    #[arg(long, value_parser = |text: &str| at_least(exit::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

/// With the right to set the kernel's pool of 2 MiB pages (root), it is set for each sample and put back in the
/// end, also when this is interrupted or killed. Without, what needs it is left out, and said so.
#[derive(Debug, clap::Args)]
struct Pool {
    #[command(flatten)]
    common: Common,
    /// Bytes of STREAM's three arrays; 1536M, or 48M with --quick
    #[arg(long, value_parser = |text: &str| at_least(pool::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

/// The program is made for it, twice, and twice a smaller one, in the folder that TMPDIR names, or /var/tmp; nothing is left of
/// them. Its text is on huge pages of the page cache where that folder is on a file system that has them (ext4, xfs).
#[derive(Debug, clap::Args)]
struct Text {
    #[command(flatten)]
    common: Common,
    /// Bytes of text; 256M, or 64M with --quick
    #[arg(long, value_parser = |text: &str| at_least(text::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

/// With the right to set the kernel's controls of shared memory and its pool of 2 MiB pages (root), they are set for each sample and
/// put back in the end, also when this is interrupted or killed. Without, what needs them is left out, and said so.
///
/// PostgreSQL's database is made for it in the folder that TMPDIR names, or /var/tmp, by the user postgres where this is root;
/// nothing is left of it.
#[derive(Debug, clap::Args)]
struct Shmem {
    #[command(flatten)]
    common: Common,
    /// Bytes of shared memory, and of PostgreSQL's buffers; 1G; with --quick 64M, and neither PostgreSQL nor 32 threads
    #[arg(long, value_parser = |text: &str| at_least(shmem::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

/// No memory stands behind what is described: this takes the descriptors alone, 320 MiB of them on the plain side.
#[derive(Debug, clap::Args)]
struct Vmemmap {
    #[command(flatten)]
    common: Common,
}

/// Each size takes that much memory, once.
#[derive(Debug, clap::Args)]
struct Fork {
    #[command(flatten)]
    common: Common,
    /// Bytes of the process, rows for each; 256M with --quick. Those for which there is no memory are left out
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

/// It is measured on the host as it is found, and again with free memory in pieces: a process fills up to 12 GiB of
/// it, 60 % at most (2 GiB with --quick), and leaves a few base pages of each 2 MiB, for as long as it is measured.
#[derive(Debug, clap::Args)]
struct Latency {
    #[command(flatten)]
    common: Common,
    /// Bytes of all allocations, each of 1 MiB; 3G, or 256M with --quick
    #[arg(long, value_parser = |text: &str| at_least(latency::MIN_SIZE, text), allow_hyphen_values = true)]
    size: Option<Bytes>,
}

/// What all tables take.
#[derive(Debug, clap::Args)]
struct Common {
    /// Less work: done in under 30 seconds on a quiet machine, `latency` and each of `programs` in some 80
    #[arg(long)]
    quick: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Rounds to measure after the warm-up; 7, or 5 with --quick
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>, allow_negative_numbers = true)]
    rounds: Option<NonZeroUsize>,
}

/// With fewer the spread says little.
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
        if matches!(self, Self::Programs(_)) {
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
            Self::Heap(Heap { common, .. })
            | Self::Free(Free { common, .. })
            | Self::Exit(Exit { common, .. })
            | Self::Pool(Pool { common, .. })
            | Self::Text(Text { common, .. })
            | Self::Shmem(Shmem { common, .. })
            | Self::Vmemmap(Vmemmap { common })
            | Self::Fork(Fork { common, .. })
            | Self::Latency(Latency { common, .. })
            | Self::Programs(programs::Args { common, .. }) => common,
        }
    }

    fn measure(&self, settings: &Settings) -> Result<table::Table, Error> {
        let common = self.common();
        let quick = common.quick;
        let size = |asked: Option<Bytes>, full: u64, less: u64| {
            asked.unwrap_or(Bytes(if quick { less } else { full }))
        };
        match self {
            Self::Heap(it) => heap::measure(settings, size(it.size, 2 << 30, 256 << 20)),
            Self::Free(it) => {
                free::measure(settings, size(it.size, 8 << 30, 256 << 20), &it.workers)
            }
            Self::Exit(it) => exit::measure(settings, size(it.size, 8 << 30, 128 << 20)),
            Self::Pool(it) => pool::measure(settings, size(it.size, 1536 << 20, 48 << 20), quick),
            Self::Text(it) => text::measure(settings, size(it.size, 256 << 20, 64 << 20), quick),
            Self::Shmem(it) => shmem::measure(settings, size(it.size, 1 << 30, 64 << 20), quick),
            Self::Vmemmap(_) => vmemmap::measure(settings, quick),
            Self::Fork(it) => fork::measure(settings, &it.size),
            Self::Latency(it) => {
                latency::measure(settings, size(it.size, 3 << 30, 256 << 20), quick)
            }
            Self::Programs(it) => it.measure(settings),
        }
    }

    fn show(&self, view: &mut View, table: &table::Table) -> io::Result<()> {
        match self {
            Self::Programs(it) => it.show(view, table),
            _ => render::show(view, table),
        }
    }
}

/// The tables that there are, as the help has them.
fn list() -> anyhow::Result<()> {
    let mut view = View::stdout();
    view.table("<command|<table", tables())?;
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

/// The error with what to do about it.
pub(crate) fn hinted(error: Error) -> anyhow::Error {
    match error.hint() {
        Some(hint) => anyhow::anyhow!("{error}\nhint: {hint}"),
        None => error.into(),
    }
}

fn at_least(least: Bytes, text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if size < least {
        return Err(format!("the least size that can be measured is {least}"));
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

/// Progress on stderr: a bar on a terminal, nothing in a pipe.
pub(crate) fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg} {eta} left") {
        bar.set_style(style);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_the_tables_and_not_the_worker() {
        let commands: Vec<_> = tables().into_iter().map(|[command, _]| command).collect();
        assert_eq!(
            commands,
            [
                "jumbo bench all",
                "jumbo bench heap",
                "jumbo bench free",
                "jumbo bench exit",
                "jumbo bench pool",
                "jumbo bench text",
                "jumbo bench shmem",
                "jumbo bench vmemmap",
                "jumbo bench fork",
                "jumbo bench latency",
                "jumbo bench programs"
            ]
        );
    }

    #[test]
    fn as_many_threads_as_jumbo_run_takes() {
        assert!(workers("1").is_ok() && workers("64").is_ok());
        for wrong in ["0", "65", "-1", "two"] {
            assert!(workers(wrong).is_err(), "{wrong}");
        }
        assert!(workers("0").unwrap_err().contains("at least 1"));
    }

    #[test]
    fn a_load_below_the_least_size_is_refused() {
        let least = Bytes(32 << 20);
        assert_eq!(at_least(least, "2G"), Ok(Bytes(2 << 30)));
        assert!(at_least(least, "1M").unwrap_err().contains("32 MiB"));
        assert!(at_least(least, "much").is_err());
    }
}
