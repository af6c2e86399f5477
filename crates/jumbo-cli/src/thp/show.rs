//! `jumbo thp show`.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::mounts::{self, DEV_SHM, Tmpfs};
use jumbo_host::kernel::thp::{Choice, SizeControl, Thp};
use jumbo_host::knobs::Group;
use jumbo_host::knobs::thp::{Argument, Side};
use jumbo_host::status::Missing;
use serde::Serialize;

use super::{NO_THP, lost_at_boot, table};
use crate::knobs::Kept;
use crate::view::{self, View, or_none};

/// THP controls, for JSON.
#[derive(Serialize)]
struct ThpPage {
    thp: Thp,
    /// tmpfs mounts, with their `huge=`.
    tmpfs: Vec<Tmpfs>,
    /// Boot arguments of the kernel with the same effect.
    arguments: Vec<Argument>,
    #[serde(flatten)]
    kept: Kept,
    missing: Vec<Missing>,
}

/// Counters of `hugepages-*kB/stats`, a line each: file, kind of memory, meaning
/// (Documentation/admin-guide/mm/transhuge.rst).
const STATISTICS: &str = "\
nr_anon                    anon  folios that there are now
nr_anon_partially_mapped   anon  of these, folios with an unmapped part: split when memory is short
anon_fault_alloc           anon  folios that faults got
anon_fault_fallback        anon  faults that found no memory in one piece, and took a smaller size
anon_fault_fallback_charge anon  faults that found memory which the control group did not allow
shmem_alloc                shmem folios that faults and writes got
shmem_fallback             shmem faults that found no memory in one piece, and took a smaller size
shmem_fallback_charge      shmem faults that found memory which the control group did not allow
swpin                      both  folios read from swap in one piece
swpin_fallback             both  folios read from swap in smaller pieces
swpin_fallback_charge      both  folios read from swap in smaller pieces, for the control group's limit
swpout                     both  folios written to swap in one piece
swpout_fallback            both  folios split before they went to swap
zswpout                    both  folios that went to zswap in one piece
split                      both  folios split into smaller ones
split_failed               both  splits that failed, as another user had the folio
split_deferred             both  folios put aside to be split when memory is short";

/// Kind of memory (`None`: both) and meaning of a counter.
fn meaning(counter: &str) -> Option<(Option<Side>, &'static str)> {
    let words = |line: &'static str| {
        let (name, rest) = line.split_once(' ')?;
        let (side, text) = rest.trim_start().split_once(' ')?;
        let side = match side {
            "anon" => Some(Side::Anon),
            "shmem" => Some(Side::Shmem),
            _ => None,
        };
        (name == counter).then(|| (side, text.trim_start()))
    };
    STATISTICS.lines().find_map(words)
}

