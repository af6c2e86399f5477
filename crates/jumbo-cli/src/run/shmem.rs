//! Shared memory in the report.

use jumbo::units::{Bytes, PageSize};
use jumbo_host::policy::ShmMode;
use jumbo_inside::ledger::{Counts, shm_reason as reason};
use jumbo_sys::{has_collapse, has_populate};
use serde_json::{Value, json};

use super::outcome::{self, Meaning, Report, meanings};
use super::text::fact;
use crate::view::View;

/// Method of memory that stays on base pages.
const AS_IT_IS: &str = "as it is";

const SHM_REASONS: Meaning = meanings! { reason;
    REFUSED => "the kernel takes no advice for it";
    NOT_ALLOWED if !has_collapse() =>
        "this kernel has no MADV_COLLAPSE (Linux 6.1); hint: jumbo thp";
    NOT_ALLOWED =>
        "the PMD size's shmem_enabled is never, or the program has switched huge pages off; \
         hint: jumbo thp";
    NO_HUGE => "no free huge page; hint: echo 1 > /proc/sys/vm/compact_memory";
    NO_MEMORY => "no memory for a huge page beside the base pages, or no thread";
    FILTER => "nothing is collapsed under a seccomp filter";
    NO_HUGETLB if !has_populate() => "this kernel has no MADV_POPULATE_WRITE (Linux 5.14)";
    NO_HUGETLB =>
        "the kernel's pool had too few free pages, or a cgroup's limit of them; hint: jumbo \
         pool grow";
    NOT_WHOLE => "not of whole hugetlb pages";
    ENDED =>
        "the program changed its user, installed a filter or left its first thread before all \
         was collapsed";
    TOO_MANY => "more separate mappings than jumbo tracks";
    IN_PART =>
        "blocks that were touched in part, or have holes, stay as they are; hint: --max-waste";
};

fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    outcome::reasons(counts.shm_reasons, SHM_REASONS)
}

/// Bytes, name and description of each method that obtained memory, the best first.
fn methods(counts: &Counts) -> impl Iterator<Item = (u64, &'static str, &'static str)> {
    let methods = [
        (counts.shm_hugetlb, "hugetlb", "on hugetlb pages"),
        (counts.shm_collapsed, "collapse", "collapsed"),
        (counts.shm_advised, "controls", "advised"),
    ];
    methods.into_iter().filter(|(bytes, ..)| *bytes > 0)
}

/// Section of a JSON report. The statistics have the names of the kernel's own
/// (hugepages-*kB/stats/shmem_*), which count page faults.
pub(super) fn json(report: &Report<'_>) -> Value {
    let counts = &report.counted.total;
    let pmd = report.launch.plan.orders.pmd as u64;
    let (alloc, fallback) = (counts.shm_collapsed / pmd.max(1), counts.shm_fallback);
    let charge = counts.shm_fallback_charge;
    let mut stats = json!({});
    if let Ok(size) = PageSize::new(pmd)
        && [alloc, fallback, charge] != [0; 3]
    {
        stats[size.to_string()] = json!({
            "shmem_alloc": alloc,
            "shmem_fallback": fallback,
            "shmem_fallback_charge": charge,
        });
    }
    json!({
        "mappings": counts.shm,
        "rung": methods(counts).next().map_or(AS_IT_IS, |(_, name, _)| name),
        "advised": counts.shm_advised,
        "collapsed": counts.shm_collapsed,
        "hugetlb": counts.shm_hugetlb,
        "hugetlb_fallback": counts.shm_hugetlb_fallback,
        "stats": stats,
        "reasons": reasons(counts).collect::<Vec<_>>(),
    })
}

/// First reason why shared memory is not on huge pages.
pub(super) fn why(report: &Report<'_>) -> Option<&'static str> {
    const NOT_YET: &str =
        "in mappings of less than 32 MiB, or not collapsed yet (by a tenth of a CPU)";
    reasons(&report.counted.total).next().or(Some(NOT_YET))
}

/// Writes the lines of a report, if the program has shared memory.
pub(super) fn write(view: &mut View, report: &Report<'_>) {
    let counts = &report.counted.total;
    if counts.shm == 0 || report.settings.requested.shm == ShmMode::Off {
        return;
    }
    let parts = methods(counts).map(|(bytes, _, what)| format!("{} {what}", Bytes(bytes)));
    let mut parts = parts.collect::<Vec<_>>().join(", ");
    if parts.is_empty() {
        AS_IT_IS.clone_into(&mut parts);
    }
    let mapped = Bytes(counts.shm);
    let what = format!("{mapped} in mappings that hold a huge page: {parts}");
    fact(view, "shared", &what);
    reasons(counts).for_each(|reason| fact(view, "", reason));
}
