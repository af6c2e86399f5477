//! What is asked: [`Args`] as typed, and [`Settings`] with the profile and the defaults filled in.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::IsTerminal;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use jumbo::kernel::{Root, hugetlb, thp};
use jumbo::policy::{
    self, FreeMode, HeapMode, MAX_FREE_WORKERS, MAX_WASTE, Options, PoolRequest, Profile,
    ReaperMode,
};
use jumbo::units::{Bytes, PageSize};
use jumbo_inside::sandbox;

use super::Failure;

/// Run a program with its memory on huge pages
///
/// Starts PROGRAM, unmodified, so that its large allocations, glibc's heap and its anonymous mappings
/// come in huge pages. It keeps its standard streams, terminal, signals, environment and exit status.
/// Its children are covered too.
///
/// On a terminal a report follows when the program ends: what was huge at the peak, and why not more.
/// Without a report to write, jumbo becomes the program: same process ID.
#[derive(Debug, clap::Args)]
#[command(override_usage = "jumbo run [OPTIONS] [--] PROGRAM [ARG]...")]
#[command(after_help = "Examples:
  jumbo run -- python3 train.py
  jumbo run --report=json --report-file peak.json -- ./server --port 8080
  jumbo run --profile postgresql -- pg_ctl start
  jumbo run --dry-run -- node app.js      # what would be done, and what would not

