//! Rules about the THP controls.

use super::{COMPACT_HINT, Cost, Finding, LARGE_BYTES, Snapshot, THP_FOLDER};
use crate::kernel::thp::Thp;
use crate::status::Host;
use crate::units::{Bytes, PageSize, Pages};

/// Divisor of the minimum share of failed allocations for a finding: one in ten.
const FAILED_SHARE_DIVISOR: u64 = 10;
/// Minimum number of failures for a finding.
const MIN_FAILURES: u64 = 100;

pub(super) fn rules(snapshot: &Snapshot) -> Vec<Finding> {
    let Some(thp) = &snapshot.host.thp else {
        return Vec::from_iter(no_thp(snapshot));
    };
    [
        off(snapshot, thp),
        direct_compaction(snapshot, thp),
        no_small_folios(snapshot, thp),
        bloat(snapshot, thp),
        no_zero_page(thp),
        fallback(snapshot, thp),
        fallback_charge(snapshot, thp),
        split_at_swap(snapshot, thp),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Anonymous memory that is not in THPs.
fn small_anon(snapshot: &Snapshot) -> Bytes {
    let memory = snapshot.host.memory.as_ref();
    memory.map_or(Bytes(0), |memory| {
        Bytes(memory.anon.0.saturating_sub(memory.anon_huge.0))
    })
}

/// Reports whether no program gets anonymous memory in folios of that size.
fn is_never(thp: &Thp, size: PageSize) -> bool {
    thp.anon(size).is_none_or(|choice| choice.is("never"))
}

/// Reports whether every program gets THPs.
fn is_always(thp: &Thp) -> bool {
    (thp.anon(thp.pmd_size)).is_some_and(|choice| choice.is("always"))
}

fn no_thp(snapshot: &Snapshot) -> Option<Finding> {
    let host = &snapshot.host;
    // Unreadable controls are reported as missing.
    if host.misses(Host::THP_CONTROLS) {
        return None;
    }
    let pool = snapshot.pools().next();
    let pools = pool.map_or("it has no hugetlb either".to_owned(), |pool| {
        let size = pool.size;
        format!(
            "use hugetlb pages meanwhile: `jumbo pool set {size} --overcommit 2G` lets programs that ask \
             for them have some"
        )
    });
    Some(
        Finding::new(
            "no-thp",
            Cost::Slow(small_anon(snapshot)),
            "this kernel has no THP",
        )
        .evidence(THP_FOLDER, "is not there")
        .hint(format!(
            "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y; {pools}"
        )),
    )
}

fn off(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let all_off = is_never(thp, thp.pmd_size) && thp.sizes.keys().all(|size| is_never(thp, *size));
    all_off.then(|| {
        let kib = thp.pmd_size.kib();
        let own = thp.sizes.get(&thp.pmd_size).and_then(|control| control.enabled.as_ref());
        // The size's own knob applies unless it inherits.
        let (knob, name) = match own {
            Some(own) if !own.is("inherit") => {
                (format!("{THP_FOLDER}/hugepages-{kib}kB/enabled"), thp.pmd_size.to_string())
            }
            _ => (format!("{THP_FOLDER}/enabled"), "enabled".to_owned()),
        };
        Finding::new(
            "thp-never",
            Cost::Slow(small_anon(snapshot)),
            "no program gets THPs at a fault, not even after MADV_HUGEPAGE",
        )
        .evidence(knob, "never")
        .evidence("/proc/meminfo AnonPages outside AnonHugePages", small_anon(snapshot))
        .hint(format!(
            "`jumbo thp set {name}=madvise` gives them to programs that ask, such as those under `jumbo run`"
        ))
    })
}

fn direct_compaction(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let defrag = thp.defrag.as_ref().filter(|defrag| defrag.is("always"))?;
    let stalls = snapshot.since_boot("compact_stall");
    (!thp.enabled.is("never")).then(|| {
        Finding::new(
            "defrag-always",
            Cost::Slow(Pages(stalls).bytes(thp.pmd_size)),
            "every fault for a huge page may wait for memory to be compacted (the cost counts those that \
             did since boot)",
        )
        .evidence(format!("{THP_FOLDER}/defrag"), &defrag.current)
        .since_boot("compact_stall", stalls)
        .hint("`jumbo thp set defrag=defer+madvise` waits only where the program asked for THPs")
    })
}

fn no_small_folios(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let below: Vec<_> = thp
        .sizes
        .keys()
        .filter(|size| **size < thp.pmd_size)
        .collect();
    let controlled = below.iter().any(|size| thp.sizes[*size].enabled.is_some());
    let never = below.iter().all(|size| is_never(thp, **size));
    // `small-heap` has the processes whose memory whole huge pages could hold.
    let tasks = snapshot.tasks.largest.iter();
    let in_programs: Bytes = tasks.filter_map(super::programs::reported).sum();
    let small = Bytes(small_anon(snapshot).0.saturating_sub(in_programs.0));
    if !controlled || !never || small < LARGE_BYTES || is_never(thp, thp.pmd_size) {
        return None;
    }
    // Both arm64 and x86-64 coalesce TLB entries at this size.
    let wanted = below.iter().find(|size| size.kib() == 64);
    let size = wanted.or(below.last())?;
    Some(
        Finding::new(
            "mthp-never",
            // A part may be where a huge page fits, which only smaps tells.
            Cost::Unknown,
            "memory where no whole huge page fits stays on base pages",
        )
        .evidence(
            format!("{THP_FOLDER}/hugepages-*kB/enabled"),
            format!(
                "never, for all {} sizes below {}",
                below.len(),
                thp.pmd_size
            ),
        )
        .evidence(
            "/proc/meminfo AnonPages outside AnonHugePages, less the processes above",
            small,
        )
        .hint(format!("`jumbo thp set {size}=madvise`")),
    )
}

fn bloat(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let max_ptes_none = *thp.khugepaged.get("max_ptes_none")?;
    let entries = thp.pmd_size.bytes() / snapshot.host.base_page.bytes();
    let collapsed = snapshot.since_boot("thp_collapse_alloc");
    let wasted = Pages(collapsed).bytes(thp.pmd_size);
    let fills_any_hole = max_ptes_none >= entries - 1;
    if !is_always(thp) || !fills_any_hole || wasted < LARGE_BYTES {
        return None;
    }
    Some(
        Finding::new(
            "khugepaged-bloat",
            Cost::Wasted(wasted),
            format!(
                "khugepaged makes a {} page of a single touched base page, and splits none again \
                 (upper bound of the cost: all pages that it made since boot)",
                thp.pmd_size
            ),
        )
        .evidence(
            format!("{THP_FOLDER}/khugepaged/max_ptes_none"),
            max_ptes_none,
        )
        .since_boot("thp_collapse_alloc", collapsed)
        .hint(format!(
            "`jumbo thp set max_ptes_none={}`; it also lets the kernel split huge pages \
             that are mostly zeroes, under memory pressure",
            entries / 8
        )),
    )
}

fn no_zero_page(thp: &Thp) -> Option<Finding> {
    (is_always(thp) && thp.use_zero_page == Some(false)).then(|| {
        Finding::new(
            "no-huge-zero-page",
            Cost::Unknown,
            "reading untouched memory takes a huge page of its own for each",
        )
        .evidence(format!("{THP_FOLDER}/use_zero_page"), 0)
        .hint("`jumbo thp set use_zero_page=1`")
    })
}

/// Two counters, if `failed` has a large share of their sum.
pub(super) fn many_failed(snapshot: &Snapshot, done: &str, failed: &str) -> Option<(u64, u64)> {
    let done = snapshot.host.events.get(done)?;
    let failed = snapshot.host.events.get(failed)?;
    let is_large = failed >= (done + failed) / FAILED_SHARE_DIVISOR;
    (failed >= MIN_FAILURES && is_large).then_some((done, failed))
}

fn fallback(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let (done, failed) = many_failed(snapshot, "thp_fault_alloc", "thp_fault_fallback")?;
    let charge = snapshot.since_boot("thp_fault_fallback_charge");
    let failed = failed.saturating_sub(charge);
    // The counters never fall. They are obsolete if free memory is in large blocks now.
    let (scattered, free) = snapshot.scattered();
    (failed >= MIN_FAILURES && scattered.0 >= free.0 / 2).then(|| {
        Finding::new(
            "thp-fallback",
            Cost::Slow(Pages(failed).bytes(thp.pmd_size)),
            "since boot many faults for a huge page found none, and most free memory is in smaller pieces now",
        )
        .evidence("/proc/buddyinfo, in smaller pieces", scattered)
        .since_boot("thp_fault_fallback", failed)
        .since_boot("thp_fault_alloc", done)
        .hint(COMPACT_HINT)
    })
}

fn fallback_charge(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let (done, failed) = many_failed(snapshot, "thp_fault_alloc", "thp_fault_fallback_charge")?;
    let limit = snapshot.host.limits.memory.as_ref();
    let raise = limit.map_or_else(
        || {
            "raise `memory.max` of the groups that are full: `systemd-cgtop -m` shows them"
                .to_owned()
        },
        |limit| {
            format!(
                "raise {}, if it is this group that is full",
                limit.file.display()
            )
        },
    );
    Some(
        Finding::new(
            "thp-charge",
            Cost::Slow(Pages(failed).bytes(thp.pmd_size)),
            "since boot many huge pages were refused by a control group at its memory limit",
        )
        .since_boot("thp_fault_fallback_charge", failed)
        .since_boot("thp_fault_alloc", done)
        .hint(raise),
    )
}

/// Huge pages that were split before they were swapped out, while memory is in swap. The counters
/// never fall: without memory in swap they are obsolete.
fn split_at_swap(snapshot: &Snapshot, thp: &Thp) -> Option<Finding> {
    let (done, failed) = many_failed(snapshot, "thp_swpout", "thp_swpout_fallback")?;
    let memory = snapshot.host.memory.as_ref()?;
    let swapped = Bytes(memory.swap_total.0.saturating_sub(memory.swap_free.0));
    if swapped < LARGE_BYTES {
        return None;
    }
    Some(
        Finding::new(
            "swap-splits",
            Cost::Slow(swapped.min(Pages(failed).bytes(thp.pmd_size))),
            "since boot many huge pages were split before they were swapped out: the swap space was fragmented \
             or full",
        )
        .evidence("/proc/meminfo SwapTotal - SwapFree", swapped)
        .since_boot("thp_swpout_fallback", failed)
        .since_boot("thp_swpout", done)
        .hint("`sysctl vm.swappiness=10` swaps less; a larger swap space has more room in one piece"),
    )
}
