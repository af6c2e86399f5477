//! The page of the host, for people.

use std::io;

use jumbo::units::{Bytes, PageSize, counted};
use jumbo_host::kernel::probe::Available;
use jumbo_host::kernel::thp::{Choice, SizeControl, Thp};
use jumbo_host::kernel::{hugetlb, hvo};
use jumbo_host::status::{Formable, Host, Task, Tasks};

use super::HostPage;
use crate::pool;
use crate::view::{self, NONE, View, bytes, percent, percent_to};

pub(super) fn show(view: &mut View, page: &HostPage) -> io::Result<()> {
    let HostPage { host, probe, tasks } = page;
    for line in summary(host) {
        view.line(line)?;
    }
    view.line("")?;
    show_facts(view, host)?;
    show_pools(view, host)?;
    show_holders(view, host, tasks)?;
    if let Some(thp) = &host.thp {
        show_thp(view, thp)?;
    }
    show_formable(view, host)?;
    show_largest(view, tasks)?;
    view.heading("What this kernel, privilege and container allow")?;
    view.table(
        "<|<|<",
        probe
            .features()
            // The sizes below are in the table above, and have nothing to add to it.
            .filter(|(name, _)| {
                let by_size = name.starts_with("anonymous") || name.starts_with("shared");
                !by_size || name.ends_with(&format!(" {}", host.pmd_size))
            })
            .map(|(name, feature)| {
                let available = match feature.available {
                    Available::Yes => "yes",
                    Available::Limited => "limited",
                    Available::No => "no",
                };
                [name, available.to_owned(), feature.reason.clone()]
            }),
    )?;
    view::missing(view, "Not shown", host.missing.iter().chain(&tasks.missing))
}

/// Two or three lines: the memory that is huge, the way to more, and the room for it.
pub(crate) fn summary(host: &Host) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(memory) = &host.memory {
        let huge = memory.anon_huge + memory.shmem_huge;
        let all = memory.anon + memory.shmem;
        lines.push(format!(
            "{huge} of {all} anonymous and shared memory are on huge pages; {} of {} available",
            memory.available, memory.total
        ));
    }
    let size = host.pmd_size;
    let anon = host.thp.as_ref().and_then(|thp| thp.anon(size));
    let thp = match anon.map(|choice| choice.current.as_str()) {
        Some("always") => "all programs get them (THP always)",
        Some("madvise") => "programs that ask get them, as under jumbo run (THP madvise)",
        Some("never") => "no program gets them (THP never); hint: jumbo doctor",
        _ => "the THP controls are unknown",
    };
    let pools = host.pools.iter().flatten();
    let pools = pools.filter(|pool| pool.total.0 > 0);
    let pools: Vec<_> = pools
        .map(|pool| format!("{} of {} free of {}", pool.free.0, pool.total.0, pool.size))
        .collect();
    let pools = match pools.is_empty() {
        true => String::from("hugetlb: none"),
        false => format!("hugetlb: {}", pools.join(", ")),
    };
    lines.push(format!("{size} pages: {thp}; {pools}"));
    let formable = host.formable.iter();
    let formable = formable.filter(|formable| formable.size == size);
    let pages: u64 = formable.map(|formable| formable.pages.0).sum();
    if !host.formable.is_empty() {
        let bytes = Bytes(pages.saturating_mul(size.bytes()));
        lines.push(format!(
            "{pages} more huge pages of {size} fit into free memory without compaction ({bytes})"
        ));
    }
    lines
}

