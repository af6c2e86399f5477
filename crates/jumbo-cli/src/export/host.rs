//! Metrics of the host: pools, THPs, vmstat, pressure, free memory.

use std::collections::BTreeMap;

use jumbo::units::{NodeId, Pages};
use jumbo_host::kernel::hugetlb::{self, Pool};
use jumbo_host::kernel::memory::{Events, Memory, Zone};
use jumbo_host::kernel::thp::{self, Thp};
use jumbo_host::kernel::{Root, base_page, pressure};
use prometheus_client::metrics::MetricType::{Counter, Gauge};
use prometheus_client::registry::Unit::{Bytes, Seconds};

use super::metrics::{Labels, Metrics};
use super::{Failures, label};

pub(super) fn add(page: &mut Metrics, root: &Root, failures: &mut Failures) {
    let pools = failures.or_default(hugetlb::pools(root), "hugetlb pools");
    add_pools(page, &pools.unwrap_or_default());
    let memory = failures.or_default(Memory::read(root), "meminfo");
    let each = [
        memory.anon,
        memory.anon_huge,
        memory.shmem,
        memory.shmem_huge,
        memory.file_huge,
    ];
    page.each(MEMORY_GAUGES, each.map(|bytes| [(vec![], bytes.0 as f64)]));
    let thp = failures.or_default(Thp::read(root), "the THP controls");
    add_folios(page, thp.as_ref());
    let events = failures.or_default(Events::read(root), "vmstat");
    let is_ours = |name: &str| name.starts_with("thp_") || COMPACTION_COUNTERS.contains(&name);
    for (name, count) in events.0.iter().filter(|(name, _)| is_ours(name)) {
        let help = format!("{name} of /proc/vmstat");
        let name = format!("jumbo_vmstat_{name}");
        page.add(Counter, &name, None, &help, [(vec![], *count as f64)]);
    }
    let pressure = failures.or_default(pressure::memory(root), "the pressure of memory");
    for (name, help, time) in [
        (
            "some",
            "Time in which some task waited for memory (PSI)",
            pressure.map(|it| it.some),
        ),
        (
            "full",
            "Time in which all tasks that were not idle waited for memory (PSI)",
            pressure.map(|it| it.full),
        ),
    ] {
        let samples = time.map(|time| (vec![], time.as_secs_f64()));
        let name = format!("jumbo_memory_pressure_{name}");
        page.add(Counter, &name, Some(Seconds), help, samples);
    }
    let zones = failures.or_default(Zone::read_all(root), "buddyinfo");
    add_free(page, root, &zones);
}

const MEMORY_GAUGES: &str = "\
jumbo_host_anon       bytes Anonymous memory of all processes
jumbo_host_anon_huge  bytes Anonymous memory in THPs that a PMD maps (AnonHugePages)
jumbo_host_shmem      bytes Shared memory and tmpfs
jumbo_host_shmem_huge bytes Shared memory in huge folios (ShmemHugePages)
jumbo_host_file_huge  bytes Page cache in huge folios (FileHugePages)";

const POOL_GAUGES: &str = "\
jumbo_hugetlb_pool       bytes All hugetlb pages of a size, surplus pages included
jumbo_hugetlb_free       bytes hugetlb pages that no process maps, reserved ones included
jumbo_hugetlb_surplus    bytes hugetlb pages beyond the persistent ones
jumbo_hugetlb_reserved   bytes Free hugetlb pages that are promised to mappings; they belong to no node
jumbo_hugetlb_overcommit bytes hugetlb pages that there may be beyond the persistent ones";

const COMPACTION_COUNTERS: [&str; 3] = ["compact_stall", "compact_fail", "compact_success"];

/// Function from a pool to numbers of pages by node.
type PagesOf = fn(&Pool) -> Vec<(Option<NodeId>, Pages)>;

fn add_pools(page: &mut Metrics, pools: &[Pool]) {
    /// Pages by node, or of the whole pool on a kernel without nodes.
    macro_rules! by_node {
        ($field:ident) => {
            |pool| match pool.nodes.is_empty() {
                true => vec![(None, pool.$field)],
                false => (pool.nodes.iter())
                    .map(|(node, part)| (Some(*node), part.$field))
                    .collect(),
            }
        };
    }
    let each: [PagesOf; 5] = [
        by_node!(total),
        by_node!(free),
        by_node!(surplus),
        |pool| vec![(None, pool.reserved)],
        |pool| vec![(None, pool.overcommit)],
    ];
    let samples = each.map(|pages| {
        pools.iter().flat_map(move |pool| {
            let each = pages(pool).into_iter();
            each.map(|(node, pages)| {
                let node = node.map(|node| label("node", node.0));
                let labels = [label("size", pool.size)].into_iter().chain(node).collect();
                (labels, pages.bytes(pool.size).0 as f64)
            })
        })
    });
    page.each(POOL_GAUGES, samples);
}

/// Adds the counters of each folio size (`hugepages-*kB/stats`, 6.10) under the kernel's names.
fn add_folios(page: &mut Metrics, thp: Option<&Thp>) {
    let mut by_name: BTreeMap<&str, Vec<(Labels, f64)>> = BTreeMap::new();
    for (size, control) in thp.iter().flat_map(|thp| &thp.sizes) {
        for (name, count) in &control.stats {
            let sample = (vec![label("size", size)], *count as f64);
            by_name.entry(name).or_default().push(sample);
        }
    }
    for (stat, samples) in by_name {
        let name = format!("jumbo_mthp_{stat}");
        let help = format!(
            "{stat} of a folio size in /sys/{}",
            thp::FOLDER.trim_start_matches("sys/")
        );
        let is_gauge = stat.starts_with("nr_");
        let kind = if is_gauge { Gauge } else { Counter };
        page.add(kind, &name, None, &help, samples);
    }
}

fn add_free(page: &mut Metrics, root: &Root, zones: &[Zone]) {
    let base = base_page(root);
    let pmd = thp::pmd_size(root).unwrap_or_else(|_| thp::reach_of_pmd(base));
    let labels = |zone: &Zone| vec![label("node", zone.node.0), label("zone", &zone.name)];
    let free = |zone: &Zone| zone.free(base).0;
    // Unknown where the largest buddy block is smaller than the PMD size: 0.
    let huge = |zone: &Zone| zone.whole(pmd, base).map_or(0, |pages| pages.bytes(pmd).0);
    let samples = |bytes: &dyn Fn(&Zone) -> u64| -> Vec<_> {
        let each = zones.iter().map(|zone| (labels(zone), bytes(zone) as f64));
        each.collect()
    };
    let in_blocks = format!("that lies in free blocks of the PMD size, {pmd}, or more");
    let help = "Free memory of a zone";
    page.add(Gauge, "jumbo_free", Some(Bytes), help, samples(&free));
    let help = format!("Free memory of a zone {in_blocks}");
    page.add(
        Gauge,
        "jumbo_free_huge_block",
        Some(Bytes),
        &help,
        samples(&huge),
    );
    let sum = |bytes: &dyn Fn(&Zone) -> u64| zones.iter().map(bytes).sum::<u64>() as f64;
    let ratio = Some(sum(&free)).filter(|free| *free > 0.0);
    let ratio = ratio.map(|all| (vec![], sum(&huge) / all));
    let help =
        format!("Share of the free memory {in_blocks}; the rest is too fragmented for a huge page");
    page.add(Gauge, "jumbo_free_huge_block_ratio", None, &help, ratio);
}
