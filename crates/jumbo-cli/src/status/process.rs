//! Text output of the page of processes.

use std::collections::BTreeSet;

use jumbo::units::{Bytes, PageSize, counted};
use jumbo_host::kernel::task::Memory;
use jumbo_host::status::{Covered, Detail, KindUsage, MappingDetail, Missing, Pooled, Usage};

use super::{ProcessPage, is_counted_twice};
use crate::view::{self, NONE, View, or_none, percent};

/// Maximum characters of a command line.
const MAX_COMMAND_CHARS: usize = 80;
/// Maximum characters of a command line in a table.
const MAX_COMMAND_COLUMN: usize = 30;

/// Maximum number of processes with a table each; more have a line each.
const MAX_TABLES: usize = 3;

pub(super) fn show(view: &mut View, page: &ProcessPage) {
    view.lines(summary(page));
    let is_short = page.processes.len() > MAX_TABLES
        && page
            .processes
            .iter()
            .all(|process| process.mappings.is_empty());
    if is_short {
        view.line("");
        show_lines(view, page);
    } else {
        for process in &page.processes {
            show_process(view, process);
        }
    }
    let counted = |process: &&Detail| !is_counted_twice(process, &page.processes);
    let counted = || page.processes.iter().filter(counted);
    if page.processes.len() > 1 {
        view.heading(&format!("{} processes in all", page.processes.len()));
        let proportional: Vec<_> = counted()
            .filter_map(|process| process.proportional)
            .collect();
        let divided = match proportional.len() {
            0 => String::new(),
            _ => {
                let sum = proportional.into_iter().sum::<Bytes>();
                format!("; {sum} when divided among them")
            }
        };
        view.line(format!("  shared memory counts for each process{divided}"));
        match page.total.0.is_empty() {
            // smaps is unreadable; any user may read status.
            true => show_memory(view, &sum(counted())),
            false => show_usage(view, &page.total),
        }
    }
    if is_short {
        view.line("");
        view.line("One process by folio size: `jumbo status -p PID`");
    }
    // All processes usually have the same reason: only the first is shown.
    let refused = || page.processes.iter().flat_map(|process| &process.missing);
    let own = refused().next().map(|first| Missing {
        what: match refused().count() {
            1 => first.what.clone(),
            count => format!("{} of {count} processes", first.what),
        },
        why: first.why.clone(),
    });
    view.missing("Not shown", own.iter().chain(&page.missing))
}

/// Summary in two lines: the share on huge pages, and the largest part on base pages.
fn summary(page: &ProcessPage) -> Vec<String> {
    let who = match page.processes.as_slice() {
        [process] => process.name.clone(),
        all => format!("{} processes", all.len()),
    };
    let total = page.total.total();
    if total.bytes == Bytes(0) {
        return vec![format!("{who}: the share on huge pages is unknown")];
    }
    let mut lines = vec![format!(
        "{who}: {} of {} on huge pages",
        percent(total.huge, total.bytes),
        total.bytes
    )];
    let on_base = |usage: &KindUsage| Bytes(usage.bytes.0.saturating_sub(usage.huge.0));
    let kinds = page.total.0.iter();
    let largest = kinds.max_by_key(|(_, usage)| on_base(usage));
    if let Some((kind, usage)) = largest.filter(|(_, usage)| on_base(usage) > Bytes(0)) {
        let mut all = page.processes.iter();
        let why = all.find_map(|process| process.why_not.get(kind));
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        lines.push(format!(
            "The largest part that is not: {} of {}{why}",
            on_base(usage),
            kind.name()
        ));
    }
    lines
}

/// Sum of the memory in the status files of several processes.
fn sum<'a>(processes: impl Iterator<Item = &'a Detail>) -> Memory {
    let memory = processes.filter_map(|process| process.memory.as_ref());
    memory.fold(Memory::default(), |mut sum, memory| {
        sum.anon += memory.anon;
        sum.shmem += memory.shmem;
        sum.file += memory.file;
        sum.hugetlb += memory.hugetlb;
        sum
    })
}