Exit status: the program's; 128+N when signal N ended it; 127 no such program, 126 it cannot be
started, 125 jumbo itself failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// Allocations on huge pages: on, off or mimalloc [default: on]
    ///
    /// `on`: large ones from jumbo, small ones from glibc, whose heap is advised. `mimalloc`: all of them
    /// from mimalloc, whose arenas are advised, or are the memory of --pool.
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    heap: Option<Heap>,

    /// A pool of SIZE for the heap, in pages of PAGESIZE [default: what a PMD maps, 2M mostly]
    ///
    /// SIZE bounds all processes of the run together; SIZE,each bounds each of them. It is a bound: no page is set
    /// aside before a process asks for it, unless you ask for --warm. A process takes pages while the others leave some, keeps
    /// them when they are free, and gives them back when it ends. What a forked child shares with its parent counts once. jumbo stays
    /// as the program's parent, to keep the account; with SIZE,each it does so for a report alone.
    ///
    /// The heap's pages come from the kernel's hugetlb pool where it has some. The others are THPs, which
    /// take no privilege. Beyond SIZE allocations get what they get without a pool. SIZE is one page at least, and 256G at most,
    /// --overcommit included. Pages larger than a PMD maps (1G) are hugetlb alone; where the kernel's pool has none, the pool is
    /// in pages that a PMD maps. With --heap=on the pool serves large allocations, with --heap=mimalloc small ones
    /// too. Neither serves allocations aligned to whole base pages from it.
    ///
    /// Hugetlb pages serve processes of one thread: where there are more, a fork could end the child by SIGBUS.
    /// What they hold moves to THPs before a fork and before the second thread starts; a forked child
    /// takes pages of its own. If the program never forks while it has threads, say so: SIZE,nofork. Otherwise
    /// jumbo takes no hugetlb pages under a memory cgroup's limit, nor where there might be no room to move them to,
    /// and keeps none behind a seccomp filter or a chroot.
    #[arg(
        long,
        value_name = "SIZE[:PAGESIZE][,each][,nofork]",
        allow_hyphen_values = true
    )]
    pool: Option<PoolRequest>,

    /// How much the pool may grow beyond its size; given back when it is free [default: 0]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    overcommit: Option<Bytes>,

    /// Make all of the pool resident, with several threads, before the program starts
    #[arg(long)]
    warm: bool,

    /// Anonymous mappings on huge pages [default: on]
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    maps: Option<Switch>,

    /// The most memory to spend for it, in percent [default: 5]
    ///
    /// What may become resident beyond what the program asked for, in percent of what it has on huge
    /// pages: the ends of blocks that do not fill a huge page.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_WASTE)),
        allow_negative_numbers = true)]
    max_waste: Option<u32>,

    /// Free large blocks with several threads: sync, background or off [default: sync]
    ///
    /// `sync`: a large free or munmap returns when all is free, sooner than by one thread. `background`:
    /// it returns at once and the memory follows, where there is room for it once more and vm.overcommit_memory
    /// is not 2. `off`: as without jumbo. Under a seccomp filter (in a container) and without a report this option is off,
    /// unless you give it.
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    free: Option<Free>,

    /// How many threads free at once, the caller among them [default: the CPUs, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FREE_WORKERS)),
        allow_negative_numbers = true)]
    free_workers: Option<u32>,

    /// Give the memory back after the program has ended: auto, on or off [default: auto]
    ///
    /// A sibling process that shares the memory outlives the program, so that a process that waits for the
    /// program does not wait for its memory. `auto`: once the program asked for more than 1 GiB, and where
    /// nothing hangs on its memory that must end with it. `jumbo wait` waits for the memory.
    ///
    /// The sibling has the program's executable and command line, and ignores signals: pidof(1), `pgrep -f`,
    /// fuser(1) and `start-stop-daemon --exec` find both. Use a PID file, `systemctl kill`, or --reaper=off.
    #[arg(long, value_name = "MODE", hide_possible_values = true)]
    reaper: Option<Reaper>,

    /// Free the program's memory from two sides when it ends, however it does
    ///
    /// jumbo stays the program's parent and traces it (not its children), so that a thread of jumbo can
    /// free its memory beside the kernel. Works without the preload library, and for programs that are
    /// killed. A debugger cannot attach then, and a set-user-ID program that takes PROGRAM's place gets no
    /// privileges, unless jumbo is root. Where the program has a reaper, the reaper gives the memory back: see
    /// --reaper=off.
    #[arg(long)]
    supervise: bool,

    /// Leave the program's children alone
    #[arg(long)]
    no_follow: bool,

    /// Report when the program ends: text, json or none
    ///
    /// Without this option there is a report where stdout and stderr are a terminal. The program is then
    /// a child of jumbo, in its process group, rather than jumbo itself turned into the program.
    #[arg(
        long,
        value_name = "FORMAT",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "text",
        hide_possible_values = true
    )]
    report: Option<ReportFormat>,

    /// Write the report to FILE instead of stderr; -: to stdout
    #[arg(long, value_name = "FILE")]
    report_file: Option<PathBuf>,

    /// No report, even on a terminal
    #[arg(long, short, conflicts_with_all = ["report", "report_file"])]
    quiet: bool,

    /// Take options from FILE, or from a profile known by NAME
    ///
    /// A profile is a TOML file whose keys are the options of this command. Options typed here win. A
    /// name is looked up as NAME.toml in ~/.config/jumbo/profiles and /etc/jumbo/profiles, then among
    /// those that come with jumbo: postgresql, redis, cpython.
    #[arg(long, value_name = "FILE|NAME")]
    profile: Option<PathBuf>,

    /// Show what would be done and run nothing
    #[arg(long)]
    dry_run: bool,

    /// The plan of --dry-run as JSON
    #[arg(long, requires = "dry_run")]
    json: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Heap {
    On,
    Off,
    Mimalloc,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Free {
    Sync,
    Background,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Reaper {
    Auto,
    On,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReportFormat {
    Text,
    Json,
    None,
}

/// What is to be done, with nothing left open.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) options: Options,
    /// How large frees are done was said, rather than left at its default.
    pub(super) free_asked: bool,
    pub(super) report: Option<Wanted>,
    pub(super) supervise: bool,
    pub(super) dry_run: bool,
    pub(super) json: bool,
    pub(super) command: Vec<OsString>,
}

/// A report that the user wants.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) json: bool,
    pub(super) place: Place,
}

/// Where a report goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Stderr,
    Stdout,
    File(PathBuf),
}

impl From<Switch> for policy::Switch {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::On,
            Switch::Off => Self::Off,
        }
    }
}

impl From<Heap> for HeapMode {
    fn from(mode: Heap) -> Self {
        match mode {
            Heap::On => Self::On,
            Heap::Off => Self::Off,
            Heap::Mimalloc => Self::Mimalloc,
        }
    }
}

impl From<Free> for FreeMode {
    fn from(mode: Free) -> Self {
        match mode {
            Free::Sync => Self::Sync,
            Free::Background => Self::Background,
            Free::Off => Self::Off,
        }
    }
}

impl From<Reaper> for ReaperMode {
    fn from(mode: Reaper) -> Self {
        match mode {
            Reaper::Auto => Self::Auto,
            Reaper::On => Self::On,
            Reaper::Off => Self::Off,
        }
    }
}

