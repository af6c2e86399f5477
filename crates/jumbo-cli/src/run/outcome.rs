//! Findings of a run, for its report: [`Report`], [`RunOutcome`], [`Counted`]; and the texts of
//! reasons.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::kernel::process::{Change, ResourceUsage};
use jumbo_host::kernel::thp::Thp;
use jumbo_host::policy::PoolRequest;
use jumbo_host::status::{Kind, KindUsage, Usage};
use jumbo_inside::ledger::{Counts, Ledger, pool_reason};
use jumbo_inside::reaper::State;
use jumbo_sys::{has_collapse, has_populate};

use super::args::RunSettings;
use super::launch::Launch;
use super::sample::{Peak, SampleStats};
use super::shortfall::{self, Shortfall};
use crate::promote::Promoted;

/// Kinds of memory in a report, in its order.
pub(super) const KINDS: [Kind; 6] = [
    Kind::Heap,
    Kind::Text,
    Kind::Data,
    Kind::Shared,
    Kind::Stack,
    Kind::File,
];

pub(super) struct Report<'a> {
    pub(super) settings: &'a RunSettings,
    pub(super) launch: &'a Launch<'a>,
    pub(super) outcome: RunOutcome<'a>,
    pub(super) counted: Counted,
    /// The program's first process joined the ledger.
    pub(super) reached: bool,
    pub(super) shortfalls: Vec<Shortfall>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramEnd {
    pub(super) change: Change,
    pub(super) faults: ResourceUsage,
}

/// Observations of a run.
pub(super) struct RunOutcome<'a> {
    pub(super) pid: u32,
    pub(super) end: ProgramEnd,
    pub(super) wall: Duration,
    pub(super) peak: Option<Peak>,
    pub(super) sampled: SampleStats,
    pub(super) ledger: Option<&'a Ledger>,
    /// Error that prevented the ledger.
    pub(super) trouble: Option<rustix::io::Errno>,
    /// Increase of the host's `thp_fault_fallback` during the run.
    pub(super) fallbacks: Option<u64>,
    /// THP controls at the start and at the end; either may rule out huge pages.
    pub(super) controls: [Option<Thp>; 2],
    /// The promotion from outside, or the reason why there was none; `None` if it is not the
    /// method for the program (`Reach::is_outside`).
    pub(super) outside: Option<Result<Promoted, String>>,
}

/// Counters of the ledger: totals, and by process ID.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// Loads of the preload library: one for each process, and one after each exec.
    pub(super) images: u32,
    pub(super) total: Counts,
    /// Peak of the pool pages of all processes; `None` without a shared pool.
    pub(super) run_pool_peak: Option<Bytes>,
    /// Processes in which a reaper was requested: see [`last_of_each`].
    pub(super) reapers: Vec<(State, Counts)>,
    pub(super) by_pid: BTreeMap<u32, Counts>,
}

/// Maps a reason bit to its text.
pub(super) type Meaning = fn(u32) -> Option<&'static str>;

/// Makes a [`Meaning`] from the constants of a module.
macro_rules! meanings {
    ($of:ident; $($bit:ident $(if $is:expr)? => $text:literal;)*) => {
        |bit| match bit {
            $($of::$bit $(if $is)? => Some($text),)*
            _ => None,
        }
    };
}
pub(super) use meanings;

/// Texts of the set bits, in the order of the bits.
pub(super) fn reasons(bits: u32, meaning: Meaning) -> impl Iterator<Item = &'static str> {
    let all = (0..u32::BITS).map(|n| 1 << n);
    all.filter(move |bit| bits & bit != 0).filter_map(meaning)
}

const POOL_REASONS: Meaning = meanings! { pool_reason;
    FULL => "the pool and its overcommit were used up";
    LARGER => "a block larger than the pool and its overcommit";
    NONE_FREE =>
        "the kernel's hugetlb pool had no free page, or a control group's limit on reservations";
    NO_SIZE if !has_populate() =>
        "no hugetlb pages: this kernel has no MADV_POPULATE_WRITE (Linux 5.14)";
    NO_SIZE => "this kernel has no hugetlb pages of that size";
    HUGETLB_LIMIT => "a control group's hugetlb limit";
    FORK => "no hugetlb pages in a program that forks";
    THREADS =>
        "no hugetlb pages in a program with threads, which might fork; hint: --pool SIZE,nofork";
    NO_ROOM => "the memory cgroup or the host had no room for THPs";
    FRAGMENTED if !has_collapse() => "no THPs: this kernel has no MADV_COLLAPSE (Linux 6.1)";
    FRAGMENTED => "no free huge page for a THP; hint: echo 1 > /proc/sys/vm/compact_memory";
    UNMOVABLE =>
        "no hugetlb pages that could not be moved before a fork: a memory cgroup's limit, or \
         room that is short or not known; hint: --pool SIZE,nofork";
    CONFINED =>
        "none behind a seccomp filter of the program's own, and no hugetlb pages behind a chroot";
    STUCK_ROOM => "what hugetlb pages held could not be moved: no room";
    STUCK_MAPPINGS =>
        "what hugetlb pages held could not be moved: no mapping to be had (vm.max_map_count, \
         ulimit)";
    STUCK_THREADS => "what hugetlb pages held could not be moved: another thread was there";
};

