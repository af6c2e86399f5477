//! The options of `jumbo run` that a profile has too, in one table: [`Options`].
//!
//! A new option is a field here, a line in [`Options::or`] and, where the preload library obeys it, one in
//! [`Options::orders`] and in the table of [`jumbo_host::policy::Orders`].

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::policy::{
    DataMode, FreeMode, HeapMode, Keep, MAX_FREE_WORKERS, Mode, Orders, PoolRequest, ReaperMode,
    ShmMode, TextMode,
};

/// The most that --max-waste can be, in percent: as much again as was asked for.
pub(super) const MAX_WASTE: u32 = 100;

/// What was typed, or stands in a profile under the same names.
#[derive(Debug, Default, PartialEq, clap::Args)]
pub(super) struct Options {
    /// Allocations on huge pages: on, glibc, mimalloc or off [default: on]
    ///
    /// `glibc`: small objects come from glibc alone. `mimalloc`: with --pool, all allocations come
    /// from mimalloc. See docs/run.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<HeapMode>(),
        hide_possible_values = true,
        help_heading = "Memory"
    )]
    pub(super) heap: Option<HeapMode>,

    /// Pool of SIZE for the heap, in pages of PAGESIZE [default: a PMD's, 2M]
    ///
    /// SIZE bounds the run; with `each`, every process; `nofork`: it never forks while it has
    /// threads. See docs/run.md
    #[arg(
        long,
        value_name = "SIZE[:PAGESIZE][,each][,nofork]",
        allow_hyphen_values = true,
        help_heading = "Pool",
        hide_short_help = true
    )]
    pub(super) pool: Option<PoolRequest>,

    /// How much the pool may grow beyond its size [default: 0]
    ///
    /// The excess is returned when it is free. See docs/run.md
    #[arg(
        long,
        value_name = "SIZE",
        allow_hyphen_values = true,
        help_heading = "Pool",
        hide_short_help = true
    )]
    pub(super) overcommit: Option<Bytes>,

    /// Make the whole pool resident before the program starts
    ///
    /// Several threads touch it. See docs/run.md
    #[arg(long, help_heading = "Pool", hide_short_help = true)]
    pub(super) warm: bool,

    /// Anonymous mappings on huge pages [default: on]
    ///
    /// Reserved ranges begin on base pages and become huge where they are dense. See
    /// docs/design/heap.md
    #[arg(
        long,
        value_name = "on|off",
        hide_possible_values = true,
        help_heading = "Memory"
    )]
    pub(super) maps: Option<Switch>,

    /// Text on huge pages: auto, file, shared or off [default: auto]
    ///
    /// `file`: from the page cache; `shared`: as a copy that processes share; `auto`: that copy once
    /// it pays. See docs/design/segments.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<TextMode>(),
        hide_possible_values = true,
        help_heading = "Program segments",
        hide_short_help = true
    )]
    pub(super) text: Option<TextMode>,

    /// Data and bss on huge pages: auto, on or off [default: auto]
    ///
    /// `on` copies all data, `auto` huge pages that are half written; `off` suits a sparse bss. See
    /// docs/design/segments.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<DataMode>(),
        hide_possible_values = true,
        help_heading = "Program segments",
        hide_short_help = true
    )]
    pub(super) data: Option<DataMode>,

    /// Libraries whose text comes on huge pages too
    ///
    /// File names without folders, with * and ?, and commas between them. See docs/run.md
    #[arg(
        long,
        value_name = "PATTERN",
        value_parser = libs,
        help_heading = "Program segments",
        hide_short_help = true
    )]
    pub(super) libs: Option<Patterns>,

    /// Shared memory: auto, advise, hugetlb, user or off [default: auto]
    ///
    /// `auto` collapses touched memory, `advise` leaves it to the kernel, `hugetlb` takes pool
    /// pages. See docs/design/shmem.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<ShmMode>(),
        hide_possible_values = true,
        help_heading = "Shared memory",
        hide_short_help = true
    )]
    pub(super) shm: Option<ShmMode>,

    /// Sizes for --shm, such as 64K,2M [default: what a PMD maps]
    ///
    /// With --shm=user the default is 64K. See docs/run.md
    #[arg(
        long,
        value_name = "SIZE,...",
        value_parser = sizes,
        help_heading = "Shared memory",
        hide_short_help = true
    )]
    pub(super) shm_sizes: Option<Sizes>,

    /// Maximum memory overhead in percent [default: 5]
    ///
    /// Partly filled huge pages and untouched parts of shared memory count. See docs/limits.md
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_WASTE)),
        allow_negative_numbers = true,
        help_heading = "Memory"
    )]
    pub(super) max_waste: Option<u32>,

    /// Give huge pages as the program fills them, so that --max-waste holds
    ///
    /// Memory that is huge and untouched is at most 16M, or --max-waste percent of the resident
    /// memory. See docs/design/bound.md
    #[arg(long, help_heading = "Memory", hide_short_help = true)]
    pub(super) bounded: bool,

    /// Freed memory that stays for the next large allocations
    ///
    /// By default 16M, or twice the largest freed block of up to 32M, and --max-waste percent of
    /// the memory in use. See docs/run.md
    #[arg(
        long,
        value_name = "SIZE|PERCENT%",
        allow_hyphen_values = true,
        help_heading = "Memory",
        hide_short_help = true
    )]
    pub(super) keep: Option<Keep>,

    /// Free with several threads: sync, background or off [default: sync]
    ///
    /// `background`: a large free returns at once, and the memory follows. See docs/design/free.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<FreeMode>(),
        hide_possible_values = true,
        help_heading = "Freed memory",
        hide_short_help = true
    )]
    pub(super) free: Option<FreeMode>,

    /// Threads that free at once [default: the CPUs, at most 4]
    ///
    /// The caller is one of them. See docs/design/free.md
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FREE_WORKERS)),
        allow_negative_numbers = true,
        help_heading = "Freed memory", hide_short_help = true
    )]
    pub(super) free_workers: Option<u32>,

    /// Free memory after the program's end: auto, on or off [default: auto]
    ///
    /// `auto`: for programs that requested more than 1 GiB. The reaper process has their command
    /// line. See docs/design/free.md
    #[arg(
        long,
        value_name = "MODE",
        value_parser = mode::<ReaperMode>(),
        hide_possible_values = true,
        help_heading = "Freed memory"
    )]
    pub(super) reaper: Option<ReaperMode>,

    /// Leave the program's children alone
    ///
    /// Their environment is as without jumbo. See docs/run.md
    #[arg(long, help_heading = "Run", hide_short_help = true)]
    pub(super) no_follow: bool,

    /// Report when the program ends: text, full, json or none
    ///
    /// `text` has three lines, `full` all. By default: on a terminal. With a report the program is
    /// a child of jumbo. See docs/report.md
    #[arg(
        long,
        value_name = "FORMAT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "text",
        hide_possible_values = true,
        help_heading = "Report"
    )]
    pub(super) report: Option<ReportFormat>,

    /// Write the report to FILE instead of stderr; -: to stdout
    ///
    /// See docs/report.md
    #[arg(
        long,
        value_name = "FILE",
        help_heading = "Report",
        hide_short_help = true
    )]
    pub(super) report_file: Option<PathBuf>,

    /// No report, even on a terminal
    ///
    /// jumbo becomes the program, with the same process ID. See docs/report.md
    #[arg(long, short, conflicts_with_all = ["report", "report_file"], help_heading = "Report")]
    pub(super) quiet: bool,
}

