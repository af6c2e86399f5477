//! `jumbo pool`: the kernel's hugetlb pools, one file a subcommand.
//!
//! - [`show`] and [`watch`] read. [`wait`] waits until pages are free.
//! - [`change`]: set, grow, shrink. [`demote`] splits pages. Page metadata: `jumbo vmemmap`.

mod amount;
pub(crate) mod change;
mod demote;
pub(crate) mod show;
mod wait;

use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use jumbo::units::PageSize;
use jumbo_host::host_pools::Amount;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::hugetlb::{self, Pool};
use jumbo_host::knobs::Group;

use crate::knobs::{BareOptions, ChangeOptions, help, undo};

pub(crate) use wait::EXIT_TIMED_OUT;

/// Show and resize the kernel's huge page pools
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(mut_arg("compact", |compact| compact.requires("undo")))]
#[command(after_help = help!("Examples:
  jumbo pool                         # the pools, and who has their pages
  jumbo pool set 2M --persistent 512 --dry-run
  jumbo pool set 2M --persistent 4G --overcommit 1G --print-boot
  jumbo pool grow 1G 2 --compact
  jumbo pool --undo
  jumbo pool wait 2M 512 --timeout 120 && ./start-database

A number is pages, a number with a unit is memory: of whole pages.", "124 `wait` timed out; "))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    bare: BareOptions,

    #[command(flatten)]
    compact: Compact,
}

#[derive(Debug, clap::Args)]
struct Compact {
    /// Have the kernel compact memory first, so that more huge pages can be allocated
    #[arg(long)]
    compact: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    Set(change::SetArgs),
    /// Add pages to a pool
    #[command(mut_arg("force", |force| force.help(change::FORCE)))]
    Grow(change::ResizeArgs),
    /// Take pages from a pool
    ///
    /// Free pages are returned to the host at once. Pages in use become surplus, and are returned
    /// when they are freed.
    // clap does not check `requires` of an option that conflicts with the required one.
    #[command(mut_arg("force", |force| force.requires("undo").conflicts_with_all(["by", "node", "print_boot"])))]
    Shrink(change::ResizeArgs),
    Demote(demote::Args),
    Wait(wait::Args),
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let (root, json) = (Root::at(args.bare.root), args.bare.mode.json);
    match args.command {
        None if args.bare.undo => {
            let groups = groups(&root)?;
            undo::main(&root, &groups, &args.bare.mode, args.compact.compact)
        }
        None => show::main(&root, None, json),
        Some(Command::Show(args)) => show::main(&root, args.size, json),
        Some(Command::Set(args)) => change::set(&root, &args),
        Some(Command::Grow(args)) => change::by(&root, &args, Amount::More),
        Some(Command::Shrink(args)) => change::by(&root, &args, Amount::Less),
        Some(Command::Demote(args)) => demote::main(&root, &args),
        Some(Command::Wait(args)) => wait::main(&root, &args, json),
    }
}

/// Groups of `--undo` without a SIZE.
fn groups(root: &Root) -> anyhow::Result<Vec<Group>> {
    let pools = hugetlb::pools(root)?.unwrap_or_default();
    let pools = pools.iter().map(|pool| Group::pool(pool.size));
    Ok(pools.collect())
}

fn pools(root: &Root) -> anyhow::Result<Vec<Pool>> {
    hugetlb::pools(root)?.context("this kernel has no hugetlb (CONFIG_HUGETLB_PAGE)")
}

pub(crate) fn pool(root: &Root, size: PageSize) -> anyhow::Result<Pool> {
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
