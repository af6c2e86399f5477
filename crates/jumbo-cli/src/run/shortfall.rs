//! Reasons why less was obtained than requested: [`Shortfall`].

use jumbo::units::{self, Bytes};
use jumbo_host::kernel::thp::Thp;
use jumbo_host::policy::{HeapMode, MaxWaste, MemoryPlan};
use jumbo_inside::ledger::{MAX_SLOTS, flag, pool_reason};
use jumbo_inside::sandbox;
use jumbo_sys::has_collapse;
use rustix::io::Errno;
use serde::Serialize;

use super::args::RunSettings;
use super::launch::Launch;
use super::outcome::{Counted, RunOutcome, has};

/// A part of the heap is reported from one part in this many on.
const NOTABLE_PARTS: u64 = 20;

/// Minimum heap, in huge pages, that needs a reason for a share below [`LOW_HUGE_SHARE`].
const MIN_HEAP_PAGES: u64 = 8;
const LOW_HUGE_SHARE: f64 = 0.5;
/// Share on huge pages from which on the rest needs no reason.
pub(super) const GOOD_HUGE_SHARE: f64 = 0.9;
/// Name of the shortfall of memory that begins on base pages, since these take less time.
pub(super) const FIRST_TOUCHES: &str = "first touches";
/// Name of the shortfall of memory that the bound keeps on base pages.
pub(super) const BOUND: &str = "the bound";
/// Name of the shortfall of mappings too small for a huge page, where they are not the main cause.
pub(super) const SMALL_MAPPINGS: &str = "small mappings";

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shortfall {
    pub(super) what: &'static str,
    pub(super) reason: String,
}

