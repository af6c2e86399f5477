//! `jumbo pool set`, `grow` and `shrink`.

use std::process::ExitCode;

use anyhow::bail;
use jumbo::kernel::Root;
use jumbo::kernel::hugetlb::{self, Pool};
use jumbo::kernel::memory::Memory;
use jumbo::pool::host::shortage::is_gigantic;
use jumbo::pool::host::{self, Boot, Knob, Locked, Plan, What, Wish, boot, carry_out};
use jumbo::units::{NodeId, PageSize, Pages, counted};

use super::amount::Amount;
use super::attend::Terminal;
use super::outcome::{self, Outcome};
use super::{PART, command_line, failure, journal, pool, refused, undo, unrecorded};
use crate::value::whole;
use crate::view::tell;

/// Give a pool so many pages
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true)
    .args(["persistent", "overcommit", "persist", "forget", "undo"]))]
#[command(group = clap::ArgGroup::new("forcible").multiple(true).args(["persistent", "undo"]))]
#[command(mut_arg("force", |force| force.requires("forcible")))]
#[command(after_help = "Examples:
  jumbo pool set 2M --persistent 512 --dry-run
  jumbo pool set 2M --persistent 4G --node 1 --compact
  jumbo pool set 2M --persist                  # what the pool is now, at the next boot too
  jumbo pool set 2M --undo")]
pub(crate) struct SetArgs {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE", required_unless_present = "undo")]
    size: Option<PageSize>,

    /// How many pages stay, needed or not
    #[arg(
        long,
        value_name = "PAGES|BYTES",
        conflicts_with = "undo",
        allow_hyphen_values = true
    )]
    persistent: Option<Amount>,

    /// How many surplus pages may be made beyond these, on demand
    #[arg(long, value_name = "PAGES|BYTES", conflicts_with_all = ["node", "undo"],
        allow_hyphen_values = true)]
    overcommit: Option<Amount>,

    #[command(flatten)]
    how: How,

    /// Have nothing of this set at the next boot
    #[arg(long, conflicts_with_all = ["persist", "undo"])]
    forget: bool,
}

/// Add pages to a pool
#[derive(Debug, clap::Args)]
pub(crate) struct GrowArgs {
    #[command(flatten)]
    by: By,
}

/// Take pages from a pool
///
/// Free pages go back to the host at once. Those in use become surplus, and go back when they are free.
#[derive(Debug, clap::Args)]
// That one needs another is not asked where the two could not stand together.
#[command(mut_arg("force", |force| force.requires("undo").conflicts_with_all(["by", "node", "persist"])
    .help(undo::FORCE)))]
pub(crate) struct ShrinkArgs {
    #[command(flatten)]
    by: By,
}

/// What those two take.
#[derive(Debug, clap::Args)]
struct By {
    /// The page size: 2M, 1G
    #[arg(value_name = "SIZE", required_unless_present = "undo")]
    size: Option<PageSize>,

    /// How many pages, or how much memory
    #[arg(
        value_name = "PAGES|BYTES",
        required_unless_present = "undo",
        conflicts_with = "undo",
        allow_negative_numbers = true
    )]
    by: Option<Amount>,

    #[command(flatten)]
    how: How,
}

/// What all three take.
#[derive(Debug, clap::Args)]
struct How {
    /// The node to change; else the kernel spreads over all
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "undo",
        value_parser = whole::<u32>,
        allow_negative_numbers = true
    )]
    node: Option<u32>,

    /// Set it up at the next boot too: in sysctl.d or tmpfiles.d
    #[arg(long, conflicts_with = "undo")]
    persist: bool,

    /// Put back what the last change recorded, of this pool or of any
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    shared: undo::Manner,
}

pub(super) fn set(root: &Root, args: &SetArgs) -> anyhow::Result<ExitCode> {
    let ask = |pool: &Pool| Wish {
        persistent: args
            .persistent
            .map(|amount| host::Amount::To(amount.pages(pool.size))),
        overcommit: args.overcommit.map(|amount| amount.pages(pool.size)),
        node: args.how.node.map(NodeId),
    };
    change(root, args.size, &args.how, args.forget, &ask)
}

pub(super) fn grow(root: &Root, args: &GrowArgs) -> anyhow::Result<ExitCode> {
    change_by(root, &args.by, host::Amount::More)
}

pub(super) fn shrink(root: &Root, args: &ShrinkArgs) -> anyhow::Result<ExitCode> {
    change_by(root, &args.by, host::Amount::Less)
}

fn change_by(
    root: &Root,
    args: &By,
    direction: fn(Pages) -> host::Amount,
) -> anyhow::Result<ExitCode> {
    let ask = |pool: &Pool| Wish {
        persistent: args.by.map(|by| direction(by.pages(pool.size))),
        overcommit: None,
        node: args.how.node.map(NodeId),
    };
    change(root, args.size, &args.how, false, &ask)
}