pub(super) fn main(root: &Root, side: Option<Side>, json: bool) -> anyhow::Result<ExitCode> {
    let mut missing = Vec::new();
    let table = table(root, side)?;
    let page = ThpPage {
        thp: Thp::read(root)?.context(NO_THP)?,
        tmpfs: Missing::or_default(mounts::tmpfs(root), "mounts of tmpfs", &mut missing),
        arguments: table.arguments(huge_of_dev_shm(root).as_deref()),
        kept: Kept::read(root, &[Group::thp()], &mut missing),
        missing,
    };
    view::page(json, &page, |view, page| {
        show(view, &page.thp, side);
        if side != Some(Side::Anon) {
            show_tmpfs(view, &page.tmpfs);
        }
        let arguments = page.arguments.iter();
        view.list(
            "The same on the kernel's command line, with the first kernel that takes it",
            arguments.map(|Argument { text, since, .. }| format!("{text} ({since})")),
        );
        view.lines(lost_at_boot(&table).map(|lost| format!("  {lost}")));
        page.kept.show(view);
        view.missing("Not shown", &page.missing)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Value of `huge=` of /dev/shm, unless it is `never`.
pub(super) fn huge_of_dev_shm(root: &Root) -> Option<String> {
    let mounts = mounts::tmpfs(root).ok()?.into_iter();
    let mut huge = mounts
        .filter(|mount| mount.path == DEV_SHM)
        .map(|mount| mount.huge);
    huge.next().filter(|huge| huge != "never")
}

fn show_tmpfs(view: &mut View, mounts: &[Tmpfs]) {
    view.heading("Shared memory that does not obey the table of sizes: files of tmpfs, by mount");
    let is_listed = |mount: &&Tmpfs| mount.path == DEV_SHM || mount.huge != "never";
    let listed: Vec<_> = mounts.iter().filter(is_listed).collect();
    let line = |mount: &&Tmpfs| format!("  {}: huge={}", mount.path, mount.huge);
    view.lines(listed.iter().map(line));
    let others = mounts.len() - listed.len();
    if others > 0 {
        view.line(format!("  {others} more: huge=never"));
    }
    view.line("  System V (shmget): as shmem_enabled at the top, in the PMD size alone")
}

/// Shows the controls by folio size, with the counters of allocations. For one `side`: with all
/// counters and their meanings.
pub(crate) fn show(view: &mut View, thp: &Thp, side: Option<Side>) {
    for shown in [Side::Anon, Side::Shmem] {
        if side.is_none_or(|side| side == shown) {
            show_side(view, thp, shown, side.is_some());
        }
    }
    let max_ptes_none = thp.khugepaged.get("max_ptes_none");
    view.line(format!(
        "  defrag {}, khugepaged max_ptes_none {}",
        word(thp.defrag.as_ref()),
        or_none(max_ptes_none)
    ))
}

fn word(choice: Option<&Choice>) -> String {
    or_none(choice.map(|it| &it.current))
}

fn show_side(view: &mut View, thp: &Thp, side: Side, all: bool) {
    let (kind, file, top) = match side {
        Side::Anon => ("anonymous", "enabled", Some(&thp.enabled)),
        Side::Shmem => ("shared", "shmem_enabled", thp.shmem_enabled.as_ref()),
    };
    view.heading(&format!("Folio sizes for {kind} memory"));
    view.line(format!("  {file} {}", word(top)));
    let sizes = thp.sizes.iter().filter_map(|(size, of)| {
        let (own, means) = match side {
            Side::Anon => (of.enabled.as_ref()?, thp.anon(*size)),
            Side::Shmem => (of.shmem_enabled.as_ref()?, thp.shared(*size)),
        };
        Some((of, [size.to_string(), word(Some(own)), word(means)]))
    });
    let sizes: Vec<_> = sizes.collect();
    if sizes.is_empty() {
        return view.line("  this kernel has no controls for each size");
    }
    let count = |of: &SizeControl, name: &str| of.stats.get(name).copied();
    let happened = |name: &str| sizes.iter().any(|(of, _)| count(of, name) > Some(0));
    let counted: BTreeSet<&String> = sizes.iter().flat_map(|(of, _)| of.stats.keys()).collect();
    // Without counters of the other side, and without zero counters of both sides.
    let shown = counted.into_iter().filter(|name| match meaning(name) {
        Some((Some(of), _)) => of == side && (all || !name.ends_with("_charge")),
        _ => all && happened(name),
    });
    let shown: Vec<_> = shown.collect();
    let mut columns = String::from("<SIZE|<VALUE|<MEANS");
    columns.extend(shown.iter().map(|name| format!("|>{name}")));
    let rows = sizes.iter().map(|(of, first)| {
        let count = |name: &&String| or_none(count(of, name));
        let counts = shown.iter().map(count);
        first.iter().cloned().chain(counts).collect::<Vec<_>>()
    });
    view.table(&columns, rows);
    if all {
        let line = |name: &String| {
            let meaning = meaning(name).map_or("not in the kernel's documentation", |it| it.1);
            format!("{name}: {meaning}")
        };
        view.list("Counters, since boot", shown.into_iter().map(line));
    }
}
