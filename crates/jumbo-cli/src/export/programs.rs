//! Metrics of covered programs and of control groups, by program and group names.

use std::collections::BTreeMap;

use jumbo_host::kernel::groups::{self, GroupHuge, Workload};
use jumbo_host::kernel::{Root, base_page, thp};
use jumbo_host::status::{Census, Member};
use jumbo_inside::ledger::flag;
use prometheus_client::metrics::MetricType::Gauge;

use super::metrics::{Labels, Metrics, Row, bound};
use super::{Failures, label};

const PROGRAM_GAUGES: &str = "\
jumbo_heap              bytes Resident anonymous memory of covered processes, and their pool's hugetlb pages
jumbo_covered_processes -     Processes with jumbo's library in them
jumbo_huge              bytes The part of jumbo_heap_bytes that jumbo put on huge pages, by its own books, and that is touched
jumbo_wasted            bytes Memory that is huge and not known to be touched, at most
jumbo_not_huge          bytes The part of jumbo_heap_bytes on base pages, by reason
jumbo_large             bytes Large allocations that are alive
jumbo_free_pending      bytes Freed memory that waits to be given back in the background
jumbo_text              bytes Program text that was to be on huge pages (--text)
jumbo_text_huge         bytes The part of jumbo_text_bytes that is
jumbo_pool_hugetlb      bytes hugetlb pages of the program's pool (--pool)
jumbo_pool_thp          bytes THPs of the program's pool (--pool)";

/// Gauges of groups, under CRI-O's names.
const GROUP_GAUGES: &str = "\
container_memory_anon_thp  bytes Anonymous memory of a control group in THPs
container_memory_shmem_thp bytes Shared memory of a control group in huge folios
container_memory_file_thp  bytes Page cache of a control group in huge folios";

/// Adds programs, then groups, up to `max_series`. Returns the number of summed series.
pub(super) fn add(
    page: &mut Metrics,
    root: &Root,
    max_series: usize,
    failures: &mut Failures,
) -> usize {
    let census = failures.or_default(Census::take(root), "processes");
    let pmd = thp::pmd_size(root).unwrap_or_else(|_| thp::reach_of_pmd(base_page(root)));
    let is_never = thp::is_never(root, pmd);
    let unread = [
        ("denied", census.denied),
        ("held_back", census.held_back),
        ("left_out", census.left_out),
        ("other_library", census.other),
    ];
    let unread = unread.map(|(reason, count)| (vec![label("reason", reason)], count as f64));
    let help = "Processes that could not be read: this user may not, they held it back, others took the time or the memory, or they have another jumbo's library";
    page.add(Gauge, "jumbo_unreadable_processes", None, help, unread);

    let mut programs = BTreeMap::new();
    for member in &census.members {
        let of = of_member(member, is_never);
        let sum: &mut Row = programs.entry(of.labels.clone()).or_default();
        sum.add(&of);
        sum.labels = of.labels;
    }
    let mut programs = programs.into_values().collect();
    let room = max_series.saturating_sub(page.series());
    let mut dropped = bound(
        &mut programs,
        room,
        "jumbo_heap",
        vec![label("comm", "other")],
    );
    page.gauges(PROGRAM_GAUGES, &programs);

    let groups = failures.or_default(groups::groups(root), "control groups");
    let mut groups = groups.iter().map(of_group).collect();
    let room = max_series.saturating_sub(page.series());
    dropped += bound(
        &mut groups,
        room,
        "container_memory_anon_thp",
        vec![label("unit", "other")],
    );
    page.gauges(GROUP_GAUGES, &groups);
    dropped
}

fn names(workload: &Workload) -> Labels {
    let all = [
        ("unit", &workload.unit),
        ("pod", &workload.pod),
        ("container", &workload.container),
    ];
    let known = all.into_iter().filter(|(_, value)| !value.is_empty());
    known.map(|(name, value)| label(name, value)).collect()
}

fn of_group((workload, huge): (&Workload, &GroupHuge)) -> Row {
    let values = [
        ("container_memory_anon_thp", huge.anon),
        ("container_memory_shmem_thp", huge.shmem),
        ("container_memory_file_thp", huge.file),
    ];
    let values = values.into_iter();
    let values = values.filter_map(|(gauge, bytes)| Some(((gauge, None), bytes?.0)));
    Row {
        labels: names(workload),
        values: values.collect(),
    }
}

fn of_member(member: &Member, is_never: bool) -> Row {
    let of = &member.counts;
    let heap = member.memory.anon.0 + of.pool_hugetlb;
    let touched = of.huge.saturating_sub(of.untouched);
    let huge = (touched + of.pool_hugetlb + of.pool_thp + of.data_moved).min(heap);
    let mut values: BTreeMap<_, _> = [
        ("jumbo_heap", heap),
        ("jumbo_covered_processes", 1),
        ("jumbo_huge", huge),
        ("jumbo_wasted", of.untouched),
        ("jumbo_large", of.large_live),
        ("jumbo_free_pending", of.free_pending),
    ]
    .map(|(gauge, value)| ((gauge, None), value))
    .into();
    values.insert(
        ("jumbo_not_huge", Some(("reason", reason(member, is_never)))),
        heap - huge,
    );
    // Omitted for programs without them, which are most.
    let pool = of.pool_hugetlb_peak.max(of.pool_thp_peak);
    for (is_any, gauge, value) in [
        (of.text, "jumbo_text", of.text),
        (of.text, "jumbo_text_huge", of.text_file + of.text_shared),
        (pool, "jumbo_pool_hugetlb", of.pool_hugetlb),
        (pool, "jumbo_pool_thp", of.pool_thp),
    ] {
        if is_any > 0 {
            values.insert((gauge, None), value);
        }
    }
    let comm = [label("comm", &member.name)];
    Row {
        labels: comm.into_iter().chain(names(&member.workload)).collect(),
        values,
    }
}

/// Reason why memory of a process is not huge.
fn reason(member: &Member, is_never: bool) -> &'static str {
    let of = &member.counts;
    let is_disabled = of.flags & flag::THP_DISABLED != 0;
    if is_disabled || member.memory.thp_enabled == Some(false) {
        "thp_disabled"
    } else if is_never {
        "thp_never"
    } else if of.huge == 0 && of.refused > 0 {
        "refused"
    } else if of.huge == 0 && of.advised > 0 && of.untouched == 0 {
        // --max-waste=unbounded: blocks are advised, and not tracked.
        "unknown"
    } else {
        "not_dense"
    }
}
