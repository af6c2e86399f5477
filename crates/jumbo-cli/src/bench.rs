//! `jumbo bench`: the tables of `jumbo-bench`, with progress on stderr and the figures on stdout.

mod render;

use std::num::{NonZeroU32, NonZeroUsize};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as _, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use jumbo::policy::MAX_FREE_WORKERS;
use jumbo::units::Bytes;
use jumbo_bench::{Progress, Settings, exit, free, heap, pool, worker};

use crate::value::positive;
use crate::view::{self, View};

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
    /// Free a large block: by one thread, by several, in the background; and what must not become slower
    Free(Free),
    /// End a large process: until `waitpid` returns, and until its memory is back
    Exit(Exit),
    /// Use pages that a pool has, pages that it gets on demand, and pages without a pool
    Pool(Pool),
    /// The program that a table measures
    #[command(hide = true)]
    Worker { task: String },
}

#[derive(Debug, clap::Args)]
struct Heap {
    #[command(flatten)]
    common: Common,
    /// Bytes of objects to allocate; 2G, or 256M with --quick
    #[arg(long, value_parser = load_size, allow_hyphen_values = true)]
    size: Option<Bytes>,
}

#[derive(Debug, clap::Args)]
struct Free {
    #[command(flatten)]
    common: Common,
    /// Bytes of the block; 8G, or 512M with --quick
    #[arg(long, value_parser = block_size, allow_hyphen_values = true)]
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
    /// Bytes of memory that the process has; 8G, or 512M with --quick
    #[arg(long, value_parser = held_size, allow_hyphen_values = true)]
    size: Option<Bytes>,
    /// How many threads give it back [default: as `jumbo run`]
    #[arg(long, value_name = "N", value_parser = workers, allow_negative_numbers = true)]
    workers: Option<NonZeroU32>,
}

/// With the right to set the kernel's pool of 2 MiB pages (root), it is set for each sample and put back in the
/// end, also when this is interrupted or killed. Without, what needs it is left out, and said so.
#[derive(Debug, clap::Args)]
struct Pool {
    #[command(flatten)]
    common: Common,
    /// Bytes of STREAM's three arrays; 1536M, or 192M with --quick
    #[arg(long, value_parser = arrays_size, allow_hyphen_values = true)]
    size: Option<Bytes>,
    /// How many threads take and give pages: a row for each number. STREAM runs with the most of
    /// them [default: 1, 2, 4, ... up to the number of CPUs]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = threads, allow_negative_numbers = true)]
    threads: Vec<NonZeroUsize>,
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
    #[arg(long, value_name = "N", value_parser = positive::<NonZeroUsize>, allow_negative_numbers = true)]
    rounds: Option<NonZeroUsize>,
}

/// More of them meet in the kernel's scheduler and nowhere else.
const MAX_THREADS: usize = 256;

/// With fewer the spread says little.
const MIN_ROUNDS: usize = 5;

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.table {
        None => list()?,
        Some(Table::Heap(heap)) => measure_heap(&heap)?,
        Some(Table::Free(free)) => measure_free(&free)?,
        Some(Table::Exit(exit)) => measure_exit(&exit)?,
        Some(Table::Pool(pool)) => measure_pool(&pool)?,
        Some(Table::Worker { task }) => worker::run(&task)?,
    }
    Ok(ExitCode::SUCCESS)
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

fn measure_heap(args: &Heap) -> anyhow::Result<()> {
    let size = args.common.size(args.size, 2 << 30, 256 << 20);
    args.common
        .measure(|settings, progress| heap::measure(settings, size, progress))
}

fn measure_free(args: &Free) -> anyhow::Result<()> {
    let size = args.common.size(args.size, 8 << 30, 512 << 20);
    args.common
        .measure(|settings, progress| free::measure(settings, size, &args.workers, progress))
}

fn measure_exit(args: &Exit) -> anyhow::Result<()> {
    let load = exit::Load {
        size: args.common.size(args.size, 8 << 30, 512 << 20),
        workers: args.workers,
    };
    args.common
        .measure(|settings, progress| exit::measure(settings, load, progress))
}

fn measure_pool(args: &Pool) -> anyhow::Result<()> {
    let load = pool::Load {
        size: args.common.size(args.size, 1536 << 20, 192 << 20),
        threads: match args.threads.as_slice() {
            [] => up_to_cpus(),
            asked => asked.to_vec(),
        },
    };
    args.common
        .measure(|settings, progress| pool::measure(settings, &load, progress))
}

/// 1, 2, 4, and so on, and the number of CPUs.
fn up_to_cpus() -> Vec<NonZeroUsize> {
    let cpus = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let two = NonZeroUsize::MIN.saturating_add(1);
    let powers = std::iter::successors(Some(NonZeroUsize::MIN), |n| n.checked_mul(two));
    powers
        .take_while(|n| *n < cpus)
        .chain(std::iter::once(cpus))
        .collect()
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

    /// The size that was asked for, or that of a table, or of its quick form.
    fn size(&self, asked: Option<Bytes>, full: u64, quick: u64) -> Bytes {
        asked.unwrap_or(Bytes(if self.quick { quick } else { full }))
    }

    fn measure(
        &self,
        table: impl FnOnce(
            &Settings,
            &dyn Progress,
        ) -> Result<jumbo_bench::table::Table, jumbo_bench::Error>,
    ) -> anyhow::Result<()> {
        let progress = Bar::new();
        let table = table(&self.settings()?, &progress).map_err(hinted)?;
        progress.0.finish_and_clear();
        self.print(&table)
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
    at_least(heap::MIN_SIZE, text)
}

fn block_size(text: &str) -> Result<Bytes, String> {
    at_least(free::MIN_SIZE, text)
}

fn held_size(text: &str) -> Result<Bytes, String> {
    at_least(exit::MIN_SIZE, text)
}

fn arrays_size(text: &str) -> Result<Bytes, String> {
    at_least(pool::MIN_SIZE, text)
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

fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let threads: NonZeroUsize = positive(text)?;
    if threads.get() > MAX_THREADS {
        return Err(format!("at most {MAX_THREADS} threads are measured"));
    }
    Ok(threads)
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
        assert_eq!(
            commands,
            [
                "jumbo bench heap",
                "jumbo bench free",
                "jumbo bench exit",
                "jumbo bench pool"
            ]
        );
    }

    #[test]
    fn as_many_threads_as_jumbo_run_takes() {
        assert!(workers("1").is_ok() && workers("64").is_ok());
        for wrong in ["0", "65", "-1", "two"] {
            assert!(workers(wrong).is_err(), "{wrong}");
        }
        assert!(threads("0").unwrap_err().contains("at least 1"));
    }

    #[test]
    fn a_load_below_the_least_size_is_refused() {
        assert_eq!(load_size("2G"), Ok(Bytes(2 << 30)));
        assert!(load_size("1M").unwrap_err().contains("32 MiB"));
        assert!(load_size("much").is_err());
        assert!(block_size("1M").is_err() && held_size("1M").is_err());
    }
}
