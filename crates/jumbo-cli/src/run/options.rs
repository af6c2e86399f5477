//! Options of `jumbo run` that profiles may set too: [`Options`].
//!
//! A new option is a field here and a word in [`HEADINGS`]. An option for the preload library is
//! also a line in [`Options::orders`] and in the table of [`jumbo_host::policy::Orders`].

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ValueEnum};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::policy::{
    DataMode, FilesMode, FreeMode, HeapMode, Keep, MAX_FREE_WORKERS, MAX_POPULATE_WORKERS,
    MaxWaste, Mode, Orders, PoolRequest, ReaperMode, ShmMode, TextMode,
};

/// Headings of `jumbo run --help`, each with its options.
const HEADINGS: [(&str, &str); 7] = [
    (
        "Run",
        "profile show_config no_config dry_run print_env json no_follow",
    ),
    (
        "Memory",
        "heap maps max_waste first_touch keep populate_workers thp",
    ),
    ("Pool", "pool overcommit warm"),
    ("Program files", "text data libs files"),
    ("Shared memory", "shm shm_sizes"),
    ("Freed memory", "free free_workers reaper"),
    ("Report", "report report_file quiet"),
];

/// Options of `jumbo run -h`.
const SHORT_HELP: &str = "profile dry_run heap maps max_waste reaper report quiet";

/// Sets the heading of an option, and hides it in the short help unless it is in [`SHORT_HELP`].
pub(super) fn arranged(arg: Arg) -> Arg {
    let is_in = |ids: &str| ids.split(' ').any(|id| arg.get_id() == id);
    let (is_short, has_value) = (is_in(SHORT_HELP), arg.get_action().takes_values());
    match HEADINGS.iter().find(|(_, ids)| is_in(ids)) {
        // --help and PROGRAM have no heading.
        None => arg,
        Some((heading, _)) => arg
            .help_heading(*heading)
            .hide_short_help(!is_short)
            // The help text names them.
            .hide_possible_values(has_value),
    }
}

/// Options of the command line, or of a profile under the same names.
#[derive(Debug, Default, PartialEq, clap::Args)]
pub(super) struct Options {
    /// Allocations on huge pages: on, glibc or off [default: on]
    ///
    /// `glibc`: blocks below 128K come from the C library. See docs/run.md
    #[arg(long, value_name = "MODE", value_parser = heap())]
    pub(super) heap: Option<HeapMode>,

