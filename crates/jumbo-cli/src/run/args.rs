//! The request: [`Args`] as typed, and [`RunSettings`] with profiles and defaults applied.

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

use super::options::{Options, ReportFormat, ThpMode, arranged};
use super::profile::{FileOption, folders};
use super::{Failure, config, is_off};

/// Run a program with its memory on huge pages
///
/// Starts PROGRAM, unmodified, so that the memory it allocates and its anonymous mappings come in
/// huge pages. It keeps its standard streams, terminal, signals, environment and
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
    /// Known: node, postgresql. Options typed here win. See
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
    pub(super) json: bool,

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

/// The request with all defaults resolved.
#[derive(Debug, Default)]
pub(super) struct RunSettings {
    /// Requested configuration of the preload library, before it is adapted to host and program.
    pub(super) requested: Orders<'static>,
    pub(super) pool: Option<PoolRequest>,
    /// Patterns of libraries, in the format of the orders.
    pub(super) libs: Option<String>,
    /// `--free` was given.
    pub(super) free_given: bool,
    pub(super) thp: Option<ThpMode>,
    pub(super) report: Option<ReportRequest>,
    pub(super) dry_run: bool,
    pub(super) print_env: bool,
    pub(super) json: bool,
    pub(super) command: Vec<OsString>,
}

#[derive(Debug)]
pub(super) struct ReportRequest {
    pub(super) format: ReportFormat,
    pub(super) destination: Destination,
}

#[derive(Debug)]
pub(super) enum Destination {
    Stderr,
    Stdout,
    File(PathBuf),
}

/// Name of the internal subcommand that makes the system calls of a report.
pub(super) const REHEARSE: &str = "rehearse";

impl Args {
    /// Parses the arguments of `jumbo run`; `None` for `--help` and for wrong usage.
    pub(crate) fn read(words: Vec<OsString>) -> Option<Self> {
        let mut matches = command().try_get_matches_from(words).ok()?;
        Self::from_arg_matches_mut(&mut matches).ok()
    }

    /// Arguments that run a program that does nothing, with the report to /dev/null.
    pub(super) fn for_rehearsal() -> std::io::Result<Option<Self>> {
        let options = "--no-config --free=off --text=off --data=off --shm=off --reaper=off --report=json --report-file=/dev/null --";
        let mut words: Vec<OsString> = options.split(' ').map(OsString::from).collect();
        words.push(std::env::current_exe()?.into());
        words.push(REHEARSE.into());
        Ok(Self::read(words))
    }

    /// Options that configuration files and the profile set for the program.
    pub(super) fn entries(&self) -> Result<Vec<FileOption>, Failure> {
        let program = self.command.first().map(Path::new);
        // The user's file overrides the system's.
        let folders = folders().rev().filter(|_| !self.no_config);
        config::layered(
            folders,
            program.and_then(Path::file_name),
            self.profile.as_deref(),
        )
    }

    /// Parses the arguments again, after the options of the files: the last of an option counts.
    fn with_files(self) -> Result<Self, Failure> {
        let words = self.entries()?.into_iter().filter_map(|entry| entry.word);
        let mut words: Vec<_> = words.collect();
        if words.is_empty() {
            return Ok(self);
        }
        // Skips `jumbo run` itself.
        words.extend(std::env::args_os().skip(2));
        Self::read(words).ok_or_else(|| usage("the options and those of files contradict"))
    }
}

pub(super) fn command() -> clap::Command {
    Args::augment_args(clap::Command::new("run").no_binary_name(true))
}

impl RunSettings {
    /// Reports whether jumbo stays as the program's parent.
    pub(super) fn is_parent(&self) -> bool {
        self.report.is_some() || self.shares_pool()
    }

    /// Reports whether all processes of the run share one pool, which jumbo accounts for.
    pub(super) fn shares_pool(&self) -> bool {
        self.pool.is_some_and(|pool| !pool.each)
    }

    /// Adds a hint to a failure to find the program: in `--report json` the word `json` is taken
    /// for the program.
    pub(super) fn explain(&self, mut failure: Failure) -> Failure {
        let name = self.command.first().and_then(|name| name.to_str());
        let format = name.filter(|name| ReportFormat::from_str(name, false).is_ok());
        if let (Some(format), true) = (format, self.report.is_some()) {
            let message = failure.message.split("; hint: ").next().unwrap_or_default();
            failure.message = format!("{message}; hint: --report={format}, with an equals sign");
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

    /// Settings of options alone, without a command.
    pub(super) fn of(options: Options) -> Result<Self, Failure> {
        check_keep(&options)?;
        Ok(Self {
            requested: options.orders(),
            pool: pool(&options)?,
            free_given: options.free.is_some(),
            thp: options.thp,
            libs: options.libs,
            report: match options.quiet {
                true => None,
                false => requested_report(options.report, options.report_file),
            },
            ..Self::default()
        })
    }
}

fn usage(message: impl Into<String>) -> Failure {
    Failure {
        code: super::USAGE,
        message: message.into(),
    }
}

/// Rejects `--keep` without jumbo's heap.
fn check_keep(options: &Options) -> Result<(), Failure> {
    match options.keep.is_some() && options.heap == Some(HeapMode::Off) {
        true => Err(usage(
            "--keep does not go with --heap=off; hint: drop one of them",
        )),
        false => Ok(()),
    }
}

/// The requested pool with the options that apply to it. A pool needs a heap, and these options
/// need a pool.
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
    checked
        .and_then(|()| check_page_size(pool))
        .map_err(usage)?;
    Ok(Some(pool))
}

/// Checks that the host has pages of the requested size, and that the pool holds at least one.
fn check_page_size(pool: PoolRequest) -> Result<(), String> {
    let root = Root::host();
    let pools = hugetlb::pools(&root).ok().flatten().unwrap_or_default();
    let pmd = thp::pmd_size(&root).unwrap_or_else(|_| thp::reach_of_pmd(base_page(&root)));
    pool.check_pages(pmd).map_err(|error| error.to_string())?;
    let Some(page) = pool.page else { return Ok(()) };
    let known = |size: &PageSize| pools.iter().any(|pool| pool.size == *size);
    // 1 GiB is accepted on every host, so that one command line serves all; the report says when
    // there are no such pages.
    if pools.is_empty() || page == pmd || page == PageSize::SIZE_1G || known(&page) {
        return Ok(());
    }
    let sizes: Vec<_> = pools.iter().map(|pool| pool.size.to_string()).collect();
    Err(format!(
        "there are no huge pages of {page} here; hint: {}",
        sizes.join(", or ")
    ))
}

fn requested_report(format: Option<ReportFormat>, file: Option<PathBuf>) -> Option<ReportRequest> {
    let on_terminal = || is_terminal(std::io::stdout()) && is_terminal(std::io::stderr());
    let format = match format {
        None if file.is_some() || on_terminal() => ReportFormat::Text,
        None | Some(ReportFormat::None) => return None,
        Some(format) => format,
    };
    let destination = match file {
        None => Destination::Stderr,
        Some(file) if file.as_os_str() == "-" => Destination::Stdout,
        Some(file) => Destination::File(file),
    };
    Some(ReportRequest {
        format,
        destination,
    })
}

/// Reports whether a descriptor is a terminal. Under a seccomp filter it checks the link in /proc
/// instead: the filter may kill a caller of isatty(3), and links in /proc are read anyway.
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