/// Reports whether a fact ([`flag`]) was found at the start.
pub(super) fn has(counts: &Counts, flag: u32) -> bool {
    counts.flags & flag != 0
}

/// Reasons why the pool had no more pages, or no hugetlb pages.
pub(super) fn pool_reasons(counts: &Counts) -> Vec<&'static str> {
    let bits = counts.pool_reasons;
    // If the kernel's pool has no pages, a refusal of the program does not matter.
    let refused = pool_reason::FORK | pool_reason::THREADS;
    let absent = pool_reason::NONE_FREE | pool_reason::NO_SIZE;
    let shown = match counts.pool_hugetlb_peak == 0 && bits & absent != 0 {
        true => bits & !refused,
        false => bits,
    };
    // The size comes first.
    let of_size = pool_reason::FULL | pool_reason::LARGER;
    let of_size = [shown & of_size, shown & !of_size];
    of_size
        .into_iter()
        .flat_map(|bits| reasons(bits, POOL_REASONS))
        .collect()
}

impl Counted {
    fn read(ledger: Option<&Ledger>) -> Self {
        let mut counted = Self {
            images: ledger.map_or(0, Ledger::claimed),
            ..Self::default()
        };
        let slots = ledger.into_iter().flat_map(Ledger::slots);
        for counts in slots.map(Counts::of) {
            counted.total = counted.total.and(counts);
            let theirs = counted.by_pid.entry(counts.pid).or_default();
            *theirs = theirs.and(counts);
            let state = State::from_code(counts.reaper).filter(|state| *state != State::Off);
            counted.reapers.extend(state.map(|state| (state, counts)));
        }
        last_of_each(&mut counted.reapers);
        let shared = ledger.filter(|ledger| ledger.pool.limit() > 0);
        counted.run_pool_peak = shared.map(|ledger| Bytes(ledger.pool.peak()));
        counted
    }
}

/// Drops the uninteresting reapers of processes that exec'd several times: each exec has a reaper.
/// Kept are the last of each process, and those that freed memory or have a reason to report.
fn last_of_each(reapers: &mut Vec<(State, Counts)>) {
    let mut seen = BTreeSet::new();
    reapers.reverse();
    let silent = [State::Waiting, State::Uncounted, State::Retired];
    reapers.retain(|(state, counts)| {
        let says = counts.reaper_freed > 0 || !silent.contains(state);
        seen.insert(counts.pid) || says
    });
    reapers.reverse();
}

impl RunOutcome<'_> {
    /// The heap at its peak; `None` without a sample.
    pub(super) fn heap(&self) -> Option<KindUsage> {
        let peak = self.peak.as_ref()?;
        Some(peak.usage.kind(Kind::Heap))
    }
}

impl<'a> Report<'a> {
    pub(super) fn new(
        settings: &'a RunSettings,
        launch: &'a Launch<'_>,
        mut outcome: RunOutcome<'a>,
    ) -> Self {
        let counted = Counted::read(outcome.ledger);
        if let Some(peak) = &mut outcome.peak {
            let heap = |usage: &Usage| usage.kind(Kind::Heap).bytes;
            (peak.processes).sort_by_key(|process| Reverse(heap(&process.usage)));
        }
        // Without a ledger only the executable tells.
        let reached = match outcome.ledger {
            Some(_) => counted.by_pid.contains_key(&outcome.pid),
            None => launch.program.reach.is_reached(),
        };
        Self {
            shortfalls: shortfall::find(settings, launch, &outcome, &counted, reached),
            settings,
            launch,
            outcome,
            counted,
            reached,
        }
    }

    /// The requested pool, rounded to whole pages.
    pub(super) fn pool(&self) -> Option<PoolRequest> {
        let (pool, order) = (self.settings.pool?, self.launch.plan.orders.pool);
        Some(order.map_or(pool, |order| pool.rounded(order)))
    }
}

/// Exit code of the program, or the signal that ended it.
pub(super) fn status(end: Change) -> Result<i32, i32> {
    match end {
        Change::Exited(code) => Ok(code),
        Change::Killed(signal) | Change::Stopped(signal) => Err(signal),
        Change::Continued => Err(libc::SIGCONT),
    }
}