    /// Pool of SIZE for the heap, in pages of PAGESIZE (a PMD's, 2M)
    ///
    /// SIZE bounds the run; with `each`, every process; `nofork`: it never forks while it has
    /// threads. See docs/run.md
    #[arg(
        long,
        value_name = "SIZE[:PAGESIZE][,each][,nofork]",
        allow_hyphen_values = true
    )]
    pub(super) pool: Option<PoolRequest>,

    /// Maximum growth of the pool beyond its size [default: 0]
    ///
    /// The excess is returned when it is free. See docs/run.md
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(super) overcommit: Option<Bytes>,

    /// Make the whole pool resident before the program starts
    ///
    /// Several threads touch it. See docs/run.md
    #[arg(long)]
    pub(super) warm: bool,

    /// Anonymous mappings on huge pages [default: on]
    ///
    /// Reserved ranges begin on base pages and become huge where they are dense. See
    /// docs/design/heap.md
    #[arg(long, value_name = "on|off", value_parser = switch())]
    pub(super) maps: Option<bool>,

    /// Text on huge pages: auto, file, shared or off [default: auto]
    ///
    /// `file`: from the page cache; `shared`: as a copy that processes share; `auto`: that copy
    /// once it pays. See docs/design/segments.md
    #[arg(long, value_name = "MODE", value_parser = mode::<TextMode>())]
    pub(super) text: Option<TextMode>,

    /// Data and bss on huge pages: auto, on or off [default: auto]
    ///
    /// `on` copies all data, `auto` huge pages that are half written; `off` suits a sparse bss. See
    /// docs/design/segments.md
    #[arg(long, value_name = "MODE", value_parser = mode::<DataMode>())]
    pub(super) data: Option<DataMode>,

    /// Mapped data files: auto, on or off [default: auto]
    ///
    /// Read by huge folios: `auto`: those that are populated as they are mapped; `on`: all that are
    /// only read. See docs/run.md
    #[arg(long, value_name = "MODE", value_parser = mode::<FilesMode>())]
    pub(super) files: Option<FilesMode>,

    /// Libraries whose text comes on huge pages too
    ///
    /// File names without folders, with * and ?, and commas between them. See docs/run.md
    #[arg(long, value_name = "PATTERN", value_parser = libs)]
    pub(super) libs: Option<String>,

    /// Shared memory: auto, advise, hugetlb or off [default: auto]
    ///
    /// `auto` collapses touched memory, `advise` leaves it to the kernel, `hugetlb` takes pool
    /// pages. See docs/design/shmem.md
    #[arg(long, value_name = "MODE", value_parser = mode::<ShmMode>())]
    pub(super) shm: Option<ShmMode>,

    /// Sizes for --shm, such as 64K,2M [default: what a PMD maps]
    ///
    /// See docs/run.md
    #[arg(long, value_name = "SIZE,...", value_parser = sizes)]
    pub(super) shm_sizes: Option<usize>,

    /// Memory that may be huge and untouched, in percent [default: 5]
    ///
    /// Of the resident memory, and 16M at least; 0: none. `unbounded`: all memory is huge from its
    /// first touch. See docs/limits.md
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(super) max_waste: Option<MaxWaste>,

    /// New memory: auto or huge [default: auto]
    ///
    /// `auto`: on base pages while these take less time than huge ones, measured; `huge`: on huge
    /// pages all the same. See docs/limits.md
    #[arg(long, value_name = "MODE", value_parser = first_touch())]
    pub(super) first_touch: Option<bool>,

    /// Freed memory that stays for the next large allocations
    ///
    /// By default 16M, or twice the largest freed block of up to 32M, and --max-waste percent of
    /// the memory in use. See docs/run.md
    #[arg(long, value_name = "SIZE|PERCENT%", allow_hyphen_values = true)]
    pub(super) keep: Option<Keep>,

    /// Free with several threads: sync, background or off [default: sync]
    ///
    /// `background`: a large free returns at once, and the memory follows. See docs/design/free.md
    #[arg(long, value_name = "MODE", value_parser = mode::<FreeMode>())]
    pub(super) free: Option<FreeMode>,

    /// Threads that free at once [default: the CPUs, at most 4]
    ///
    /// The caller is one of them. See docs/design/free.md
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FREE_WORKERS)))]
    pub(super) free_workers: Option<u32>,

    /// THP of the program: inherit, madvise or never [default: inherit]
    ///
    /// To spare it and its children; `madvise` leaves advised memory (Linux 6.18). See docs/run.md
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    pub(super) thp: Option<ThpMode>,

    /// Threads that populate memory at once [default: the CPUs, at most 4]
    ///
    /// For MAP_POPULATE, mlock(2) and the like, the caller included. See
    /// docs/design/populate.md
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_POPULATE_WORKERS)))]
    pub(super) populate_workers: Option<u32>,

    /// Free memory after the program's end: auto, on or off [default: auto]
    ///
    /// `auto`: for programs that requested more than 1 GiB. The reaper process has their command
    /// line. See docs/design/free.md
    #[arg(long, value_name = "MODE", value_parser = mode::<ReaperMode>())]
    pub(super) reaper: Option<ReaperMode>,

    /// Leave the program's children alone
    ///
    /// Their environment is as without jumbo. See docs/run.md
    #[arg(long)]
    pub(super) no_follow: bool,

    /// Report when the program ends: text, full, json or none
    ///
    /// `text` has three lines, `full` all. By default: on a terminal. With a report the program is
    /// a child of jumbo. See docs/report.md
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, require_equals = true,
        default_missing_value = "text")]
    pub(super) report: Option<ReportFormat>,

    /// Write the report to FILE instead of stderr; -: to stdout
    ///
    /// See docs/report.md
    #[arg(long, value_name = "FILE")]
    pub(super) report_file: Option<PathBuf>,

    /// No report, even on a terminal
    ///
    /// jumbo becomes the program, with the same process ID. See docs/report.md
    #[arg(long, short, overrides_with_all = ["report", "report_file"])]
    pub(super) quiet: bool,
}

