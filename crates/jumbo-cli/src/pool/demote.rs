//! `jumbo pool demote`.

use std::process::ExitCode;

use anyhow::anyhow;
use jumbo::units::{NodeId, PageSize, Pages, counted};
use jumbo_host::host_pools;
use jumbo_host::kernel::Root;
use jumbo_host::knobs::Group;

use super::amount::Amount;
use super::pool;
use crate::knobs::change::{self, Change};
use crate::knobs::{Mode, undo};
use crate::value::whole;

/// Split free pages of a pool into smaller ones
///
/// The kernel splits them in place: the smaller pool has them at once, without an allocation.
/// `--undo` frees the small pages and requests as many large ones. That succeeds only if contiguous
/// memory is free.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo pool demote 1G 2 --dry-run
  jumbo pool demote 1G 4G --node 1
  jumbo pool demote 1G --undo")]
pub(super) struct Args {
    /// The page size: 1G
    #[arg(value_name = "SIZE", required_unless_present = "undo")]
    size: Option<PageSize>,

    /// Number of pages, or size of memory
    #[arg(
        value_name = "PAGES|BYTES",
        required_unless_present = "undo",
        conflicts_with = "undo",
        allow_negative_numbers = true
    )]
    by: Option<Amount>,

    /// The NUMA node whose pages are split; else the kernel chooses
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "undo",
        value_parser = whole::<u32>,
        allow_negative_numbers = true
    )]
    node: Option<u32>,

    /// Restore the values before the last change; once more: before all changes
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    mode: Mode,
}

pub(super) fn main(root: &Root, args: &Args) -> anyhow::Result<ExitCode> {
    let (size, by) = match (args.size, args.by) {
        (Some(size), Some(by)) if !args.undo => (size, by.pages(size)),
        (Some(size), _) => return undo::main(root, &[Group::pool(size)], &args.mode, false),
        (None, _) => return undo::main(root, &super::groups(root)?, &args.mode, false),
    };
    change::change(root, &args.mode, || {
        let large = pool(root, size)?;
        let smaller = large.demote_size.ok_or_else(|| {
            anyhow!(
                "this kernel does not split {size} pages\n\
                 hint: Linux 5.16 splits those that are larger than its smallest huge pages"
            )
        })?;
        let small = pool(root, smaller)?;
        let plan = host_pools::demote(&large, &small, by, args.node.map(NodeId))?;
        let pieces = Pages(by.0 * (size.bytes() / smaller.bytes()));
        let notes = (!plan.is_empty()).then(|| {
            let (has, gets) = (small.persistent(), pieces);
            format!(
                "{} split into {}: the pool of {smaller} pages has {has}, and gets {gets} more",
                counted(by.0, &format!("{size} page")),
                counted(pieces.0, &format!("{smaller} page")),
            )
        });
        Ok(Change::new(plan, Vec::from_iter(notes)))
    })
}
