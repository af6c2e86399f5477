//! `jumbo vmemmap`: the metadata of the kernel's hugetlb pages, and HVO, which frees most of it.
//!
//! - [`show`]: look. [`measure`]: what it costs here. [`estimate`]: the arithmetic. [`switch`]: on and off, and pages made anew.

mod estimate;
mod measure;
mod show;
mod switch;

use std::process::ExitCode;

use jumbo_host::kernel::Root;
use jumbo_host::knobs::Group;

use crate::knobs::{Bare, help, undo};

/// Show and switch what the metadata of huge pages takes
///
/// The kernel describes each base page by 64 bytes: 16 GiB for each TiB. HVO frees those of huge pages
/// but for one base page of them.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = help!("Examples:
  jumbo vmemmap                      # is HVO on, and what does it save
  jumbo vmemmap show --measure       # and what it costs here
  jumbo vmemmap on --persist
  jumbo vmemmap on --convert --dry-run     # pages that are there, too
  jumbo vmemmap --undo
  jumbo vmemmap estimate --pool 1T"))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    bare: Bare,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    On(switch::OnArgs),
    Off(switch::OffArgs),
    Estimate(estimate::Args),
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.bare.root);
    match &args.command {
        None if args.bare.undo => undo::main(&root, &[Group::hvo()], &args.bare.manner, false),
        None => show::main(&root, args.bare.manner.json, false),
        Some(Command::Show(args)) => show::main(&root, args.json, args.measure),
        Some(Command::On(args)) => switch::on(&root, args),
        Some(Command::Off(args)) => switch::off(&root, args),
        Some(Command::Estimate(args)) => estimate::main(&root, args),
    }
}
