//! `jumbo thp show`.

use std::collections::BTreeSet;
use std::io;
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo_host::kernel::Root;
use jumbo_host::kernel::mounts::{self, DEV_SHM, Tmpfs};
use jumbo_host::kernel::thp::{SizeControl, Thp};
use jumbo_host::knobs::Group;
use jumbo_host::knobs::thp::{Argument, Side};
use jumbo_host::status::Missing;
use serde::Serialize;

use super::{NO_THP, Which, lost_at_boot, table};
use crate::knobs::Kept;
use crate::status::host::show_thp;
use crate::view::{self, NONE, View};

/// Show the tables, and what came of them
///
/// With --anon or --shmem: all that the kernel counts for each size, and what it means.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) which: Which,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The JSON.
#[derive(Serialize)]
struct Page {
    thp: Thp,
    /// What its files may have is said by its `huge=`.
    tmpfs: Vec<Tmpfs>,
    /// What has the kernel begin with these tables.
    arguments: Vec<Argument>,
    #[serde(flatten)]
    kept: Kept,
    missing: Vec<Missing>,
}

/// What `hugepages-*kB/stats` counts, by file: of which memory, and what it means (Documentation/admin-guide/mm/transhuge.rst).
const STATISTICS: &[(&str, Option<Side>, &str)] = &[
    ("nr_anon", Some(Side::Anon), "folios that there are now"),
    (
        "nr_anon_partially_mapped",
        Some(Side::Anon),
        "of these, folios that a program has unmapped a part of: split when memory is short",
    ),
    (
        "anon_fault_alloc",
        Some(Side::Anon),
        "folios that faults got",
    ),
    (
        "anon_fault_fallback",
        Some(Side::Anon),
        "faults that found no memory in one piece, and took a smaller size",
    ),
    (
        "anon_fault_fallback_charge",
        Some(Side::Anon),
        "faults that found memory which the control group did not allow",
    ),
    (
        "shmem_alloc",
        Some(Side::Shmem),
        "folios that faults and writes got",
    ),
    (
        "shmem_fallback",
        Some(Side::Shmem),
        "faults that found no memory in one piece, and took a smaller size",
    ),
    (
        "shmem_fallback_charge",
        Some(Side::Shmem),
        "faults that found memory which the control group did not allow",
    ),
    ("swpin", None, "folios read from swap in one piece"),
    (
        "swpin_fallback",
        None,
        "folios read from swap in smaller pieces",
    ),
    (
        "swpin_fallback_charge",
        None,
        "folios read from swap in smaller pieces, for the control group's limit",
    ),
    ("swpout", None, "folios written to swap in one piece"),
    (
        "swpout_fallback",
        None,
        "folios split before they went to swap",
    ),
    ("zswpout", None, "folios that went to zswap in one piece"),
    ("split", None, "folios split into smaller ones"),
    (
        "split_failed",
        None,
        "splits that failed, as another user had the folio",
    ),
    (
        "split_deferred",
        None,
        "folios put aside to be split when memory is short",
    ),
];