impl From<ReportFormat> for policy::ReportFormat {
    fn from(format: ReportFormat) -> Self {
        match format {
            ReportFormat::Text => Self::Text,
            ReportFormat::Json => Self::Json,
            ReportFormat::None => Self::None,
        }
    }
}

impl Settings {
    /// True where jumbo stays, as the program's parent.
    pub(super) fn is_parent(&self) -> bool {
        self.report.is_some() || self.supervise || self.shares_pool()
    }

    /// True where all processes of the run share one pool: jumbo keeps the account of it.
    pub(super) fn shares_pool(&self) -> bool {
        self.options.pool.is_some_and(|pool| !pool.each)
    }

    /// A program that does nothing, with a report that is thrown away.
    pub(super) fn for_rehearsal(report: bool, supervise: bool) -> std::io::Result<Self> {
        Ok(Self {
            options: Options {
                free: FreeMode::Off,
                reaper: ReaperMode::Off,
                ..Options::default()
            },
            free_asked: false,
            report: report.then(|| Wanted {
                json: true,
                place: Place::File(PathBuf::from("/dev/null")),
            }),
            supervise,
            dry_run: false,
            json: false,
            command: vec![
                std::env::current_exe()?.into(),
                crate::rehearse::NAME.into(),
            ],
        })
    }

    pub(super) fn new(args: Args) -> Result<Self, Failure> {
        let profile = args.profile.as_deref().map(read_profile);
        let profile = profile.transpose()?.unwrap_or_default();
        let defaults = Options::default();
        let on = |typed: Option<Switch>, profile: Option<policy::Switch>, default: bool| {
            let chosen = typed.map(policy::Switch::from).or(profile);
            chosen.map_or(default, |switch| switch == policy::Switch::On)
        };
        let free_asked = args.free.is_some() || profile.free.is_some();
        let options = Options {
            heap: args
                .heap
                .map(HeapMode::from)
                .or(profile.heap)
                .unwrap_or(defaults.heap),
            pool: args.pool.or(profile.pool),
            overcommit: args
                .overcommit
                .or(profile.overcommit)
                .unwrap_or(defaults.overcommit),
            warm: args.warm || profile.warm.unwrap_or(defaults.warm),
            maps: on(args.maps, profile.maps, defaults.maps),
            max_waste: args
                .max_waste
                .or(profile.max_waste)
                .unwrap_or(defaults.max_waste),
            follow: !(args.no_follow || profile.no_follow.unwrap_or(!defaults.follow)),
            free: args
                .free
                .map(FreeMode::from)
                .or(profile.free)
                .unwrap_or(defaults.free),
            free_workers: args
                .free_workers
                .or(profile.free_workers)
                .unwrap_or(defaults.free_workers),
            reaper: args
                .reaper
                .map(ReaperMode::from)
                .or(profile.reaper)
                .unwrap_or(defaults.reaper),
        };
        check_pool(&options)?;
        let typed = args.report.map(policy::ReportFormat::from);
        let is_asked = typed.is_some() || args.report_file.is_some();
        let quiet = args.quiet || (!is_asked && profile.quiet.unwrap_or(false));
        let report = match quiet {
            true => None,
            false => wanted(
                typed.or(profile.report),
                args.report_file.or(profile.report_file),
            ),
        };
        Ok(Self {
            options,
            free_asked,
            report,
            supervise: args.supervise || profile.supervise.unwrap_or(false),
            json: args.json || matches!(typed, Some(policy::ReportFormat::Json)),
            dry_run: args.dry_run,
            command: args.command,
        })
    }
}

/// A pool is for a heap, and its further options for a pool.
fn check_pool(options: &Options) -> Result<(), Failure> {
    let usage = |message: String| Failure {
        code: super::USAGE,
        message,
    };
    match options.pool {
        Some(_) if options.heap == HeapMode::Off => Err(usage(String::from(
            "a pool is for the heap, and --heap=off leaves that alone; hint: drop one of them",
        ))),
        Some(pool) => pool
            .check(options.overcommit)
            .map_err(|error| error.to_string())
            .and_then(|()| known_size(pool, options.overcommit))
            .map_err(usage),
        None if options.warm || options.overcommit > Bytes(0) => Err(usage(String::from(
            "--overcommit and --warm are for a pool; hint: add --pool SIZE",
        ))),
        None => Ok(()),
    }
}

