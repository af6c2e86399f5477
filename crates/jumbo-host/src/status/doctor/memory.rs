//! Rules about the host's memory as a whole.

use super::thp::many_failed;
use super::{COMPACT_HINT, Cost, Finding, LARGE_BYTES, Snapshot};
use crate::kernel::task::quoted;

pub(super) fn rules(snapshot: &Snapshot) -> Vec<Finding> {
    [
        fragmented(snapshot),
        page_tables(snapshot),
        committed(snapshot),
        cgroup_full(snapshot),
        first_touch(snapshot),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Minimum ratio of a first touch that waited (for the host, in a virtual machine) to a later
/// touch. Clearing the page takes the same time in both.
const MIN_WAIT_RATIO: f64 = 1.5;

/// First touches that wait because a virtual machine returns free memory to its host. Without a
/// sign of a host, only the measurement counts.
fn first_touch(snapshot: &Snapshot) -> Option<Finding> {
    let (reporting, touch) = (&snapshot.host.reporting, snapshot.touch);
    let waited = touch.map(|touch| touch.ratio() >= MIN_WAIT_RATIO);
    let has_host = reporting.is_some() || snapshot.host.hypervisor;
    let (cost, title, how) = match (reporting, touch) {
        (_, Some(touch)) if waited == Some(true) && !has_host => (
            Cost::Waits(touch),
            "the first touch of memory that was free for a while takes longer than the next",
            "",
        ),
        (_, Some(touch)) if waited == Some(true) => (
            Cost::Waits(touch),
            "free memory goes back to the host of this virtual machine: its first touch waits for the host",
            "",
        ),
        (Some(_), None) => (
            Cost::Unknown,
            "free memory goes back to the host of this virtual machine: its first touch may wait for the host",
            "; `jumbo doctor --measure` says how long that takes",
        ),
        _ => return None,
    };
    let (file, value) = match reporting {
        Some(reporting) => (reporting.file(), "bit 5 is set: free page reporting"),
        None if has_host => (
            "/sys/bus/virtio/devices".to_owned(),
            "no balloon that reports free pages: the host has another way",
        ),
        None => (
            "/proc/cpuinfo flags".to_owned(),
            "no `hypervisor`: nothing says that this is a virtual machine",
        ),
    };
    let finding = Finding::new("first-touch", cost, title).evidence(file, value);
    Some(finding.hint(format!(
        "`jumbo run --pool SIZE --warm -- PROGRAM` touches the memory of a program before it needs it{how}"
    )))
}

/// Free memory mostly in blocks smaller than a huge page, where compaction has failed.
fn fragmented(snapshot: &Snapshot) -> Option<Finding> {
    let host = &snapshot.host;
    let (pages, _) = host.formable_of(host.pmd_size);
    let (scattered, free) = snapshot.scattered();
    // A few failures since boot say nothing of the host now.
    let (_, failed) = many_failed(snapshot, "compact_success", "compact_fail")?;
    (scattered.0 > free.0 / 2 && scattered >= LARGE_BYTES).then(|| {
        Finding::new(
            "fragmented",
            // Free memory slows nothing down yet.
            Cost::Unknown,
            format!(
                "{scattered} of {free} free memory are in pieces smaller than {}, and since boot compaction has failed",
                host.pmd_size
            ),
        )
        .evidence(
            "/proc/buddyinfo",
            format!("{pages} pages of {} could be formed", host.pmd_size),
        )
        .since_boot("compact_fail", failed)
        .since_boot("compact_success", snapshot.since_boot("compact_success"))
        .hint(COMPACT_HINT)
    })
}

/// Page tables of more than 1 % of memory, usually for shared memory that many processes map with
/// base pages.
fn page_tables(snapshot: &Snapshot) -> Option<Finding> {
    let memory = snapshot.host.memory.as_ref()?;
    (memory.page_tables >= LARGE_BYTES && memory.page_tables.0 > memory.total.0 / 100).then(|| {
        let mapper = snapshot
            .tasks
            .largest
            .iter()
            .max_by_key(|task| task.memory.shmem);
        let option = mapper.map_or_else(String::new, |task| format!(" -p {}", task.pid));
        Finding::new(
            "page-tables",
            Cost::Wasted(memory.page_tables),
            format!(
                "page tables take {} of {}",
                memory.page_tables, memory.total
            ),
        )
        .evidence("/proc/meminfo PageTables", memory.page_tables)
        .hint(format!(
            "put memory that many processes map on huge pages, which need none of them: \
             `jumbo status{option}` shows what is not"
        ))
    })
}

/// Strict overcommit near the commit limit, which pools reduce.
fn committed(snapshot: &Snapshot) -> Option<Finding> {
    let (host, memory) = (&snapshot.host, snapshot.host.memory.as_ref()?);
    let strict = host.sysctl.overcommit_memory == Some(2);
    let left = memory.commit_limit.0.saturating_sub(memory.committed.0);
    (strict && left < memory.commit_limit.0 / 20).then(|| {
        Finding::new(
            "commit-limit",
            Cost::Fails,
            format!(
                "mappings fail soon: {} of {} are promised",
                memory.committed, memory.commit_limit
            ),
        )
        .evidence("/proc/sys/vm/overcommit_memory", 2)
        .evidence("/proc/meminfo Committed_AS", memory.committed)
        .evidence("/proc/meminfo CommitLimit", memory.commit_limit)
        .evidence("/proc/meminfo Hugetlb, which it leaves out", memory.hugetlb)
        .hint("`sysctl vm.overcommit_ratio=80`, or `sysctl vm.overcommit_memory=0`")
    })
}

/// A memory control group without room for a huge page: faults fall back, and collapses fail with
/// EBUSY.
fn cgroup_full(snapshot: &Snapshot) -> Option<Finding> {
    let limit = snapshot.host.limits.memory.as_ref()?;
    (limit.room().0 < snapshot.host.pmd_size.bytes()).then(|| {
        Finding::new(
            "cgroup-full",
            Cost::Fails,
            format!(
                "this control group has {} left: no huge page fits",
                limit.room()
            ),
        )
        .evidence(limit.file.display().to_string(), limit.limit)
        .evidence("in use", limit.usage)
        .hint(format!(
            "`echo {} > {}`",
            limit.limit.0 + limit.limit.0 / 4,
            quoted([&*limit.file.to_string_lossy()])
        ))
    })
}
