//! `jumbo pool set`, `grow` and `shrink`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use jumbo::units::{NodeId, PageSize, Pages, counted};
use jumbo_host::host_pools::{self, Effect, PoolChange, PoolPlan, Shortage, obstacles};
use jumbo_host::kernel::cgroup::{Limit, Limits};
use jumbo_host::kernel::hugetlb::Pool;
use jumbo_host::kernel::memory::Memory;
use jumbo_host::kernel::{Root, hvo};
use jumbo_host::knobs::Group;
use serde::Serialize;

use super::amount::Amount;
use super::{ChangeOptions, Compact, groups, pool};
use crate::knobs::change::{self, Change};
use crate::knobs::{boot, undo};
use crate::value::whole;
use crate::view::View;

/// Set the number of pages of a pool
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true)
    .args(["persistent", "overcommit", "print_boot", "undo"]))]
#[command(group = clap::ArgGroup::new("forcible").multiple(true).args(["persistent", "undo"]))]
#[command(mut_arg("force", |force| force.requires("forcible").help(FORCE)))]
// The usage line that clap generates has 113 columns.
#[command(
    override_usage = "jumbo pool set [OPTIONS] --persistent|--overcommit <PAGES|BYTES> [SIZE]
       jumbo pool set [OPTIONS] --print-boot|--undo [SIZE]"
)]
#[command(after_help = "Examples:
  jumbo pool set 2M --persistent 512 --dry-run
  jumbo pool set 2M --persistent 4G --node 1 --compact
  jumbo pool set 2M --print-boot     # the lines for a boot: as it is now
  jumbo pool set 2M --undo")]
pub(crate) struct SetArgs {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE", required_unless_present = "undo")]
    size: Option<PageSize>,

    /// Number of persistent pages, in use or free
    #[arg(
        long,
        value_name = "PAGES|BYTES",
        conflicts_with = "undo",
        allow_hyphen_values = true
    )]
    persistent: Option<Amount>,

    /// Maximum number of surplus pages, which the kernel allocates on demand
    #[arg(long, value_name = "PAGES|BYTES", conflicts_with_all = ["node", "undo"],
        allow_hyphen_values = true)]
    overcommit: Option<Amount>,

    #[command(flatten)]
    common: CommonArgs,
}

pub(super) const FORCE: &str = "Request more memory than is available; with --undo: restore even what another program changed since";

/// Arguments of grow and shrink.
#[derive(Debug, clap::Args)]
pub(super) struct ResizeArgs {
    /// The page size: 2M, 1G
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

    #[command(flatten)]
    common: CommonArgs,
}

/// Common arguments of set, grow and shrink.
#[derive(Debug, clap::Args)]
struct CommonArgs {
    /// The NUMA node to change; else the kernel distributes over all
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "undo",
        value_parser = whole::<u32>,
        allow_negative_numbers = true
    )]
    node: Option<u32>,

    #[command(flatten)]
    compact: Compact,

    #[command(flatten)]
    options: ChangeOptions,
}

pub(super) fn set(root: &Root, args: &SetArgs) -> anyhow::Result<ExitCode> {
    change(root, args.size, &args.common, &|size| PoolChange {
        persistent: args
            .persistent
            .map(|to| host_pools::Amount::To(to.pages(size))),
        overcommit: args.overcommit.map(|to| to.pages(size)),
        node: args.common.node.map(NodeId),
    })
}

pub(super) fn by(
    root: &Root,
    args: &ResizeArgs,
    direction: fn(Pages) -> host_pools::Amount,
) -> anyhow::Result<ExitCode> {
    change(root, args.size, &args.common, &|size| PoolChange {
        persistent: args.by.map(|by| direction(by.pages(size))),
        overcommit: None,
        node: args.common.node.map(NodeId),
    })
}

fn change(
    root: &Root,
    size: Option<PageSize>,
    common: &CommonArgs,
    wish: &dyn Fn(PageSize) -> PoolChange,
) -> anyhow::Result<ExitCode> {
    let (options, compact) = (&common.options, common.compact.compact);
    let size = match size {
        Some(size) if !options.undo => size,
        Some(size) => return undo::main(root, &[Group::pool(size)], &options.mode, compact),
        None => return undo::main(root, &groups(root)?, &options.mode, compact),
    };
    let wish = wish(size);
    if options.print_boot {
        let before = pool(root, size)?;
        let plan = PoolPlan::new(&before, &wish)?;
        let (values, pages) = host_pools::boot::values(&before, &wish, &plan);
        let pages = pages.filter(|_| host_pools::is_gigantic(root, size));
        let arguments = pages.map(|pages| {
            (
                host_pools::boot::command_line(size, &[(wish.node, pages)]),
                "The kernel makes pages of this size before memory is in pieces.".to_owned(),
            )
        });
        return boot::print(
            root,
            &Group::pool(size),
            &values,
            arguments,
            options.mode.json,
        );
    }
    change::change(root, &options.mode, || {
        let before = pool(root, size)?;
        let plan = PoolPlan::new(&before, &wish)?;
        let made = plan.effect.made;
        let mut notes = Vec::from_iter(slow(root, &before, &wish));
        if options.mode.dry_run {
            notes.extend(obstacles(root, size, wish.node, made));
        }
        let mut change = Change::new(plan.writes, notes);
        change.needs_force = more_than_available(root, size, made);
        change.compact = compact && made > Pages(0);
        change.pool = Some(PoolDelta::new(before, plan.effect));
        Ok(change)
    })
}

