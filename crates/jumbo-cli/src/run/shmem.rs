//! Shared memory in the report.

use jumbo::units::{self, Bytes, PageSize};
use jumbo_host::policy::ShmMode;
use jumbo_inside::ledger::{Counts, shm_reason as reason};
use jumbo_inside::sys::{has_collapse, has_populate};
use serde_json::{Value, json};

use super::report::{self, Meaning, Report, meanings};
use super::text::Lines;

/// The rung of memory that stays on base pages.
const AS_IT_IS: &str = "as it is";

/// Of [`shm_reason`](reason).
const MEANING: Meaning = meanings! { reason;
    REFUSED => "the kernel takes no advice for it";
    NOT_ALLOWED if !has_collapse() =>
        "this kernel has no MADV_COLLAPSE (Linux 6.1); hint: jumbo thp, or --shm=user";
    NOT_ALLOWED =>
        "the PMD size's shmem_enabled is never, or the program has switched huge pages off; \
         hint: jumbo thp, or --shm=user";
    NO_HUGE => "no free huge page; hint: echo 1 > /proc/sys/vm/compact_memory";
    NO_MEMORY => "no room for a huge page beside the base pages, or no thread to be had";
    FILTER => "nothing is collapsed under a seccomp filter";
    NO_HUGETLB if !has_populate() => "this kernel has no MADV_POPULATE_WRITE (Linux 5.14)";
    NO_HUGETLB =>
        "the kernel's pool had too few free pages, or a cgroup's limit of them; hint: jumbo \
         pool grow";
    NOT_WHOLE => "not of whole hugetlb pages";
    NO_USERFAULTFD => "no userfaultfd(2) in user mode is to be had (Linux 5.11)";
    ENDED =>
        "the program changed its user, installed a filter or left its first thread before all \
         was collapsed";
    TOO_MANY => "more mappings of 32 MiB than are looked after";
    IN_PART =>
        "blocks that were touched in part, or have holes, stay as they are; hint: --max-waste";
};

fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    report::reasons(counts.shm_reasons, MEANING)
}

/// The bytes on each rung, the highest first: its name, and the words of a report.
fn rungs(counts: &Counts) -> impl Iterator<Item = (u64, &'static str, &'static str)> {
    let rungs = [
        (counts.shm_hugetlb, "hugetlb", "on hugetlb pages"),
        (counts.shm_user, "user", "brought in by whole blocks"),
        (counts.shm_collapsed, "collapse", "collapsed"),
        (counts.shm_advised, "controls", "advised"),
    ];
    rungs.into_iter().filter(|(bytes, ..)| *bytes > 0)
}

/// As part of a report in JSON. The statistics have the kernel's names
/// (hugepages-*kB/stats/shmem_*); its own are beside them, in /sys, and count what faults brought
/// in.
pub(super) fn json(report: &Report<'_>) -> Value {
    let counts = &report.counted.total.of;
    let pmd = report.launch.plan.orders.pmd as u64;
    let of_user = [
        counts.shm_user_alloc,
        counts.shm_user_fallback,
        counts.shm_user_fallback_charge,
    ];
    let of_pmd = [
        counts.shm_collapsed / pmd.max(1),
        counts.shm_fallback,
        counts.shm_fallback_charge,
    ];
    let mut stats = json!({});
    for (size, counts) in [(counts.shm_user_block, of_user), (pmd, of_pmd)] {
        let size = PageSize::new(size).ok();
        if let Some(size) = size.filter(|_| counts != [0; 3]) {
            let [alloc, fallback, charge] = counts;
            stats[size.to_string()] = json!({
                "shmem_alloc": alloc,
                "shmem_fallback": fallback,
                "shmem_fallback_charge": charge,
            });
        }
    }
    json!({
        "mappings": counts.shm,
        "rung": rungs(counts).next().map_or(AS_IT_IS, |(_, name, _)| name),
        "advised": counts.shm_advised,
        "collapsed": counts.shm_collapsed,
        "hugetlb": counts.shm_hugetlb,
        "hugetlb_fallback": counts.shm_hugetlb_fallback,
        "user": counts.shm_user,
        "stats": stats,
        "reasons": reasons(counts).collect::<Vec<_>>(),
    })
}

/// The first reason why shared memory is not on huge pages.
pub(super) fn why(report: &Report<'_>) -> Option<&'static str> {
    reasons(&report.counted.total.of).next()
}

/// The lines of a report; none where there is nothing to say.
pub(super) fn write(out: &mut Lines, report: &Report<'_>) {
    let counts = &report.counted.total.of;
    if counts.shm == 0 || report.settings.asked.shm == ShmMode::Off {
        return;
    }
    let parts = rungs(counts).map(|(bytes, _, what)| format!("{} {what}", Bytes(bytes)));
    let mut parts = parts.collect::<Vec<_>>().join(", ");
    if parts.is_empty() {
        AS_IT_IS.clone_into(&mut parts);
    }
    let mapped = Bytes(counts.shm);
    let what = format!("{mapped} in mappings that hold a huge page: {parts}");
    out.line("shared", &what);
    if counts.shm_user_alloc > 0 {
        let blocks = units::counted(counts.shm_user_alloc, "block");
        let size = Bytes(counts.shm_user_block);
        out.line("", &format!("{blocks} of {size}"));
    }
    reasons(counts).for_each(|reason| out.line("", reason));
}
