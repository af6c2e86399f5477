//! `jumbo vmemmap`: the metadata of the kernel's hugetlb pages, and HVO, which frees most of it.
//!
//! - [`show`] reads. [`switch`]: on and off, and existing pages converted.

mod show;
mod switch;

use std::process::ExitCode;

use jumbo_host::kernel::Root;
use jumbo_host::knobs::Group;

use crate::knobs::{BareOptions, ChangeOptions, help, undo};

/// Show and reduce the memory of huge page metadata
///
/// The kernel has 64 bytes of metadata for each base page: 16 GiB for each TiB. For a huge page HVO
/// frees all of it except one base page.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = help!("Examples:
  jumbo vmemmap                      # is HVO on, and what does it save
  jumbo vmemmap on --print-boot
  jumbo vmemmap on --convert --dry-run     # existing pages, too
  jumbo vmemmap --undo"))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    bare: BareOptions,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show whether HVO is on, what it saves, and what it could
    Show,
    On(switch::OnArgs),
    /// Keep all metadata of new hugetlb pages
    ///
    /// Pages made while HVO was on stay unchanged. To free one, the kernel first needs memory for
    /// its metadata: without it the page stays in its pool.
    #[command(mut_arg("force", |force| force.requires("undo")))]
    Off(ChangeOptions),
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.bare.root);
    match &args.command {
        None if args.bare.undo => undo::main(&root, &[Group::hvo()], &args.bare.mode, false),
        None | Some(Command::Show) => show::main(&root, args.bare.mode.json),
        Some(Command::On(args)) => switch::switch(&root, true, args.convert, &args.options),
        Some(Command::Off(options)) => switch::switch(&root, false, None, options),
    }
}