/// Reason to refuse `made` new pages without --force: they exceed the available memory. The kernel
/// would allocate pages until the host has none left, and the user may have mistyped a size.
fn more_than_available(root: &Root, size: PageSize, made: Pages) -> Option<String> {
    let wanted = made.bytes(size);
    let available = Memory::read(root).ok()?.available;
    (wanted > available).then(|| {
        format!(
            "{} would be {wanted}, and {available} are available: the host would run out of memory",
            counted(made.0, "more page")
        )
    })
}

fn slow(root: &Root, pool: &Pool, wish: &PoolChange) -> Option<String> {
    let lends = wish.overcommit.is_some_and(|to| to > pool.overcommit);
    (lends && hvo::surplus_is_slow(root)).then(|| {
        "HVO is on, and on this kernel each surplus page waits milliseconds for it: persistent pages are \
         made all at once"
            .to_owned()
    })
}

#[derive(Serialize)]
pub(crate) struct PoolDelta {
    size: PageSize,
    effect: Effect,
    before: Pool,
    /// The pool now; the same as `before` in a dry run.
    after: Pool,
}

impl PoolDelta {
    pub(super) fn new(before: Pool, effect: Effect) -> Self {
        Self {
            size: before.size,
            effect,
            after: before.clone(),
            before,
        }
    }

    pub(crate) fn show(&self, view: &mut View, shortage: Option<&Shortage>) {
        let Self { size, effect, .. } = self;
        let mut show = |pages: Pages, what: &str| {
            if pages > Pages(0) {
                let (pages, memory) = (counted(pages.0, "page"), pages.bytes(*size));
                view.line(format!("    {pages} ({memory}) {what}"));
            }
        };
        show(effect.adopted, "surplus before, persistent now");
        match shortage {
            Some(short) => show(short.came, &format!("of {} came", short.asked)),
            None => show(effect.made, "made of free memory"),
        }
        show(effect.freed, "returned to the host");
        show(
            effect.turned_surplus,
            "in use or reserved: returned once they are free",
        )
    }

    /// Reads the pool again; returns notes.
    pub(crate) fn reread(&mut self, root: &Root) -> Vec<String> {
        match pool(root, self.size) {
            Ok(now) => {
                self.after = now;
                let mut notes = Vec::from_iter(self.correct_freed());
                notes.extend(limits(root, &self.after));
                notes
            }
            Err(_) => Vec::new(),
        }
    }

    /// Subtracts the pages that the kernel could not free; returns a note with the reason.
    fn correct_freed(&mut self) -> Option<String> {
        let (size, asked) = (self.size, self.effect.freed);
        let kept = self.effect.kept(&self.before, &self.after);
        self.effect.freed = Pages(asked.0 - kept.0);
        (kept > Pages(0)).then(|| {
            format!(
                "{} of {asked} stayed, as surplus that no program uses: to free a page that HVO optimised, the \
                 kernel needs memory for its metadata; hint: free some, then jumbo pool grow {size} {kept} and \
                 jumbo pool shrink {size} {kept}",
                counted(kept.0, "page"),
            )
        })
    }
}

/// Notes on limits of this control group below the unused pages of the pool: a mapping beyond them
/// fails although pages are free.
fn limits(root: &Root, pool: &Pool) -> Vec<String> {
    let limits = Limits::read(root, &[pool.size]).unwrap_or_default();
    let unused = pool.unused().bytes(pool.size);
    let kinds = [("use", &limits.hugetlb), ("reserve", &limits.reservations)];
    let limit = |(what, limits): (&str, &BTreeMap<PageSize, Limit>)| {
        let limit = limits
            .get(&pool.size)
            .filter(|limit| limit.room() < unused)?;
        Some(format!(
            "this control group may {what} {} of the {unused} that are free ({})",
            limit.room(),
            limit.file.display()
        ))
    };
    kinds.into_iter().filter_map(limit).collect()
}