fn show_lines(view: &mut View, page: &ProcessPage) {
    let row = |process: &Detail| {
        let memory = process.memory.clone().unwrap_or_default();
        let huge = process.usage.as_ref().map(Usage::total);
        let command = match process.command.is_empty() {
            true => &process.name,
            false => &process.command,
        };
        [
            process.pid.to_string(),
            command.chars().take(MAX_COMMAND_COLUMN).collect(),
            memory.anon.to_string(),
            memory.shmem.to_string(),
            memory.file.to_string(),
            memory.hugetlb.to_string(),
            or_none(huge.map(|all| percent(all.huge, all.bytes))),
        ]
    };
    view.table(
        ">PID|<COMMAND|>ANONYMOUS|>SHARED|>FILES|>HUGETLB|>HUGE",
        page.processes.iter().map(row),
    )
}

/// Shows memory by kind, without folio sizes.
fn show_memory(view: &mut View, memory: &Memory) {
    let rows = [
        ("anonymous", memory.anon),
        ("shared", memory.shmem),
        ("files", memory.file),
        ("hugetlb", memory.hugetlb),
    ];
    view.table(
        "<|>RESIDENT",
        rows.map(|(kind, bytes)| [kind.to_owned(), bytes.to_string()]),
    )
}

pub(crate) fn show_process(view: &mut View, process: &Detail) {
    view.heading(&format!("{} ({})", process.name, process.pid));
    if !process.command.is_empty() {
        let cut: String = process.command.chars().take(MAX_COMMAND_CHARS).collect();
        let more = if cut.len() < process.command.len() {
            "..."
        } else {
            ""
        };
        view.line(format!("  {cut}{more}"));
    }
    if let Some(program) = process.reaper_of {
        return view.line(format!(
            "  the {} of process {program}: it shares that memory, which is not counted again",
            process.name
        ));
    }
    let Some(memory) = &process.memory else {
        return view.line("  has no memory of its own: a kernel thread or a zombie");
    };
    if let Some(faults) = process.faults {
        view.line(format!(
            "  {} resident at most, {} minor and {} major page faults",
            or_none(process.peak),
            faults.minor,
            faults.major
        ));
    }
    match &process.usage {
        Some(usage) => show_usage(view, usage),
        None => show_memory(view, memory),
    }
    let why_not = process.why_not.iter();
    view.lines(why_not.map(|(kind, why)| format!("  {}: {why}", kind.name())));
    if let Some(covered) = &process.jumbo {
        show_covered(view, covered);
    }
    if !process.mappings.is_empty() {
        show_mappings(view, &process.mappings);
    }
}

fn show_covered(view: &mut View, covered: &Covered) {
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
    ));
    view.line(format!(
        "  jumbo run: {}, {} to be freed, {} waited for that",
        counted(free.threads as u64, "freeing thread"),
        free.pending,
        counted(free.waits, "allocation")
    ));
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
        ));
    }
    let twice = "ps and top show its memory once more";
    let process = reaper.pid.map(|pid| format!(" (process {pid}; {twice})"));
    view.line(format!(
        "  reaper: {}{}",
        reaper.reason,
        process.unwrap_or_default()
    ))
}

fn show_usage(view: &mut View, usage: &Usage) {
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
        row.extend(sizes.iter().map(|size| or_none(usage.folios.get(size))));
        if unknown {
            row.push(view::nonzero_bytes(usage.unknown));
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

fn show_mappings(view: &mut View, mappings: &[MappingDetail]) {
    view.line("");
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

/// Reason for or against THPs in a mapping.
fn advice(mapping: &MappingDetail) -> &'static str {
    match mapping {
        MappingDetail { declined: true, .. } => "declined",
        MappingDetail { fits: false, .. } => "too small",
        MappingDetail { advised: true, .. } => "advised",
        MappingDetail { eligible: true, .. } => "eligible",
        _ => NONE,
    }
}
