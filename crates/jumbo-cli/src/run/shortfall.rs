//! Where less was obtained than was asked for, and why: [`Shortfall`].

use jumbo::policy::{HeapMode, Memory, Orders, Tunable, variables::HUGETLB_TUNABLE};
use jumbo::units::{self, Bytes};
use jumbo_inside::ledger::{SLOTS, flag, pool_reason};
use rustix::io::Errno;
use serde::Serialize;

use super::launch::Launch;
use super::report::{Counted, Kinds};

/// Mappings left alone count when they come to this part of the heap.
const NOTABLE: u64 = 20;

/// A heap of so many huge pages with less than this share of them calls for a reason.
const MEASURABLE: u64 = 8;
const FEW: f64 = 0.5;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shortfall {
    pub(super) what: String,
    pub(super) reason: String,
}

/// What there is to go by.
pub(super) struct Evidence<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) asked: &'a Orders<'static>,
    /// The plan's, for the host as it was at the start and at the end.
    pub(super) memory: &'a [Vec<Memory>],
    pub(super) counted: &'a Counted,
    /// The host's settings could be read.
    pub(super) is_known: bool,
    /// A process was seen that may not have THPs.
    pub(super) thp_disabled: bool,
    pub(super) peak: Option<&'a Kinds>,
    /// The first process was heard of.
    pub(super) reached: bool,
    /// `thp_fault_fallback` over the run, of the whole host.
    pub(super) fallbacks: Option<u64>,
    /// Why there is no ledger.
    pub(super) trouble: Option<rustix::io::Errno>,
}

pub(super) fn find(evidence: &Evidence<'_>) -> Vec<Shortfall> {
    let mut found = Vec::new();
    let mut add = |what: &str, reason: String| {
        found.push(Shortfall {
            what: what.to_owned(),
            reason,
        });
    };
    let Evidence {
        launch,
        asked,
        memory,
        counted,
        is_known,
        thp_disabled,
        peak,
        reached,
        fallbacks,
        trouble,
    } = evidence;
    let total = &counted.total;
    let orders = &launch.plan.orders;

    if !reached {
        let reason = unreached(launch);
        add("the program", reason);
    }
    // What the host rules out holds for every kind alike: once is enough.
    let wants = asked.heap != HeapMode::Off || asked.maps;
    let ruled_out = launch.program.reach.is_reached() && wants;
    let nothing = |memory: &&Vec<Memory>| memory.iter().all(|memory| memory.sizes.is_empty());
    let reason = memory
        .iter()
        .find(nothing)
        .and_then(|memory| memory.first());
    if let Some(memory) = reason.filter(|_| ruled_out) {
        add("huge pages", memory.how.clone());
    } else if *thp_disabled || total.flags & flag::THP_DISABLED != 0 {
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
    if orders.heap != HeapMode::Off && total.flags & flag::FOREIGN_MALLOC != 0 {
        let whose = match total.malloc_diverted {
            true => "some processes bring their own malloc",
            false => "the program brings its own malloc",
        };
        add(
            "allocations",
            format!("{whose}: covered through its mappings only"),
        );
    }
    if total.flags & flag::NO_WINDOW != 0 {
        let reason = "the addresses for it are taken or out of bounds (ulimit -v)";
        add("large allocations", format!("no window: {reason}"));
    }
    if total.large_fallback > 0 {
        add(
            "large allocations",
            format!(
                "{} of {} went to the program's allocator: the window could not serve them",
                total.large_fallback, total.large_calls
            ),
        );
    }
    if let Some(why) = launch.why_not_later() {
        add("large frees", why.to_owned());
    }
    if let Some(why) = launch.plan.why_other_pages() {
        add("the pool", why);
    }
    if total.pool.bits & pool_reason::FULL != 0 {
        add(
            "the pool",
            format!(
                "used up: {} were asked for beyond it; hint: a larger --pool, or --overcommit",
                total.pool.beyond
            ),
        );
    }
    if total.pool.stuck > Bytes(0) {
        add(
            "the pool",
            format!(
                "{} stayed on hugetlb pages in a process that forked: its child may die of SIGBUS",
                total.pool.stuck
            ),
        );
    }
    if total.refused > Bytes(0) {
        let errno = i32::try_from(total.refused_errno).unwrap_or_default();
        let text = match Errno::from_raw_os_error(errno) {
            // The kernel's own answers are others.
            Errno::PERM => format!(
                "{} were not advised: a seccomp filter may end who asks",
                total.refused
            ),
            error => format!("madvise refused {}: {error}", total.refused),
        };
        add("advice", text);
    }
    let heap = peak.map(|peak| peak.heap().usage.bytes).unwrap_or_default();
    let left_each = total.maps_left.0 / u64::from(counted.images.max(1));
    if total.maps_left.0 > heap.0 / NOTABLE && left_each >= launch.plan.orders.pmd as u64 {
        add(
            "mappings",
            format!(
                "{} were left alone: no whole huge page fits",
                total.maps_left
            ),
        );
    }
    if let Some(count) = fallbacks.filter(|count| *count > 0) {
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
    if let Some(errno) = trouble {
        add("the ledger", format!("nothing was counted: {errno}"));
    }
    let few = |peak: &&Kinds| {
        let heap = peak.heap();
        heap.usage.bytes.0 >= MEASURABLE * orders.pmd as u64
            && heap.huge_share.is_some_and(|share| share < FEW)
    };
    if found.is_empty() && *reached && peak.as_ref().is_some_and(few) {
        let off = [
            (asked.heap == HeapMode::Off).then_some("--heap=off"),
            (!asked.maps).then_some("--maps=off"),
        ];
        let off: Vec<_> = off.into_iter().flatten().collect();
        let reason = if !off.is_empty() {
            format!("{} leaves memory as it is", off.join(" "))
        } else if *is_known {
            String::from("nothing that was counted says why; hint: jumbo doctor")
        } else {
            String::from("what the host allows cannot be read here (/sys)")
        };
        found.push(Shortfall {
            what: String::from("huge pages"),
            reason,
        });
    }
    found
}

/// Why nothing was heard of the program's first process.
pub(super) fn unreached(launch: &Launch<'_>) -> String {
    launch.program.reach.reason().unwrap_or_else(|| {
        String::from("the loader did not load libjumbo_preload.so, or the program undid LD_PRELOAD")
    })
}
