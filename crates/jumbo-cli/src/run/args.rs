//! The request: [`Args`] as typed, and [`Settings`] with the profile and the defaults filled in.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::{Path, PathBuf};

use clap::{Args as _, FromArgMatches as _, ValueEnum as _};
use jumbo::units::{Bytes, PageSize};
use jumbo_host::kernel::{Root, base_page, hugetlb, thp};
use jumbo_host::policy::{HeapMode, Orders, PoolRequest};
use jumbo_inside::sandbox;

use super::options::{Options, ReportFormat, arranged};
use super::profile::{Entry, folders};
use super::{Failure, config, is_off};

/// Run a program with its memory on huge pages
///
/// Starts PROGRAM, unmodified, so that its large allocations, glibc's heap and its anonymous
/// mappings come in huge pages. It keeps its standard streams, terminal, signals, environment and
/// exit status. Its children are covered too.
///
/// On a terminal a report follows when the program ends: what was huge at the peak, and why not
/// more. Without a report to write or a --pool for all processes, jumbo becomes the program: same
/// process ID.
#[derive(Debug, clap::Args)]
#[command(override_usage = "jumbo run [OPTIONS] [--] PROGRAM [ARG]...")]
#[command(args_override_self = true, mut_args(arranged))]
#[command(after_help = "`jumbo run --help` has all options, each with the name of its document.")]
#[command(after_long_help = "Examples:
  jumbo run -- python3 train.py
  jumbo run --report=json --report-file peak.json -- ./server -p 80
  jumbo run --profile postgresql -- pg_ctl start
  jumbo run --dry-run -- node app.js     # what would be done, and why

Exit status: the program's; 128+N when signal N ended it; 127 no such program, 126 it cannot be \
started, 125 jumbo itself failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// Take options from FILE, or from a profile known by NAME
    ///
    /// Known: cpython, duckdb, node, postgresql. Options typed here win. See
    /// docs/run.md
    #[arg(long, value_name = "FILE|NAME")]
    profile: Option<PathBuf>,

    /// Show where the value of each option comes from, and run nothing
    ///
    /// With --json as JSON. Without PROGRAM: the options for all. See docs/run.md
    #[arg(long)]
    pub(super) show_config: bool,

    /// Take no options from /etc/jumbo.toml and ~/.config/jumbo.toml
    ///
    /// See docs/run.md
    #[arg(long)]
    no_config: bool,

    /// Show what would be done and run nothing
    ///
    /// With --json as JSON. See docs/run.md
    #[arg(long)]
    dry_run: bool,

    /// Print the environment that PROGRAM would get, and run nothing
    ///
    /// A line NAME=VALUE for each variable that jumbo sets. Without PROGRAM: for any program. See
    /// docs/run.md
    #[arg(long, conflicts_with_all = ["dry_run", "show_config"])]
    print_env: bool,

    /// With --dry-run, --print-env, --show-config: as JSON, for scripts
    ///
    /// The report as JSON is --report=json. See docs/report.md
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    options: Options,

    /// The program and its arguments
    #[arg(
        required_unless_present_any = ["show_config", "print_env"],
        trailing_var_arg = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

/// The request with nothing left open.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// The orders for the preload library, before the host and the program have their say.
    pub(super) asked: Orders<'static>,
    pub(super) pool: Option<PoolRequest>,
    /// Patterns of libraries, as they stand in the orders.
    pub(super) libs: Option<String>,
    /// How large frees are done was said, rather than left at its default.
    pub(super) free_asked: bool,
    pub(super) report: Option<Wanted>,
    pub(super) dry_run: bool,
    pub(super) print_env: bool,
    pub(super) json: bool,
    pub(super) command: Vec<OsString>,
}

/// A report that the user wants.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) format: ReportFormat,
    pub(super) place: Place,
}

/// Where a report goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Stderr,
    Stdout,
    File(PathBuf),
}

impl Args {
    /// The arguments of `jumbo run`; `None` where they ask for help, or are wrong.
    pub(crate) fn read(words: Vec<OsString>) -> Option<Self> {
        let mut matches = command().try_get_matches_from(words).ok()?;
        Self::from_arg_matches_mut(&mut matches).ok()
    }

    /// A program that does nothing, with a report that is thrown away.
    pub(super) fn for_rehearsal() -> std::io::Result<Option<Self>> {
        let options = "--no-config --free=off --text=off --data=off --shm=off --reaper=off --report=json --report-file=/dev/null --";
        let mut words: Vec<OsString> = options.split(' ').map(OsString::from).collect();
        words.push(std::env::current_exe()?.into());
        words.push(crate::rehearse::NAME.into());
        Ok(Self::read(words))
    }

    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// The options that files set for the program.
    pub(super) fn entries(&self) -> Result<Vec<Entry>, Failure> {
        let program = self.command.first().map(Path::new);
        // The user's file counts over the system's.
        let folders = folders().rev().filter(|_| !self.no_config);
        config::layered(
            folders,
            program.and_then(Path::file_name),
            self.profile.as_deref(),
        )
    }

    /// These, behind the options of the files. Of an option that is there twice the last counts.
    fn with_files(self) -> Result<Self, Failure> {
        let words = self.entries()?.into_iter().filter_map(|entry| entry.word);
        let mut words: Vec<_> = words.collect();
        if words.is_empty() {
            return Ok(self);
        }
        // `jumbo run` itself.
        words.extend(std::env::args_os().skip(2));
        Self::read(words).ok_or_else(|| usage("the options and those of files contradict"))
    }
}

