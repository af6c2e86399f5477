//! Text output of the host's page.

use jumbo::units::{Bytes, counted};
use jumbo_host::kernel::probe::Available;
use jumbo_host::kernel::{hugetlb, hvo};
use jumbo_host::status::{Host, Task, Tasks};

use super::HostPage;
use crate::view::{View, or_none, percent, percent_to};
use crate::{pool, thp};

pub(super) fn show(view: &mut View, page: &HostPage) {
    let HostPage { host, probe, tasks } = page;
    view.lines(summary(host, "; hint: jumbo doctor"));
    view.line("");
    show_facts(view, host);
    show_pools(view, host);
    show_holders(view, host, tasks);
    if let Some(thp) = &host.thp {
        thp::show::show(view, thp, None);
    }
    show_largest(view, tasks);
    view.heading("What this kernel, privilege and container allow");
    view.table(
        "<|<|<",
        probe
            .features()
            // Other folio sizes are in the table above.
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
    );
    view.missing("Not shown", host.missing.iter().chain(&tasks.missing))
}

/// Summary in two or three lines: huge memory, THP and pools, and memory for more huge pages. `hint`
/// follows where no program gets them.
pub(crate) fn summary(host: &Host, hint: &str) -> Vec<String> {
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
        Some("never") => &*format!("no program gets them (THP never){hint}"),
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

fn show_facts(view: &mut View, host: &Host) {
    let pools = host.pools.iter().flatten();
    let mut sizes: Vec<_> = pools.map(|pool| pool.size.to_string()).collect();
    if sizes.is_empty() {
        sizes.push("none".to_owned());
    }
    let memory = match &host.memory {
        Some(memory) => format!("{} of memory, {} available", memory.total, memory.available),
        None => String::from("memory unknown"),
    };
    view.fact("Host", format!("Linux {}, {memory}", host.kernel));
    view.fact(
        "Page sizes",
        format!(
            "base {}, PMD {}, hugetlb {}",
            host.base_page,
            host.pmd_size,
            sizes.join(" ")
        ),
    );
    let Some(memory) = &host.memory else {
        return;
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
                // One digit after the point: page metadata is a small part.
                percent_to(1, metadata.bytes, memory.total)
            ),
        );
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
    );
    view.fact("Page tables", memory.page_tables.to_string());
    let Some(reporting) = &host.reporting else {
        return;
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

fn show_pools(view: &mut View, host: &Host) {
    if let Some(pools) = &host.pools {
        return pool::show::show_pools(view, &pools.iter().collect::<Vec<_>>());
    }
    view.heading("hugetlb pools");
    view.line(if host.misses(Host::POOLS) {
        "  cannot be read: see below"
    } else {
        "  this kernel has no hugetlb"
    })
}

fn show_holders(view: &mut View, host: &Host, tasks: &Tasks) {
    view.heading("Who holds pool pages");
    let used = hugetlb::used(host.pools.as_deref().unwrap_or_default());
    let unmapped = Bytes(used.0.saturating_sub(tasks.hugetlb.0));
    if tasks.pool_holders.is_empty() && host.mounts.is_empty() && unmapped == Bytes(0) {
        return view.line("  no process, and no hugetlbfs mount");
    }
    if unmapped > Bytes(0) {
        view.line(format!(
            "  {unmapped} at least in files that no process seen here maps: hugetlbfs, System V, memfd"
        ));
    }
    let tasks = tasks.pool_holders.iter();
    view.lines(
        tasks.map(|task| format!("  {} in {} ({})", task.memory.hugetlb, task.name, task.pid)),
    );
    let mounts = host.mounts.iter();
    view.lines(mounts.map(|mount| format!("  hugetlbfs at {}", mount.path)))
}

fn show_largest(view: &mut View, tasks: &Tasks) {
    if tasks.largest.is_empty() {
        return;
    }
    view.heading(&format!(
        "The largest {} of {}",
        tasks.largest.len(),
        counted(tasks.count as u64, "process")
    ));
    let row = |task: &Task| {
        let memory = &task.memory;
        let share = |part: Option<Bytes>, whole| or_none(part.map(|part| percent(part, whole)));
        [
            task.pid.to_string(),
            task.name.clone(),
            memory.anon.to_string(),
            share(task.huge.map(|huge| huge.anon), memory.anon),
            memory.shmem.to_string(),
            share(task.huge.map(|huge| huge.shmem), memory.shmem),
            memory.hugetlb.to_string(),
            or_none(task.huge.map(|huge| huge.file)),
        ]
    };
    view.table(
        ">PID|<NAME|>ANONYMOUS|>HUGE|>SHARED|>HUGE|>HUGETLB|>HUGE TEXT, FILES",
        tasks.largest.iter().map(row),
    );
    if tasks.siblings.is_empty() {
        return;
    }
    let siblings = tasks.siblings.iter();
    let listed: Vec<_> = siblings
        .map(|sibling| format!("{} of {}", sibling.pid, sibling.program))
        .collect();
    view.line(format!(
        "  not counted, since their memory is that of their programs (jumbo run): {}",
        listed.join(", ")
    ))
}