/// Policy of the kernel for a process, [`disable_thp`](jumbo_sys::disable_thp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ThpMode {
    Inherit,
    Madvise,
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ReportFormat {
    Text,
    Full,
    Json,
    None,
}

impl Options {
    /// Configuration of the preload library with defaults applied, without the pool.
    pub(super) fn orders(&self) -> Orders<'static> {
        let usual = Orders::default();
        Orders {
            heap: self.heap.unwrap_or(usual.heap),
            maps: self.maps.unwrap_or(usual.maps),
            text: self.text.unwrap_or(usual.text),
            data: self.data.unwrap_or(usual.data),
            files: self.files.unwrap_or(usual.files),
            shm: self.shm.unwrap_or(usual.shm),
            shm_sizes: self.shm_sizes.unwrap_or(usual.shm_sizes),
            max_waste: self.max_waste.unwrap_or(usual.max_waste),
            huge_at_once: self.first_touch.unwrap_or(usual.huge_at_once),
            keep: self.keep.or(usual.keep),
            follow: !self.no_follow,
            free: self.free.unwrap_or(usual.free),
            free_workers: self.free_workers.unwrap_or(usual.free_workers),
            populate_workers: self.populate_workers.unwrap_or(usual.populate_workers),
            reaper: self.reaper.unwrap_or(usual.reaper),
            ..usual
        }
    }
}

fn mode<M: Mode + Send + Sync>() -> impl TypedValueParser<Value = M> {
    mode_besides(None, "no such mode")
}

fn heap() -> impl TypedValueParser<Value = HeapMode> {
    let why = "there is no such heap any more; hint: drop the option, since jumbo's own heap serves all sizes";
    mode_besides(Some("mimalloc"), why)
}

/// A parser of modes that refuses the name `gone` for that reason.
fn mode_besides<M: Mode + Send + Sync>(
    gone: Option<&'static str>,
    why: &'static str,
) -> impl TypedValueParser<Value = M> {
    let names = M::ALL.iter().map(|(name, _)| PossibleValue::new(*name));
    let gone = gone.map(|name| PossibleValue::new(name).hide(true));
    PossibleValuesParser::new(names.chain(gone)).try_map(move |typed| {
        let named = M::ALL.iter().find(|(name, _)| *name == typed);
        named.map(|(_, mode)| *mode).ok_or(why)
    })
}

fn switch() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|typed| typed == "on")
}

/// A parser of whether new memory begins on huge pages at any cost.
fn first_touch() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["auto", "huge"]).map(|typed| typed == "huge")
}

/// Parses `"libLLVM*,libclang*"` into the format of the orders.
fn libs(typed: &str) -> Result<String, String> {
    let longest = Orders::MAX_LIBS_BYTES;
    if typed.contains(Orders::LIBS_SEPARATOR) {
        return Err(String::from(
            "a pattern is of a file's name, without folders",
        ));
    }
    if typed.is_empty() || typed.len() > longest {
        return Err(format!("between 1 and {longest} characters"));
    }
    let names: Vec<_> = typed.split(',').filter(|name| !name.is_empty()).collect();
    Ok(names.join(&Orders::LIBS_SEPARATOR.to_string()))
}

/// Parses `"64K,2M"` into the sum of the sizes in bytes, the format of the orders.
fn sizes(typed: &str) -> Result<usize, String> {
    let size = |name: &str| name.parse::<PageSize>().map_err(|error| error.to_string());
    typed.split(',').try_fold(0, |sum, name| {
        let size = usize::try_from(size(name)?.bytes()).map_err(|error| error.to_string())?;
        Ok(sum | size)
    })
}