/// Something that is done or is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Switch {
    On,
    Off,
}

/// Patterns of file names, as they stand in the orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patterns(pub(super) String);

/// Sizes of folios: their sum in bytes, as it stands in the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes(pub(super) usize);

/// The form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ReportFormat {
    Text,
    Full,
    Json,
    None,
}

impl Options {
    /// These, and those of `profile` for what they leave open.
    pub(super) fn or(self, profile: Self) -> Self {
        Self {
            heap: self.heap.or(profile.heap),
            pool: self.pool.or(profile.pool),
            overcommit: self.overcommit.or(profile.overcommit),
            warm: self.warm || profile.warm,
            maps: self.maps.or(profile.maps),
            text: self.text.or(profile.text),
            data: self.data.or(profile.data),
            libs: self.libs.or(profile.libs),
            shm: self.shm.or(profile.shm),
            shm_sizes: self.shm_sizes.or(profile.shm_sizes),
            max_waste: self.max_waste.or(profile.max_waste),
            bounded: self.bounded || profile.bounded,
            keep: self.keep.or(profile.keep),
            free: self.free.or(profile.free),
            free_workers: self.free_workers.or(profile.free_workers),
            reaper: self.reaper.or(profile.reaper),
            no_follow: self.no_follow || profile.no_follow,
            report: self.report.or(profile.report),
            report_file: self.report_file.or(profile.report_file),
            quiet: self.quiet || profile.quiet,
        }
    }

    /// What of them the preload library is to obey, but for the pool, with the defaults filled in.
    pub(super) fn orders(&self) -> Orders<'static> {
        let usual = Orders::default();
        Orders {
            heap: self.heap.unwrap_or(usual.heap),
            maps: self.maps.map_or(usual.maps, |maps| maps == Switch::On),
            text: self.text.unwrap_or(usual.text),
            data: self.data.unwrap_or(usual.data),
            shm: self.shm.unwrap_or(usual.shm),
            shm_sizes: self.shm_sizes.map_or(usual.shm_sizes, |sizes| sizes.0),
            max_waste: self.max_waste.unwrap_or(usual.max_waste),
            bounded: self.bounded,
            keep: self.keep.or(usual.keep),
            follow: !self.no_follow,
            free: self.free.unwrap_or(usual.free),
            free_workers: self.free_workers.unwrap_or(usual.free_workers),
            reaper: self.reaper.unwrap_or(usual.reaper),
            ..usual
        }
    }
}

/// One of the words of a mode.
fn mode<M: Mode + Send + Sync>() -> impl TypedValueParser<Value = M> {
    PossibleValuesParser::new(M::ALL.iter().map(|(name, _)| *name)).try_map(|typed| {
        let named = M::ALL.iter().find(|(name, _)| *name == typed);
        named.map(|(_, mode)| *mode).ok_or("no such mode")
    })
}

/// `"libLLVM*,libclang*"`.
fn libs(typed: &str) -> Result<Patterns, String> {
    let longest = Orders::LONGEST_LIBS;
    if typed.contains(Orders::BETWEEN) {
        return Err(String::from(
            "a pattern is of a file's name, without folders",
        ));
    }
    if typed.is_empty() || typed.len() > longest {
        return Err(format!("between 1 and {longest} characters"));
    }
    let names: Vec<_> = typed.split(',').filter(|name| !name.is_empty()).collect();
    Ok(Patterns(names.join(&Orders::BETWEEN.to_string())))
}

/// `"64K,2M"`.
fn sizes(typed: &str) -> Result<Sizes, String> {
    let mut sum = 0;
    for name in typed.split(',') {
        let size: PageSize = name.parse().map_err(|error| format!("{error}"))?;
        sum |= usize::try_from(size.bytes()).map_err(|error| error.to_string())?;
    }
    Ok(Sizes(sum))
}
