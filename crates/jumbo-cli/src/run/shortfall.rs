//! Where less was obtained than was asked for, and why: [`Shortfall`].

use jumbo::units::{self, Bytes};
use jumbo_host::kernel::thp::Thp;
use jumbo_host::policy::{HeapMode, MaxWaste, MemoryPlan, Tunable, variables::HUGETLB_TUNABLE};
use jumbo_inside::ledger::{SLOTS, flag, pool_reason};
use jumbo_inside::sys::has_collapse;
use rustix::io::Errno;
use serde::Serialize;

use super::args::Settings;
use super::launch::Launch;
use super::report::{Counted, Seen};

/// Mappings left alone count when they come to this part of the heap.
const NOTABLE: u64 = 20;

/// A heap of so many huge pages with less than this share of them calls for a reason.
const MEASURABLE: u64 = 8;
const FEW: f64 = 0.5;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shortfall {
    pub(super) what: &'static str,
    pub(super) reason: String,
}

/// `reached`: the first process was heard of.
pub(super) fn find(
    settings: &Settings,
    launch: &Launch<'_>,
    seen: &Seen<'_>,
    counted: &Counted,
    reached: bool,
) -> Vec<Shortfall> {
    let mut found = Vec::new();
    let mut add = |what: &'static str, reason: String| found.push(Shortfall { what, reason });
    let (asked, orders) = (&settings.asked, &launch.plan.orders);
    let (total, counts) = (&counted.total, &counted.total.of);

    if !reached {
        let reason = unreached(launch);
        add("the program", reason);
    }
    // What the host rules out, at the start or at the end, holds for every kind of private memory
    // alike: once is enough. Shared memory has controls of its own.
    let wants = asked.heap != HeapMode::Off || asked.maps;
    let ruled_out = launch.program.reach.is_reached() && wants;
    let disabled = jumbo_inside::heap::thp_disabled();
    let nothing = |thp: &Option<Thp>| {
        let memory = (launch.plan).memory(&launch.program.reach, thp.as_ref(), disabled);
        let mut all = memory
            .into_iter()
            .filter(|memory| memory.what != MemoryPlan::SHARED);
        let first = all.next()?;
        (first.sizes.is_empty() && all.all(|memory| memory.sizes.is_empty())).then_some(first.how)
    };
    if let Some(how) = seen.controls.iter().find_map(nothing).filter(|_| ruled_out) {
        add("huge pages", how);
    } else if seen.sampled.thp_disabled || total.has(flag::THP_DISABLED) {
        let reason = "a process has THP switched off for itself (PR_SET_THP_DISABLE)";
        add("huge pages", String::from(reason));
    }
    match &launch.plan.tunable {
        Tunable::Kept(value) if value == "0" => add(
            "small allocations",
            format!("your GLIBC_TUNABLES says {HUGETLB_TUNABLE}=0"),
        ),
        _ => {}
    }
    let asks_mimalloc = matches!(orders.heap, HeapMode::On | HeapMode::Mimalloc);
    if asks_mimalloc && total.has(flag::MALLOC) && !total.has(flag::MIMALLOC) {
        let reason = "glibc serves all of them: MALLOC_ variables, glibc.malloc tunables or a limit (ulimit -v, -d) are set, \
                      or there is no pool";
        add("small allocations", reason.to_owned());
    }
    if orders.heap != HeapMode::Off && total.has(flag::FOREIGN_MALLOC) {
        let whose = match total.has(flag::MALLOC) {
            true => "some processes bring their own malloc",
            false => "the program brings its own malloc",
        };
        add(
            "allocations",
            format!("{whose}: covered through its mappings only"),
        );
    }
    if total.has(flag::NO_WINDOW) {
        let reason = "the addresses for it are taken or out of bounds (ulimit -v)";
        add("large allocations", format!("no window: {reason}"));
    }
    if counts.large_fallback > 0 {
        add(
            "large allocations",
            format!(
                "{} of {} went to the program's allocator: the window could not serve them",
                counts.large_fallback, counts.large_calls
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
        // The program can write there: an Errno of another number is a panic.
        let errno = i32::try_from(counts.refused_errno).ok();
        let errno = errno.filter(|errno| (1..4096).contains(errno));
        let text = match errno.map(Errno::from_raw_os_error) {
            // The kernel's own answers are others.
            Some(Errno::PERM) => {
                format!("{refused} were not advised: a seccomp filter may end who asks")
            }
            Some(error) => format!("madvise refused {refused}: {error}"),
            None => format!("madvise refused {refused}"),
        };
        add("advice", text);
    }
    let heap = seen.heap().unwrap_or_default();
    let left_each = counts.maps_left / u64::from(counted.images.max(1));
    if counts.maps_left > heap.bytes.0 / NOTABLE && left_each >= launch.plan.orders.pmd as u64 {
        add(
            "mappings",
            format!(
                "{} were left alone: no whole huge page fits",
                Bytes(counts.maps_left)
            ),
        );
    }
    if let Some(count) = seen.fallbacks.filter(|count| *count > 0) {
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
    if let Some(more @ 1..) = images.checked_sub(SLOTS) {
        let more = units::counted(more as u64, "process");
        let reason = format!("{more} more than it has room for");
        add("the ledger", reason);
    }
    if let Some(errno) = seen.trouble {
        add("the ledger", format!("nothing was counted: {errno}"));
    }
    let few = heap.bytes.0 >= MEASURABLE * orders.pmd as u64
        && heap.huge_share().is_some_and(|share| share < FEW);
    if found.is_empty() && reached && few {
        let off = [
            (asked.heap == HeapMode::Off).then_some("--heap=off"),
            (!asked.maps).then_some("--maps=off"),
        ];
        let off: Vec<_> = off.into_iter().flatten().collect();
        let reason = if !off.is_empty() {
            format!("{} leaves memory as it is", off.join(" "))
        } else if orders.max_waste != MaxWaste::Unbounded && !has_collapse() {
            String::from(
                "memory that fills up is not collapsed: this kernel has no MADV_COLLAPSE (Linux 6.1)",
            )
        } else if seen.controls.iter().all(Option::is_some) {
            String::from("nothing that was counted says why; hint: jumbo doctor")
        } else {
            String::from("what the host allows cannot be read here (/sys)")
        };
        found.push(Shortfall {
            what: "huge pages",
            reason,
        });
    }
    found
}

/// Why nothing was heard of the program's first process.
pub(super) fn unreached(launch: &Launch<'_>) -> String {
    launch.program.reach.reason().unwrap_or_else(|| {
        // The library finds the ledger through /proc.
        if let Err(error) = std::fs::read_link("/proc/self/exe") {
            return format!(
                "what the library did is not known without /proc (/proc/self/exe: {error})"
            );
        }
        String::from("the loader did not load libjumbo_preload.so, or the program undid LD_PRELOAD")
    })
}