fn show_facts(view: &mut View, host: &Host) -> io::Result<()> {
    let pools = host.pools.iter().flatten();
    let mut sizes: Vec<_> = pools.map(|pool| pool.size.to_string()).collect();
    if sizes.is_empty() {
        sizes.push("none".to_owned());
    }
    let memory = match &host.memory {
        Some(memory) => format!("{} of memory, {} available", memory.total, memory.available),
        None => String::from("memory unknown"),
    };
    view.fact("Host", format!("Linux {}, {memory}", host.kernel))?;
    view.fact(
        "Page sizes",
        format!(
            "base {}, PMD {}, hugetlb {}",
            host.base_page,
            host.pmd_size,
            sizes.join(" ")
        ),
    )?;
    let Some(memory) = &host.memory else {
        return Ok(());
    };
    if let Some(metadata) = host.metadata {
        let how = if metadata.counted {
            "counted by the kernel"
        } else {
            "computed: 64 B for each base page"
        };
        let hvo = hvo::in_words(host.optimize_vmemmap);
        view.fact(
            "Page metadata",
            format!(
                "{} ({how}), {} of memory; HVO {hvo}",
                metadata.bytes,
                // Page metadata is little of the whole.
                percent_to(1, metadata.bytes, memory.total)
            ),
        )?;
    }
    view.fact(
        "Huge now",
        format!(
            "{} of {} anonymous, {} of {} shared, {} of page cache, {} in pools",
            memory.anon_huge,
            memory.anon,
            memory.shmem_huge,
            memory.shmem,
            memory.file_huge,
            memory.hugetlb
        ),
    )?;
    view.fact("Page tables", memory.page_tables.to_string())?;
    let Some(reporting) = &host.reporting else {
        return Ok(());
    };
    view.fact(
        "Free memory",
        format!(
            "goes back to this virtual machine's host ({}, free page reporting), so that a first touch of memory may wait for the \
             host: `jumbo doctor --measure` measures that, `jumbo run --pool SIZE --warm` touches memory before",
            reporting.device
        ),
    )
}

fn show_pools(view: &mut View, host: &Host) -> io::Result<()> {
    if let Some(pools) = &host.pools {
        return pool::table::show(view, &pools.iter().collect::<Vec<_>>());
    }
    view.heading("hugetlb pools")?;
    view.line(if host.misses(Host::POOLS) {
        "  cannot be read: see below"
    } else {
        "  this kernel has no hugetlb"
    })
}

fn show_holders(view: &mut View, host: &Host, tasks: &Tasks) -> io::Result<()> {
    view.heading("Who holds pool pages")?;
    let used = hugetlb::used(host.pools.as_deref().unwrap_or_default());
    let unmapped = Bytes(used.0.saturating_sub(tasks.hugetlb.0));
    if tasks.pool_holders.is_empty() && host.mounts.is_empty() && unmapped == Bytes(0) {
        return view.line("  no process, and no hugetlbfs mount");
    }
    if unmapped > Bytes(0) {
        view.line(format!(
            "  {unmapped} at least in files that no process seen here maps: hugetlbfs, System V, memfd"
        ))?;
    }
    for task in &tasks.pool_holders {
        view.line(format!(
            "  {} in {} ({})",
            task.memory.hugetlb, task.name, task.pid
        ))?;
    }
    for mount in &host.mounts {
        let option = |name: &str| {
            let value = mount.options.get(name)?.as_deref()?;
            let bytes: Option<Bytes> = value.parse().ok();
            Some(format!(
                "{name} {}",
                bytes.map_or_else(|| value.to_owned(), |b| b.to_string())
            ))
        };
        let options: Vec<_> = ["pagesize", "size", "min_size"]
            .into_iter()
            .filter_map(option)
            .collect();
        view.line(format!(
            "  hugetlbfs at {} ({})",
            mount.path,
            options.join(", ")
        ))?;
    }
    Ok(())
}

pub(crate) fn show_thp(view: &mut View, thp: &Thp) -> io::Result<()> {
    view.heading("Folio sizes for anonymous and shared memory")?;
    let word = |choice: Option<&Choice>| choice.map_or(NONE.to_owned(), |c| c.current.clone());
    let khugepaged = |name: &str| {
        thp.khugepaged
            .get(name)
            .map_or(NONE.to_owned(), u64::to_string)
    };
    view.line(format!(
        "  enabled {}, shmem_enabled {}, defrag {}, khugepaged max_ptes_none {}",
        thp.enabled.current,
        word(thp.shmem_enabled.as_ref()),
        word(thp.defrag.as_ref()),
        khugepaged("max_ptes_none"),
    ))?;
    let row = |size: &PageSize, control: &SizeControl| {
        let own = |choice: Option<&Choice>, resolved: Option<&Choice>| match (choice, resolved) {
            (Some(choice), Some(resolved)) if choice != resolved => {
                format!("{} ({})", choice.current, resolved.current)
            }
            (choice, _) => word(choice),
        };
        let count = |name: &str| {
            control
                .stats
                .get(name)
                .map_or(NONE.to_owned(), u64::to_string)
        };
        [
            size.to_string(),
            own(control.enabled.as_ref(), thp.anon(*size)),
            count("nr_anon"),
            count("anon_fault_alloc"),
            count("anon_fault_fallback"),
            own(control.shmem_enabled.as_ref(), thp.shared(*size)),
            count("shmem_alloc"),
            count("shmem_fallback"),
            count("split"),
        ]
    };
    if thp.sizes.is_empty() {
        return view.line("  this kernel has no controls for each size (Linux 6.8)");
    }
    view.table(
        "<SIZE|<ANONYMOUS|>NOW|>FAULTED|>FELL BACK|<SHARED|>ALLOCATED|>FELL BACK|>SPLIT",
        thp.sizes.iter().map(|(size, control)| row(size, control)),
    )
}

