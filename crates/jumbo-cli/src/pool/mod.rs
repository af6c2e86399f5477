//! `jumbo pool`: the kernel's hugetlb pools, one file a subcommand.
//!
//! - [`show`], with the [`table`] of pools, and [`watch`]: look. [`wait`]: until pages are free.
//! - [`change`]: set, grow, shrink. [`undo`]: back. [`auto`]: both, by demand.
//! - [`outcome`]: what a change says. [`attend`]: signals and progress meanwhile.

mod amount;
mod attend;
mod auto;
mod change;
mod outcome;
mod show;
pub(crate) mod table;
mod undo;
mod wait;
mod watch;

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use jumbo::kernel::hugetlb::{self, Pool};
use jumbo::kernel::{FileError, Root};
use jumbo::pool::host::carry::CarryError;
use jumbo::pool::host::{Journal, JournalError};
use jumbo::units::PageSize;

use crate::view::{in_words, tell};

pub(crate) use wait::TIMED_OUT;

/// The exit status where a part of what was asked came.
const PART: u8 = 3;

/// The exit status of a command line that makes no sense.
const USAGE: u8 = 2;

/// Show, resize and steer the kernel's huge page pools
///
/// A change is a plan: --dry-run prints it and writes nothing. What was before is recorded first, each
/// write is read back, and --undo puts back the last change, however it ended. Ctrl-C puts back at once.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(mut_arg("dry_run", |dry_run| dry_run.requires("undo")))]
#[command(mut_arg("compact", |compact| compact.requires("undo")))]
#[command(mut_arg("force", |force| force.requires("undo").help(undo::FORCE)))]
#[command(after_help = "Examples:
  jumbo pool                                   # the pools, and who has their pages
  jumbo pool set 2M --persistent 512 --dry-run
  jumbo pool set 2M --persistent 4G --overcommit 1G --persist
  jumbo pool grow 1G 2 --compact
  jumbo pool --undo
  jumbo pool wait 2M 512 --timeout 120 && ./start-database
  jumbo pool auto 2M --min 0 --max 8G --keep-free 2G

A number is pages, a number with a unit is memory.

Exit status: 0 done; 3 a part of it: fewer pages came, or could be put back, than asked;
1 failed, nothing changed; 2 wrong usage; 124 `wait` waited in vain; 128+N signal N ended it,
and what was changed was put back.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Put back what the last change of any pool recorded
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    how: undo::Manner,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    Set(change::SetArgs),
    Grow(change::GrowArgs),
    Shrink(change::ShrinkArgs),
    Watch(watch::Args),
    Auto(auto::Args),
    Wait(wait::Args),
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(args.root);
    match args.command {
        None if args.undo => undo::main(&root, None, &args.how),
        None => show::main(&root, &show::Args::all(args.how.json)),
        Some(Command::Show(args)) => show::main(&root, &args),
        Some(Command::Set(args)) => change::set(&root, &args),
        Some(Command::Grow(args)) => change::grow(&root, &args),
        Some(Command::Shrink(args)) => change::shrink(&root, &args),
        Some(Command::Watch(args)) => watch::main(&root, &args),
        Some(Command::Auto(args)) => auto::main(&root, &args),
        Some(Command::Wait(args)) => wait::main(&root, &args),
    }
}

/// Every pool.
fn pools(root: &Root) -> anyhow::Result<Vec<Pool>> {
    hugetlb::pools(root)?.context("this kernel has no hugetlb (CONFIG_HUGETLB_PAGE)")
}

/// The pool of that page size.
fn pool(root: &Root, size: PageSize) -> anyhow::Result<Pool> {
    let pools = pools(root)?;
    let sizes: Vec<_> = pools.iter().map(|pool| pool.size.to_string()).collect();
    pools
        .into_iter()
        .find(|pool| pool.size == size)
        .ok_or_else(|| {
            anyhow!(
                "this kernel has no pool of {size} pages\nhint: it has pools of {}",
                sizes.join(", ")
            )
        })
}

/// The journal, or why there is none.
fn journal(root: &Root) -> anyhow::Result<Journal> {
    Journal::of_user(root).ok_or_else(|| {
        anyhow!(
            "there is no place to record what was before: XDG_RUNTIME_DIR is not set\n\
             hint: changing the kernel's pools takes root"
        )
    })
}

/// The command line, for whoever reads the journal.
fn command_line() -> String {
    let words = std::env::args().skip(1);
    std::iter::once("jumbo".to_owned())
        .chain(words)
        .collect::<Vec<_>>()
        .join(" ")
}

fn refused(error: FileError) -> anyhow::Error {
    let hint = hint(&error);
    hinted(error, hint)
}

/// The end of a change that failed: 1 where nothing is changed.
fn failure(error: CarryError) -> anyhow::Result<ExitCode> {
    let left = error.leaves_changes();
    let error = failed(error);
    if left {
        tell(&in_words(&error));
        return Ok(ExitCode::from(PART));
    }
    Err(error)
}

fn failed(error: CarryError) -> anyhow::Error {
    let hint = carry_hint(&error);
    hinted(error, hint)
}

fn carry_hint(error: &CarryError) -> Option<&'static str> {
    match error {
        CarryError::Refused(error) => hint(error),
        CarryError::Failed { error, .. } => carry_hint(error),
        CarryError::Moved { .. } => Some("nothing was changed; try again"),
        CarryError::Journal(error) => journal_hint(error),
        CarryError::Changed { .. } => Some("`--force` puts back what was before all the same"),
        CarryError::Nothing => None,
    }
}

fn unrecorded(error: JournalError) -> anyhow::Error {
    let hint = journal_hint(&error);
    hinted(error, hint)
}

fn journal_hint(error: &JournalError) -> Option<&'static str> {
    match error {
        JournalError::Busy { .. } => {
            Some("wait until it is done, or stop it: what it changed it puts back")
        }
        JournalError::Io { source, .. } => of_kind(source.kind()),
        JournalError::Unsafe { .. } => Some(
            "records say what `--undo` writes, so nobody else may change them; remove the folder",
        ),
        JournalError::Content { .. } => Some("remove the file to do without this record"),
    }
}

fn hint(error: &FileError) -> Option<&'static str> {
    of_kind(error.io_kind()?)
}

fn of_kind(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::PermissionDenied => Some("changing the kernel's pools takes root"),
        ErrorKind::ReadOnlyFilesystem => {
            Some("it is read-only here, as in a container: change the pools on the host")
        }
        ErrorKind::InvalidInput => Some(
            "this kernel cannot resize this pool while it runs: `hugepagesz=SIZE hugepages=N` on its \
             command line makes the pages at boot",
        ),
        _ => None,
    }
}

fn hinted(
    error: impl std::error::Error + Send + Sync + 'static,
    hint: Option<&str>,
) -> anyhow::Error {
    match hint {
        Some(hint) => anyhow!("{error}\nhint: {hint}"),
        None => error.into(),
    }
}