/// Whether there are pages of that size, and one of them is not more than was asked for.
fn known_size(pool: PoolRequest, overcommit: Bytes) -> Result<(), String> {
    let root = Root::host();
    let pools = hugetlb::pools(&root).ok().flatten().unwrap_or_default();
    let pmd = thp::pmd_size(&root).unwrap_or(PageSize::SIZE_2M);
    pool.check_pages(overcommit, pmd)
        .map_err(|error| error.to_string())?;
    let Some(page) = pool.page else { return Ok(()) };
    let known = |size: &PageSize| pools.iter().any(|pool| pool.size == *size);
    // The largest is what all hosts are asked for alike; where there are none the report says so.
    if pools.is_empty() || page == pmd || page == PageSize::SIZE_1G || known(&page) {
        return Ok(());
    }
    let sizes: Vec<_> = pools.iter().map(|pool| pool.size.to_string()).collect();
    Err(format!(
        "there are no huge pages of {page} here; hint: {}",
        sizes.join(", or ")
    ))
}

fn wanted(format: Option<policy::ReportFormat>, file: Option<PathBuf>) -> Option<Wanted> {
    let json = match format {
        Some(policy::ReportFormat::None) => return None,
        Some(policy::ReportFormat::Json) => true,
        Some(policy::ReportFormat::Text) => false,
        None if file.is_some() => false,
        None if is_terminal(std::io::stdout()) && is_terminal(std::io::stderr()) => false,
        None => return None,
    };
    let place = match file {
        None => Place::Stderr,
        Some(file) if file.as_os_str() == "-" => Place::Stdout,
        Some(file) => Place::File(file),
    };
    Some(Wanted { json, place })
}

/// Whether a descriptor is a terminal's. Under a seccomp filter by its name: to ask as isatty(3) does may be the end
/// of who asks, and a link in /proc is read anyway, to find the library.
fn is_terminal(stream: impl AsFd + IsTerminal) -> bool {
    if sandbox::inherited() == Some(0) {
        return stream.is_terminal();
    }
    let link = format!("/proc/self/fd/{}", stream.as_fd().as_raw_fd());
    let name = fs::read_link(link).unwrap_or_default();
    let name = name.to_string_lossy();
    ["/dev/pts/", "/dev/tty", "/dev/console"]
        .iter()
        .any(|start| name.starts_with(start))
}

/// The profiles that come with jumbo, by name.
const BUILT_IN: [(&str, &str); 3] = [
    ("cpython", include_str!("../../../../profiles/cpython.toml")),
    (
        "postgresql",
        include_str!("../../../../profiles/postgresql.toml"),
    ),
    ("redis", include_str!("../../../../profiles/redis.toml")),
];

fn read_profile(asked: &Path) -> Result<Profile, Failure> {
    // A folder of that name (`redis`, say) is no profile.
    let is_file = || fs::metadata(asked).is_ok_and(|metadata| metadata.is_file());
    let name = asked.to_str().filter(|name| !name.contains('/'));
    let (shown, text) = match name.filter(|_| !is_file()) {
        Some(name) => named_profile(name)?,
        None => {
            let text = fs::read_to_string(asked).map_err(|error| {
                Failure::own(format!(
                    "cannot read profile {}: {error}\nhint: profiles that come with jumbo: {}",
                    asked.display(),
                    names()
                ))
            })?;
            (asked.display().to_string(), text)
        }
    };
    Profile::parse(&text)
        .map_err(|error| Failure::own(format!("cannot use profile {shown}: {error}")))
}

fn named_profile(name: &str) -> Result<(String, String), Failure> {
    let home = std::env::var_os("XDG_CONFIG_HOME")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let folders = [home, Some(PathBuf::from("/etc"))];
    for folder in folders.into_iter().flatten() {
        let file = folder.join(format!("jumbo/profiles/{name}.toml"));
        let shown = file.display().to_string();
        match fs::read_to_string(&file) {
            Ok(text) => return Ok((shown, text)),
            // HOME may be /dev/null.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {}
            Err(error) => {
                return Err(Failure::own(format!(
                    "cannot read profile {shown}: {error}\nhint: name a file: --profile ./{name}.toml"
                )));
            }
        }
    }
    let built_in = BUILT_IN.iter().find(|(known, _)| *known == name);
    built_in
        .map(|(known, text)| ((*known).to_owned(), (*text).to_owned()))
        .ok_or_else(|| {
            Failure::own(format!(
                "there is no profile `{name}`\nhint: profiles that come with jumbo: {}",
                names()
            ))
        })
}

fn names() -> String {
    BUILT_IN.map(|(name, _)| name).join(", ")
}
