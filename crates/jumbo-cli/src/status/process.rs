//! The page of a process, for people.

use std::collections::BTreeSet;
use std::io;

use jumbo::status::{Covered, Detail, KindUsage, MappingDetail, Missing, Pooled, Usage};
use jumbo::units::{Bytes, PageSize, counted};

use super::{ProcessPage, is_counted_already};
use crate::view::{self, NONE, View, bytes, percent};

/// Command lines are cut to this many characters.
const COMMAND: usize = 80;

pub(super) fn show(view: &mut View, page: &ProcessPage) -> io::Result<()> {
    for process in &page.processes {
        show_process(view, process)?;
    }
    if page.processes.len() > 1 && !page.total.0.is_empty() {
        view.heading(&format!("{} processes in all", page.processes.len()))?;
        let counted = |process: &&Detail| !is_counted_already(process, &page.processes);
        let proportional = page
            .processes
            .iter()
            .filter(counted)
            .filter_map(|process| process.proportional);
        view.line(format!(
            "  memory that several map counts once for each; {} when it is divided among them",
            proportional.sum::<Bytes>()
        ))?;
        show_usage(view, &page.total)?;
    }
    // One reason for each process would be the same many times over.
    let mut own: Vec<Missing> = Vec::new();
    let refused = || page.processes.iter().flat_map(|process| &process.missing);
    if let Some(first) = refused().next() {
        let what = match refused().count() {
            1 => first.what.clone(),
            count => format!("{} of {count} processes", first.what),
        };
        own.push(Missing {
            what,
            why: first.why.clone(),
        });
    }
    view::missing(view, "Not shown", own.iter().chain(&page.missing))
}

fn show_process(view: &mut View, process: &Detail) -> io::Result<()> {
    view.heading(&format!("{} ({})", process.name, process.pid))?;
    if !process.command.is_empty() {
        let cut: String = process.command.chars().take(COMMAND).collect();
        let more = if cut.len() < process.command.len() {
            "..."
        } else {
            ""
        };
        view.line(format!("  {cut}{more}"))?;
    }
    if let Some(program) = process.reaper_of {
        return view.line(format!(
            "  the reaper of process {program}: what it has is that one's memory, and is not counted again"
        ));
    }
    let Some(memory) = &process.memory else {
        return view.line("  has no memory of its own: a kernel thread or a zombie");
    };
    if let Some(faults) = process.faults {
        view.line(format!(
            "  {} resident at most, {} minor and {} major page faults",
            bytes(process.peak),
            faults.minor,
            faults.major
        ))?;
    }
    match &process.usage {
        Some(usage) => show_usage(view, usage)?,
        None => {
            let rows = [
                ("anonymous", memory.anon),
                ("shared", memory.shmem),
                ("files", memory.file),
                ("hugetlb", memory.hugetlb),
            ];
            view.table(
                "<|>RESIDENT",
                rows.map(|(kind, bytes)| [kind.to_owned(), bytes.to_string()]),
            )?;
        }
    }
    for (kind, why) in &process.why_not {
        view.line(format!("  {}: {why}", kind.name()))?;
    }
    if let Some(covered) = &process.jumbo {
        show_covered(view, covered)?;
    }
    if !process.mappings.is_empty() {
        show_mappings(view, &process.mappings)?;
    }
    Ok(())
}

fn show_covered(view: &mut View, covered: &Covered) -> io::Result<()> {
    let (free, pool, reaper) = (&covered.free, &covered.pool, &covered.reaper);
    let background = match free.background {
        Bytes(0) => String::new(),
        background => format!(", {background} of it in the background"),
    };
    view.line(format!(
        "  jumbo run: {} freed by up to {} at once{background}; {} by the caller alone",
        free.gathered,
        counted(free.workers, "thread"),
        free.inline
    ))?;
    view.line(format!(
        "  jumbo run: {}, {} to be freed, {} waited for that",
        counted(free.threads as u64, "freeing thread"),
        free.pending,
        counted(free.waits, "allocation")
    ))?;
    if pool != &Pooled::default() {
        let mut less = String::new();
        for (bytes, what) in [
            (pool.beyond, "asked for beyond it"),
            (pool.moved, "moved to THPs"),
            (pool.stuck, "that could not be moved"),
        ] {
            if bytes > Bytes(0) {
                less = format!("{less}; {bytes} {what}");
            }
        }
        view.line(format!(
            "  pool: {} of hugetlb pages (at most {}), {} of THPs (at most {}){less}",
            pool.hugetlb, pool.hugetlb_peak, pool.thp, pool.thp_peak
        ))?;
    }
    let twice = "ps and top show its memory once more";
    let process = reaper.pid.map(|pid| format!(" (process {pid}; {twice})"));
    view.line(format!(
        "  reaper: {}{}",
        reaper.reason,
        process.unwrap_or_default()
    ))
}

fn show_usage(view: &mut View, usage: &Usage) -> io::Result<()> {
    let sizes: BTreeSet<PageSize> = usage
        .0
        .values()
        .flat_map(|usage| usage.folios.keys().copied())
        .collect();
    let unknown = usage.0.values().any(|usage| usage.unknown > Bytes(0));
    let mut columns = String::from("<KIND|>MAPPED|>RESIDENT|>HUGE");
    columns.extend(sizes.iter().map(|size| format!("|>{size}")));
    columns.push_str(if unknown { "|>SIZE UNKNOWN" } else { "" });
    let row = |title: &str, usage: &KindUsage| {
        let mut row = vec![
            title.to_owned(),
            usage.mapped.to_string(),
            usage.bytes.to_string(),
            percent(usage.huge, usage.bytes),
        ];
        row.extend(
            sizes
                .iter()
                .map(|size| bytes(usage.folios.get(size).copied())),
        );
        if unknown {
            row.push(view::some(usage.unknown));
        }
        row
    };
    let mut rows: Vec<_> = usage
        .0
        .iter()
        .map(|(kind, usage)| row(kind.name(), usage))
        .collect();
    rows.push(row("all", &usage.total()));
    view.table(&columns, rows)
}

fn show_mappings(view: &mut View, mappings: &[MappingDetail]) -> io::Result<()> {
    view.line("")?;
    view.table(
        ">ADDRESS|>MAPPED|>RESIDENT|>HUGE|<PERM|<KIND|<THP|<PATH",
        mappings.iter().map(|mapping| {
            [
                format!("{:x}", mapping.start),
                Bytes(mapping.end - mapping.start).to_string(),
                mapping.bytes.to_string(),
                percent(mapping.huge, mapping.bytes),
                mapping.permissions.clone(),
                mapping.kind.name().to_owned(),
                advice(mapping).to_owned(),
                mapping.path.clone(),
            ]
        }),
    )
}

/// What stands between a mapping and THPs, or for them.
fn advice(mapping: &MappingDetail) -> &'static str {
    match mapping {
        MappingDetail { declined: true, .. } => "declined",
        MappingDetail { fits: false, .. } => "too small",
        MappingDetail { advised: true, .. } => "advised",
        MappingDetail { eligible: true, .. } => "eligible",
        _ => NONE,
    }
}