fn change(
    root: &Root,
    size: Option<PageSize>,
    how: &How,
    forget: bool,
    ask: &dyn Fn(&Pool) -> Wish,
) -> anyhow::Result<ExitCode> {
    let size = match size {
        Some(size) if !how.undo => size,
        size => return undo::main(root, size, &how.shared),
    };
    let plan = |pool: &Pool| -> anyhow::Result<(Plan, Boot)> {
        let wish = ask(pool);
        let mut plan = Plan::new(pool, &wish)?;
        let boot = match (how.persist, forget) {
            (true, _) => {
                let values = at_boot(pool, &wish, &plan);
                boot::persist(root, pool, &values, is_gigantic(root, size))?
            }
            (_, true) => boot::forget(root, size, wish.node)?,
            _ => Boot::default(),
        };
        plan.files.clone_from(&boot.files);
        Ok((plan, boot))
    };
    let before = pool(root, size)?;
    let (planned, boot) = plan(&before)?;
    let mut notes = notes(root, &planned);
    if how.shared.dry_run {
        let (more, node) = (planned.effect.made, how.node.map(NodeId));
        notes.extend(host::doubts(root, size, node, more));
        if let Some(why) = beyond(root, &planned).filter(|_| !how.shared.force) {
            tell(&format!("it would be refused without --force: {why}"));
        }
    }
    if how.shared.dry_run || planned.is_empty() {
        let outcome = Outcome::planned(root, &before, planned, boot, notes, how.shared.dry_run);
        outcome.print(how.shared.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    host::carry::check(root, &planned).map_err(refused)?;

    let command = command_line();
    let locked: Locked = journal(root)?.lock(size, &command).map_err(unrecorded)?;
    // Once more, now that nobody else of us changes it.
    let before = pool(root, size)?;
    let (planned, boot) = plan(&before)?;
    if planned.is_empty() {
        // Whoever had the lock has done it.
        let outcome = Outcome::planned(root, &before, planned, boot, notes, false);
        outcome.print(how.shared.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(why) = beyond(root, &planned).filter(|_| !how.shared.force) {
        bail!("{why}\nhint: `--force` asks for them all the same");
    }
    let mut terminal = Terminal::new()?;
    let carried = carry_out(
        root,
        &locked,
        &planned,
        &command,
        how.shared.compact,
        &mut terminal,
    );
    let carried = match carried {
        Ok(carried) => carried,
        Err(error) => {
            terminal.done();
            return failure(error);
        }
    };
    drop(locked);
    if let Some(undone) = &carried.put_back {
        tell(outcome::interrupted(undone));
        return Ok(terminal.end(ExitCode::from(PART)));
    }
    // Done: a signal that comes now finds nothing to put back.
    terminal.done();
    let short = carried.shortage.is_some();
    let outcome = Outcome::carried(root, &before, planned, carried, boot, notes);
    outcome::tell_unshown(outcome.print(how.shared.json));
    outcome.tell_shortage();
    Ok(if short {
        ExitCode::from(PART)
    } else {
        ExitCode::SUCCESS
    })
}

/// What the next boot is to set: what was asked, or where nothing was, what is.
fn at_boot(pool: &Pool, wish: &Wish, plan: &Plan) -> Vec<(Knob, Pages)> {
    let knob = |what, node| Knob {
        size: pool.size,
        what,
        node,
    };
    let step = |what| {
        plan.steps
            .iter()
            .find(|step| step.knob.what == what)
            .map(|step| step.to)
    };
    let on_node = |node| {
        let here = pool.nodes.get(&node).map(hugetlb::NodePool::persistent);
        here.unwrap_or_else(|| pool.persistent())
    };
    let mut values = Vec::new();
    if wish.persistent.is_some() || wish.overcommit.is_none() {
        let now = wish.node.map_or_else(|| pool.persistent(), on_node);
        let persistent = step(What::Persistent).unwrap_or(now);
        values.push((knob(What::Persistent, wish.node), persistent));
    }
    let both = wish.persistent.is_none() && wish.node.is_none() && pool.overcommit > Pages(0);
    if wish.overcommit.is_some() || both {
        let overcommit = step(What::Overcommit).unwrap_or(pool.overcommit);
        values.push((knob(What::Overcommit, None), overcommit));
    }
    values
}

/// Why so many pages are not asked for. The kernel makes pages until there is no memory left for any, and
/// whoever asks for more than there is may have mistaken a size.
fn beyond(root: &Root, plan: &Plan) -> Option<String> {
    let made = plan.effect.made;
    let wanted = made.bytes(plan.size);
    let available = Memory::read(root).ok()?.available;
    (wanted > available).then(|| {
        format!(
            "{} would be {wanted}, and {available} are available: what comes would leave the host without",
            counted(made.0, "more page")
        )
    })
}

/// What is worth knowing beforehand.
fn notes(root: &Root, plan: &Plan) -> Vec<String> {
    let lends = plan
        .steps
        .iter()
        .any(|step| step.knob.what == What::Overcommit && step.to > step.before);
    let mut notes = Vec::new();
    if lends && hugetlb::surplus_is_slow(root) {
        notes.push(
            "HVO is on, and on this kernel each surplus page waits milliseconds for it: persistent \
             pages are made all at once"
                .to_owned(),
        );
    }
    notes
}
