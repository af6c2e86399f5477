//! `jumbo vmemmap`: the metadata of the kernel's hugetlb pages, and HVO, which frees most of it.
//!
//! - [`show`]: look. [`measure`]: what it costs here. [`estimate`]: the arithmetic. [`switch`]: on and off, and pages made anew.

mod estimate;
mod measure;
mod show;
mod switch;

use std::path::PathBuf;
use std::process::ExitCode;

use jumbo::kernel::Root;
use jumbo::knobs::Group;

use crate::knobs::{Manner, undo};

/// Show and switch what the metadata of huge pages takes
///
/// The kernel describes each base page by 64 bytes: 16 GiB for each TiB. HVO frees those of huge pages
/// but for one base page of them. A change is a plan: --dry-run prints it and writes nothing, what was
/// before is recorded first, each write is read back, and --undo puts it back. Ctrl-C puts back at once.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(mut_arg("dry_run", |dry_run| dry_run.requires("undo")))]
#[command(mut_arg("force", |force| force.requires("undo")))]
#[command(after_help = "Examples:
  jumbo vmemmap                      # is HVO on, and what does it save
  jumbo vmemmap show --measure       # and what it costs here
  jumbo vmemmap on --persist
  jumbo vmemmap on --convert --dry-run     # pages that are there, too
  jumbo vmemmap --undo
  jumbo vmemmap estimate --pool 1T

Exit status: 0 done; 3 a part of it: fewer pages came again than were given back; 1 failed, nothing \
changed; 2 wrong usage; 128+N signal N ended it, and what was changed was put back.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Put back what the last change of HVO recorded
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    manner: Manner,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    On(switch::OnArgs),
    Off(switch::OffArgs),
    Estimate(estimate::Args),
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.root);
    match &args.command {
        None if args.undo => undo::main(&root, &[Group::hvo()], &args.manner, false),
        None => show::main(&root, args.manner.json, false),
        Some(Command::Show(args)) => show::main(&root, args.json, args.measure),
        Some(Command::On(args)) => switch::on(&root, args),
        Some(Command::Off(args)) => switch::off(&root, args),
        Some(Command::Estimate(args)) => estimate::main(&root, args),
    }
}