pub(super) fn main(root: &Root, side: Option<Side>, json: bool) -> anyhow::Result<ExitCode> {
    let mut missing = Vec::new();
    let table = table(root, side)?;
    let page = Page {
        thp: Thp::read(root)?.context(NO_THP)?,
        tmpfs: Missing::or_default(mounts::tmpfs(root), "mounts of tmpfs", &mut missing),
        arguments: table.arguments(huge_of_dev_shm(root).as_deref()),
        kept: Kept::read(root, &[Group::thp()], &mut missing),
        missing,
    };
    view::page(json, &page, |view, page| {
        match side {
            None => show_thp(view, &page.thp)?,
            Some(side) => show_side(view, &page.thp, side)?,
        }
        if side != Some(Side::Anon) {
            show_tmpfs(view, &page.tmpfs)?;
        }
        if !page.arguments.is_empty() {
            view.heading(
                "The same on the kernel's command line, with the first kernel that takes it",
            )?;
        }
        for Argument { text, since, .. } in &page.arguments {
            view.line(format!("  {text} ({since})"))?;
        }
        if let Some(lost) = lost_at_boot(&table) {
            view.line(format!("  {lost}"))?;
        }
        page.kept.show(view, root)?;
        view::missing(view, "Not shown", &page.missing)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The `huge=` of /dev/shm, where it has one that is not `never`.
pub(super) fn huge_of_dev_shm(root: &Root) -> Option<String> {
    let mounts = mounts::tmpfs(root).ok()?.into_iter();
    let mut huge = mounts
        .filter(|mount| mount.path == DEV_SHM)
        .map(|mount| mount.huge);
    huge.next().filter(|huge| huge != "never")
}

fn show_tmpfs(view: &mut View, mounts: &[Tmpfs]) -> io::Result<()> {
    view.heading("Shared memory that does not obey the table of sizes: files of tmpfs, by mount")?;
    let told = |mount: &&Tmpfs| mount.path == DEV_SHM || mount.huge != "never";
    let told: Vec<_> = mounts.iter().filter(told).collect();
    for mount in &told {
        view.line(format!("  {}: huge={}", mount.path, mount.huge))?;
    }
    let others = mounts.len() - told.len();
    if others > 0 {
        view.line(format!("  {others} more: huge=never"))?;
    }
    view.line("  System V (shmget): as shmem_enabled at the top, in the PMD size alone")
}

fn show_side(view: &mut View, thp: &Thp, side: Side) -> io::Result<()> {
    let (heading, file, top) = match side {
        Side::Anon => (
            "Folio sizes for anonymous memory",
            "enabled",
            Some(&thp.enabled),
        ),
        Side::Shmem => (
            "Folio sizes for shared memory",
            "shmem_enabled",
            thp.shmem_enabled.as_ref(),
        ),
    };
    view.heading(heading)?;
    let word = top.map_or(NONE, |choice| &choice.current);
    view.line(format!("  {file} {word}"))?;
    let control = |of: &SizeControl| match side {
        Side::Anon => of.enabled.clone(),
        Side::Shmem => of.shmem_enabled.clone(),
    };
    let sizes = thp.sizes.iter();
    let sizes: Vec<_> = sizes
        .filter_map(|(size, of)| Some((size, of, control(of)?)))
        .collect();
    let known = |name: &str| STATISTICS.iter().find(|(known, ..)| *known == name);
    let counted: BTreeSet<&String> = sizes
        .iter()
        .flat_map(|(_, of, _)| of.stats.keys())
        .collect();
    // What is of the other memory is left out, and what never happened.
    let happened = |name: &str| {
        sizes
            .iter()
            .any(|(_, of, _)| of.stats.get(name).is_some_and(|count| *count > 0))
    };
    let shown: Vec<&String> = counted
        .into_iter()
        .filter(|name| match known(name) {
            Some((_, Some(of), _)) => *of == side,
            _ => happened(name),
        })
        .collect();
    let mut columns = String::from("<SIZE|<VALUE|<MEANS");
    columns.extend(shown.iter().map(|name| format!("|>{name}")));
    let rows = sizes.iter().map(|(size, of, own)| {
        let means = match side {
            Side::Anon => thp.anon(**size),
            Side::Shmem => thp.shared(**size),
        };
        let means = means.map_or(NONE, |choice| &choice.current);
        let counts = shown.iter().map(|name| {
            let count = of.stats.get(*name);
            count.map_or(NONE.to_owned(), u64::to_string)
        });
        let first = [size.to_string(), own.current.clone(), means.to_owned()];
        first.into_iter().chain(counts).collect::<Vec<_>>()
    });
    view.table(&columns, rows)?;
    view.heading("What is counted, since boot")?;
    for name in shown {
        let meaning = known(name).map_or("not in the kernel's documentation", |(.., text)| text);
        view.line(format!("  {name}: {meaning}"))?;
    }
    Ok(())
}