/// The parser of the arguments.
pub(super) fn command() -> clap::Command {
    Args::augment_args(clap::Command::new("run").no_binary_name(true))
}

impl Settings {
    /// True where jumbo stays, as the program's parent.
    pub(super) fn is_parent(&self) -> bool {
        self.report.is_some() || self.shares_pool()
    }

    /// True where all processes of the run share one pool: jumbo keeps the account of it.
    pub(super) fn shares_pool(&self) -> bool {
        self.pool.is_some_and(|pool| !pool.each)
    }

    /// Why there is no such program, with what may have been meant: `--report json`, where the word
    /// is taken for the program.
    pub(super) fn explain(&self, mut failure: Failure) -> Failure {
        let name = self.command.first().and_then(|name| name.to_str());
        let format = name.filter(|name| ReportFormat::from_str(name, false).is_ok());
        if let (Some(format), true) = (format, self.report.is_some()) {
            let end = failure.message.find("; hint: ");
            failure
                .message
                .truncate(end.unwrap_or(failure.message.len()));
            failure.message += &format!("; hint: --report={format}, with an equals sign");
        }
        failure
    }

    pub(super) fn new(args: Args) -> Result<Self, Failure> {
        if args.json && !args.dry_run && !args.print_env {
            return Err(usage(
                "--json is for --dry-run, --print-env and --show-config; hint: a report as JSON is --report=json",
            ));
        }
        // A typed --report=json makes --dry-run print JSON, the report of a profile does not.
        let json = args.json || args.options.report == Some(ReportFormat::Json);
        let args = match is_off() {
            true => Args {
                options: Options {
                    quiet: true,
                    ..Options::default()
                },
                ..args
            },
            false => args.with_files()?,
        };
        Ok(Self {
            json,
            dry_run: args.dry_run,
            print_env: args.print_env,
            command: args.command,
            ..Self::of(args.options)?
        })
    }

    /// The settings of options alone, without a command.
    pub(super) fn of(options: Options) -> Result<Self, Failure> {
        check_keep(&options)?;
        Ok(Self {
            asked: options.orders(),
            pool: pool(&options)?,
            free_asked: options.free.is_some(),
            libs: options.libs,
            report: match options.quiet {
                true => None,
                false => wanted(options.report, options.report_file),
            },
            ..Self::default()
        })
    }
}

/// Options that do not go together.
fn usage(message: impl Into<String>) -> Failure {
    Failure {
        code: super::USAGE,
        message: message.into(),
    }
}

/// `--keep` is about jumbo's own heap.
fn check_keep(options: &Options) -> Result<(), Failure> {
    let is_mimallocs = options.heap == Some(HeapMode::Mimalloc) && options.pool.is_some();
    match options.keep.is_some() && (is_mimallocs || options.heap == Some(HeapMode::Off)) {
        true => Err(usage(
            "--keep goes neither with --heap=off nor with --heap=mimalloc and --pool; hint: drop one of them",
        )),
        false => Ok(()),
    }
}

/// The pool with what other options say of it. It is for a heap, and they are for a pool.
fn pool(options: &Options) -> Result<Option<PoolRequest>, Failure> {
    let (overcommit, warm) = (options.overcommit.unwrap_or_default(), options.warm);
    let Some(mut pool) = options.pool else {
        return match warm || overcommit > Bytes(0) {
            true => Err(usage(
                "--overcommit and --warm are for a pool; hint: add --pool SIZE",
            )),
            false => Ok(None),
        };
    };
    if options.heap == Some(HeapMode::Off) {
        return Err(usage(
            "a pool is for the heap, and --heap=off leaves that alone; hint: drop one of them",
        ));
    }
    (pool.overcommit, pool.warm) = (overcommit, warm);
    let checked = pool.check().map_err(|error| error.to_string());
    checked.and_then(|()| known_size(pool)).map_err(usage)?;
    Ok(Some(pool))
}

/// Whether there are pages of that size, and one of them is not more than was asked for.
fn known_size(pool: PoolRequest) -> Result<(), String> {
    let root = Root::host();
    let pools = hugetlb::pools(&root).ok().flatten().unwrap_or_default();
    let pmd = thp::pmd_size(&root).unwrap_or_else(|_| thp::reach_of_pmd(base_page(&root)));
    pool.check_pages(pmd).map_err(|error| error.to_string())?;
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

fn wanted(format: Option<ReportFormat>, file: Option<PathBuf>) -> Option<Wanted> {
    let on_terminal = || is_terminal(std::io::stdout()) && is_terminal(std::io::stderr());
    let format = match format {
        None if file.is_some() || on_terminal() => ReportFormat::Text,
        None | Some(ReportFormat::None) => return None,
        Some(format) => format,
    };
    let place = match file {
        None => Place::Stderr,
        Some(file) if file.as_os_str() == "-" => Place::Stdout,
        Some(file) => Place::File(file),
    };
    Some(Wanted { format, place })
}

/// Whether a descriptor is a terminal's. Under a seccomp filter by its name: to ask as isatty(3)
/// does may be the end of who asks, and a link in /proc is read anyway, to find the library.
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