/// Finds all shortfalls of a run. `reached`: the first process joined the ledger.
pub(super) fn find(
    settings: &RunSettings,
    launch: &Launch<'_>,
    outcome: &RunOutcome<'_>,
    counted: &Counted,
    reached: bool,
) -> Vec<Shortfall> {
    let mut found = Vec::new();
    let mut add = |what: &'static str, reason: String| found.push(Shortfall { what, reason });
    let (requested, orders) = (&settings.requested, &launch.plan.orders);
    let counts = &counted.total;

    if !reached && outcome.sampled.is_loaded {
        let reason = "nothing was counted: the library is loaded, and may not open the counters (/proc/PID/fd of \
                      jumbo, whose file its user may not read, or whose user is another one)";
        add("the ledger", reason.to_owned());
    } else if !reached {
        let reason = unreached(launch);
        add("the program", reason);
    }
    // One entry for allocations and private mappings: the same THP controls apply to them. Shared
    // memory has its own, and files have none.
    let wants = requested.heap != HeapMode::Off || requested.maps;
    let ruled_out = launch.program.reach.is_reached() && wants;
    let disabled = jumbo_inside::heap::thp_disabled();
    let nothing = |thp: &Option<Thp>| {
        let memory = (launch.plan).memory(&launch.program.reach, thp.as_ref(), disabled);
        let mut all = memory.into_iter().filter(MemoryPlan::is_heap);
        let first = all.next()?;
        (first.sizes.is_empty() && all.all(|memory| memory.sizes.is_empty())).then_some(first.how)
    };
    if let Some(how) = outcome
        .controls
        .iter()
        .find_map(nothing)
        .filter(|_| ruled_out)
    {
        add("huge pages", how);
    } else if outcome.sampled.thp_disabled || has(counts, flag::THP_DISABLED) {
        let reason = "a process has THP switched off for itself (PR_SET_THP_DISABLE)";
        add("huge pages", String::from(reason));
    }
    if orders.heap == HeapMode::On
        && has(counts, flag::MALLOC)
        && !has(counts, flag::SLABS)
        && !has(counts, flag::NO_WINDOW)
    {
        let reason =
            "the C library serves all of them: MALLOC_ variables or glibc.malloc tunables are set";
        add("small allocations", reason.to_owned());
    }
    if has(counts, flag::SANITIZER) {
        let reason = "a program has ThreadSanitizer, MemorySanitizer or HWAddressSanitizer, which accept no \
                      memory at addresses that jumbo would choose: it runs as without jumbo";
        add("huge pages", reason.to_owned());
    }
    if orders.heap != HeapMode::Off && has(counts, flag::FOREIGN_MALLOC) {
        let whose = match has(counts, flag::MALLOC) {
            true => "some processes bring their own malloc",
            false => "the program brings its own malloc",
        };
        add(
            "allocations",
            format!("{whose}: covered through its mappings only"),
        );
    }
    if has(counts, flag::NO_WINDOW) {
        let reason = "the addresses for it are taken or out of bounds (ulimit -v)";
        add("allocations", format!("no window: {reason}"));
    }
    if counts.large_fallback > 0 {
        add(
            "large allocations",
            format!(
                "{} of {} went to the program's allocator: the window could not serve them",
                counts.large_fallback,
                counts.large_calls + counts.large_fallback
            ),
        );
    }
    if let Some(why) = launch.why_not_later() {
        add("large frees", why.to_owned());
    }
    if let Some(why) = launch.plan.why_other_pages() {
        add("the pool", why);
    }
    if counts.pool_reasons & pool_reason::FULL != 0 {
        add(
            "the pool",
            format!(
                "used up: {} were asked for beyond it; hint: a larger --pool, or --overcommit",
                Bytes(counts.pool_beyond)
            ),
        );
    }
    if counts.pool_stuck > 0 {
        add(
            "the pool",
            format!(
                "{} stayed on hugetlb pages in a process that forked: its child may die of SIGBUS",
                Bytes(counts.pool_stuck)
            ),
        );
    }
    if counts.refused > 0 {
        let refused = Bytes(counts.refused);
        // The program can overwrite the ledger, and rustix panics on an errno out of range.
        let errno = i32::try_from(counts.refused_errno).ok();
        let errno = errno.filter(|errno| (1..4096).contains(errno));
        let text = match errno.map(Errno::from_raw_os_error) {
            // madvise never returns EPERM: the library records it for a filter.
            Some(Errno::PERM) => {
                format!(
                    "{refused} were not advised: a seccomp filter refuses that, or may end who asks"
                )
            }
            Some(error) => format!("madvise refused {refused}: {error}"),
            None => format!("madvise refused {refused}"),
        };
        add("advice", text);
    }
    let heap = outcome.heap().unwrap_or_default();
    // The figures of these and of the bound sum up to what is not huge.
    let missing = heap.bytes.0.saturating_sub(heap.huge.0);
    let rest = missing.saturating_sub(heap.narrow.0.saturating_add(counts.refused));
    if heap.narrow.0 > heap.bytes.0 / NOTABLE_PARTS && heap.narrow.0 >= orders.pmd as u64 {
        let what = match heap.narrow.0 >= rest {
            true => "mappings",
            false => SMALL_MAPPINGS,
        };
        let reason = format!("{} are in mappings without a whole huge page", heap.narrow);
        add(what, reason);
    }
    if let Some(count) = outcome.fallbacks.filter(|count| *count > 0) {
        add(
            "huge pages",
            format!(
                "{} on this host found no free one (fragmentation, or a cgroup's limit); \
                 hint: echo 1 > /proc/sys/vm/compact_memory",
                units::counted(count, "fault")
            ),
        );
    }
    let images = usize::try_from(counted.images).unwrap_or(usize::MAX);
    if let Some(more @ 1..) = images.checked_sub(MAX_SLOTS) {
        let more = units::counted(more as u64, "process");
        let reason = format!("{more} more than it has room for");
        add("the ledger", reason);
    }
    if let Some(errno) = outcome.trouble {
        add("the ledger", format!("nothing was counted: {errno}"));
    }
    let is_ruled_out = found.iter().any(|found| found.what == "huge pages");
    let is_bounded = orders.max_waste != MaxWaste::Unbounded && has_collapse();
    let wants_all = requested.heap != HeapMode::Off && requested.maps;
    if reached
        && wants_all
        && is_bounded
        && !is_ruled_out
        && rest > heap.bytes.0 / NOTABLE_PARTS
        && rest >= MIN_HEAP_PAGES * orders.pmd as u64
        && heap
            .huge_share()
            .is_some_and(|share| share < GOOD_HUGE_SHARE)
    {
        let costly = counts.costly.min(rest);
        let mut add = |what, bytes, why, hint| {
            if bytes > heap.bytes.0 / NOTABLE_PARTS {
                let reason = format!("{} {why}; {hint}", Bytes(bytes));
                found.push(Shortfall { what, reason });
            }
        };
        let why = "began on base pages, since the first touch of a huge page took longer, and were \
                   not collapsed yet";
        let hint = "hint: --first-touch=huge does not wait";
        add(FIRST_TOUCHES, costly, why, hint);
        let why = "were not filled densely, or not scanned yet, at the peak";
        let hint = "hint: --max-waste=unbounded puts memory on huge pages at its first touch";
        add(BOUND, rest - costly, why, hint);
    }
    let is_low = heap.bytes.0 >= MIN_HEAP_PAGES * orders.pmd as u64
        && (heap.huge_share()).is_some_and(|share| share < LOW_HUGE_SHARE);
    if found.is_empty() && reached && is_low {
        let off = [
            (requested.heap == HeapMode::Off).then_some("--heap=off"),
            (!requested.maps).then_some("--maps=off"),
        ];
        let off: Vec<_> = off.into_iter().flatten().collect();
        let reason = if !off.is_empty() {
            format!("{} leaves memory as it is", off.join(" "))
        } else if orders.max_waste != MaxWaste::Unbounded && !has_collapse() {
            let why = match sandbox::inherited() {
                Some(0) => "this kernel has no MADV_COLLAPSE (Linux 6.1)",
                _ => "a seccomp filter refuses MADV_COLLAPSE, or this kernel lacks it",
            };
            format!("memory that fills up is not collapsed: {why}")
        } else if outcome.controls.iter().all(Option::is_some) {
            String::from("nothing that was counted says why; hint: jumbo doctor")
        } else {
            String::from("the THP controls of the host cannot be read here (/sys)")
        };
        found.push(Shortfall {
            what: "huge pages",
            reason,
        });
    }
    found
}

/// Reason why the program's first process did not join the ledger.
pub(super) fn unreached(launch: &Launch<'_>) -> String {
    launch.program.reach.reason().unwrap_or_else(|| {
        // The library finds the ledger through /proc.
        if let Err(error) = std::fs::read_link("/proc/self/exe") {
            return format!(
                "the library's counters cannot be read without /proc (/proc/self/exe: {error})"
            );
        }
        String::from(
            "it joined no counters, and no process was seen with libjumbo_preload.so loaded",
        )
    })
}
