//! What became of shared memory, for the report.

use jumbo::units::{self, Bytes, PageSize};
use jumbo_host::policy::ShmMode;
use jumbo_inside::ledger::{Counts, shm_reason as reason};
use serde_json::{Value, json};

use super::report::Report;
use super::text::line;

/// What a bit of [`shm_reason`](reason) means to a reader.
fn meaning(bit: u32) -> Option<&'static str> {
    Some(match bit {
        reason::REFUSED => "the kernel takes no advice for it",
        reason::NOT_ALLOWED => {
            "the PMD size's shmem_enabled is never, or the program has switched huge pages off; hint: jumbo thp, or --shm=user"
        }
        reason::NO_HUGE => "no free huge page; hint: echo 1 > /proc/sys/vm/compact_memory",
        reason::NO_MEMORY => {
            "no room for a huge page beside the base pages, or no thread to be had"
        }
        reason::FILTER => "nothing is collapsed under a seccomp filter",
        reason::NO_HUGETLB => {
            "the kernel's pool had too few free pages, or a cgroup's limit of them; hint: jumbo pool grow"
        }
        reason::NOT_WHOLE => "not of whole hugetlb pages",
        reason::NO_USERFAULTFD => "no userfaultfd(2) in user mode is to be had (Linux 5.11)",
        reason::ENDED => {
            "the program changed its user, installed a filter or left its first thread before all was collapsed"
        }
        reason::TOO_MANY => "more mappings of 32 MiB than are looked after",
        reason::IN_PART => {
            "blocks that were touched in part, or have holes, stay as they are; hint: --max-waste"
        }
        _ => return None,
    })
}

fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    let bits = counts.shm_reasons;
    (0..u32::BITS)
        .filter(move |bit| bits & 1 << bit != 0)
        .filter_map(|bit| meaning(1 << bit))
}

/// The highest rung that some of it stands on.
fn rung(counts: &Counts) -> &'static str {
    match counts {
        Counts {
            shm_hugetlb: 1.., ..
        } => "hugetlb",
        Counts { shm_user: 1.., .. } => "user",
        Counts {
            shm_collapsed: 1.., ..
        } => "collapse",
        Counts {
            shm_advised: 1.., ..
        } => "controls",
        _ => "as it is",
    }
}

/// As part of a report in JSON. The statistics have the kernel's names (hugepages-*kB/stats/shmem_*); its own are beside them, in
/// /sys, and count what faults brought in.
pub(super) fn json(report: &Report<'_>) -> Value {
    let counts = &report.counted.total.of;
    let pmd = report.launch.plan.orders.pmd as u64;
    let mut stats = json!({});
    let mut add = |size: u64, alloc: u64, fallback: u64, charge: u64| {
        if let Some(size) = PageSize::new(size)
            .ok()
            .filter(|_| alloc + fallback + charge > 0)
        {
            stats[size.to_string()] = json!({
                "shmem_alloc": alloc,
                "shmem_fallback": fallback,
                "shmem_fallback_charge": charge,
            });
        }
    };
    add(
        counts.shm_user_block,
        counts.shm_user_alloc,
        counts.shm_user_fallback,
        counts.shm_user_fallback_charge,
    );
    add(
        pmd,
        counts.shm_collapsed / pmd.max(1),
        counts.shm_fallback,
        counts.shm_fallback_charge,
    );
    json!({
        "mappings": counts.shm,
        "rung": rung(counts),
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
pub(super) fn write(out: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let counts = &report.counted.total.of;
    if counts.shm == 0 || report.settings.asked.shm == ShmMode::Off {
        return Ok(());
    }
    let parts = [
        (counts.shm_hugetlb, "on hugetlb pages"),
        (counts.shm_user, "brought in by whole blocks"),
        (counts.shm_collapsed, "collapsed"),
        (counts.shm_advised, "advised"),
    ];
    let parts = parts.iter().filter(|(bytes, _)| *bytes > 0);
    let parts: Vec<_> = parts
        .map(|(bytes, what)| format!("{} {what}", Bytes(*bytes)))
        .collect();
    let what = match parts.is_empty() {
        true => String::from("as it is"),
        false => parts.join(", "),
    };
    let mapped = Bytes(counts.shm);
    let what = format!("{mapped} in mappings that hold a huge page: {what}");
    line(out, "shared", &what)?;
    let blocks = counts.shm_user_alloc;
    if blocks > 0 {
        let blocks = units::counted(blocks, "block");
        line(
            out,
            "",
            &format!("{blocks} of {}", Bytes(counts.shm_user_block)),
        )?;
    }
    for reason in reasons(counts) {
        line(out, "", reason)?;
    }
    Ok(())
}