fn show_formable(view: &mut View, host: &Host) -> io::Result<()> {
    if host.formable.is_empty() {
        return Ok(());
    }
    view.heading("Huge pages that free memory could form now, without compaction")?;
    let mut sizes: Vec<_> = host.formable.iter().map(|formable| formable.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut columns = String::from("<NODE|<ZONE|>FREE");
    columns.extend(sizes.iter().map(|size| format!("|>{size}")));
    let zones = || {
        let formable = &host.formable;
        formable.chunk_by(|a, b| (a.node, &a.zone) == (b.node, &b.zone))
    };
    let cell = |formable: Option<&Formable>| match formable {
        Some(formable) if formable.exact => formable.pages.to_string(),
        Some(formable) => format!("at most {}", formable.pages),
        None => NONE.to_owned(),
    };
    let rows = zones().filter_map(|zone| {
        let first = zone.first()?;
        let mut row = vec![
            first.node.to_string(),
            first.zone.clone(),
            first.free.to_string(),
        ];
        let of = |size: &PageSize| zone.iter().find(|formable| formable.size == *size);
        row.extend(sizes.iter().map(|size| cell(of(size))));
        Some(row)
    });
    view.table(&columns, rows)?;
    let listed: Bytes = zones()
        .filter_map(|zone| zone.first())
        .map(|formable| formable.free)
        .sum();
    let free = host.memory.as_ref().map_or(Bytes(0), |memory| memory.free);
    // Pages cached for each CPU are in no block either, but those are little.
    if listed.0 < free.0 / 10 * 9 {
        view.line(format!(
            "  {} of {} free memory are in no block yet: this kernel initialises memory on demand",
            Bytes(free.0 - listed.0),
            free
        ))?;
    }
    Ok(())
}

fn show_largest(view: &mut View, tasks: &Tasks) -> io::Result<()> {
    if tasks.largest.is_empty() {
        return Ok(());
    }
    view.heading(&format!(
        "The largest {} of {}",
        tasks.largest.len(),
        counted(tasks.count as u64, "process")
    ))?;
    let row = |task: &Task| {
        let memory = &task.memory;
        let share = |part: Option<Bytes>, whole| {
            part.map_or_else(|| NONE.to_owned(), |part| percent(part, whole))
        };
        [
            task.pid.to_string(),
            task.name.clone(),
            memory.anon.to_string(),
            share(task.huge.map(|huge| huge.anon), memory.anon),
            memory.shmem.to_string(),
            share(task.huge.map(|huge| huge.shmem), memory.shmem),
            memory.hugetlb.to_string(),
            bytes(task.huge.map(|huge| huge.file)),
        ]
    };
    view.table(
        ">PID|<NAME|>ANONYMOUS|>HUGE|>SHARED|>HUGE|>HUGETLB|>HUGE TEXT, FILES",
        tasks.largest.iter().map(row),
    )?;
    if tasks.siblings.is_empty() {
        return Ok(());
    }
    let reapers = tasks.siblings.iter();
    let listed: Vec<_> = reapers
        .map(|sibling| format!("{} of {}", sibling.pid, sibling.program))
        .collect();
    view.line(format!(
        "  not counted: {} reapers (jumbo run), whose memory is their programs': {}",
        listed.len(),
        listed.join(", ")
    ))
}
