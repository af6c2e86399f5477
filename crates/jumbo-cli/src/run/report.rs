//! The [`Report`], its JSON format (docs/report.md), and its output.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::kernel::process::Change;
use jumbo_host::kernel::thp::Thp;
use jumbo_host::policy::{HeapMode, MaxWaste, PoolRequest};
use jumbo_host::status::{Kind, KindUsage, Usage};
use jumbo_inside::ledger::{Counts, Ledger, flag, pool_reason};
use jumbo_inside::reaper::State;
use jumbo_inside::sys::{has_collapse, has_populate};
use serde_json::{Value, json};

use super::args::{Destination, ReportRequest, RunSettings};
use super::destination;
use super::launch::Launch;
use super::options::ReportFormat;
use super::sample::{Peak, SampleStats};
use super::segments;
use super::shmem;
use super::shortfall::{self, Shortfall};
use super::supervise::ProgramEnd;
use super::text;
use crate::promote::Promoted;
use crate::view::escaped;

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
    by_pid: BTreeMap<u32, Counts>,
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

fn counts_json(of: &Counts, run_pool_peak: Option<Bytes>) -> Value {
    let mut pool = json!({
        "hugetlb": of.pool_hugetlb_peak,
        "thp": of.pool_thp_peak,
        "beyond": of.pool_beyond,
        "moved": of.pool_moved,
        "stuck": of.pool_stuck,
    });
    if let Some(run) = run_pool_peak {
        pool["run"] = json!(run);
    }
    pool["reasons"] = json!(pool_reasons(of));
    json!({
        "malloc_diverted": has(of, flag::MALLOC),
        "mimalloc_serves": has(of, flag::MIMALLOC),
        "maps_covered": has(of, flag::MAPS),
        "large_peak": of.large_peak,
        "large_calls": of.large_calls,
        "large_fallback": of.large_fallback,
        "advised": of.advised,
        "untouched": of.untouched,
        "refused": of.refused,
        "maps_advised": of.maps_advised,
        "maps_left": of.maps_left,
        "arenas_advised": of.arenas_advised,
        "collapsed": of.collapsed,
        "free": {
            "gathered": of.free_gathered,
            "inline": of.free_inline,
            "background": of.free_background,
            "workers": of.free_workers,
            "waits": of.free_waits,
        },
        "pool": pool,
    })
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

    /// The tunable that jumbo put into GLIBC_TUNABLES.
    pub(super) fn tunable(&self) -> Option<&'static str> {
        let is_set = self.launch.plan.orders.tunable;
        is_set.then_some("glibc.malloc.hugetlb=1")
    }

    fn json(&self) -> Value {
        let (settings, outcome, counted) = (self.settings, &self.outcome, &self.counted);
        let (requested, total, pool) = (&settings.requested, &counted.total, self.pool());
        let command = settings.command.iter().map(|arg| arg.to_string_lossy());
        let heap = outcome.heap();
        let processes = outcome.peak.iter().flat_map(|peak| &peak.processes);
        let process = |process: &super::sample::ProcessSample| {
            let mut row = json!({"pid": process.pid, "comm": process.name});
            add_kinds(&mut row, &process.usage);
            row["ledger"] =
                json!((counted.by_pid.get(&process.pid)).map(|counts| counts_json(counts, None)));
            row
        };
        let reapers = counted.reapers.iter().map(|(state, counts)| {
            json!({
                "pid": counts.pid,
                "reaper_pid": counts.reaper_pid,
                "state": state.name(),
                "reason": state.text(),
                "freed": counts.reaper_freed,
            })
        });
        json!({
            "program": command.collect::<Vec<_>>(),
            "pid": outcome.pid,
            "summary": text::headline(self),
            "mode": "parent",
            "exit": match status(outcome.end.change) {
                Ok(code) => json!({"code": code}),
                Err(signal) => json!({"signal": signal}),
            },
            "wall_seconds": outcome.wall.as_secs_f64(),
            "reach": {
                "reached": self.reached,
                "reason": (!self.reached).then(|| shortfall::unreached(self.launch)),
            },
            "outside": match &outcome.outside {
                Some(Err(reason)) => json!({"reason": reason}),
                promoted => json!(promoted.as_ref().and_then(|promoted| promoted.as_ref().ok())),
            },
            "peak": outcome.peak.as_ref().map(|peak| {
                let mut kinds = json!({});
                add_kinds(&mut kinds, &peak.usage);
                kinds
            }),
            "processes": processes.map(process).collect::<Vec<_>>(),
            "sampled": outcome.sampled,
            "max_rss": outcome.end.faults.max_rss,
            "faults": {"minor": outcome.end.faults.minor, "major": outcome.end.faults.major},
            // Requests to jumbo, and of jumbo to the kernel.
            "requested": {
                "heap": requested.heap != HeapMode::Off,
                "mimalloc": matches!(requested.heap, HeapMode::On | HeapMode::Mimalloc),
                "pool": pool,
                "overcommit": pool.map_or(Bytes(0), |pool| pool.overcommit),
                "warm": pool.is_some_and(|pool| pool.warm),
                "maps": requested.maps,
                "max_waste": match requested.max_waste {
                    MaxWaste::Percent(percent) => json!(percent),
                    MaxWaste::Unbounded => json!("unbounded"),
                },
                "keep": requested.keep.map(|keep| keep.to_string()),
                "text": requested.text,
                "data": requested.data,
                "shm": requested.shm,
                "follow": requested.follow,
                "free": requested.free,
                "reaper": requested.reaper,
                "tunable": self.tunable(),
                "advised": total.advised,
                "large_calls": total.large_calls,
            },
            "obtained": {
                "huge": heap.as_ref().map(|heap| heap.huge),
                "huge_share": heap.as_ref().and_then(KindUsage::huge_share),
                "images": counted.images,
                "ledger": counts_json(total, counted.run_pool_peak),
                "text": segments::json(self),
                "shmem": shmem::json(self),
                "reapers": reapers.collect::<Vec<_>>(),
            },
            "shortfalls": self.shortfalls,
        })
    }

    pub(super) fn write(&self, request: &ReportRequest) -> io::Result<()> {
        let text = match request.format {
            ReportFormat::Json => format!("{}\n", escaped(format!("{:#}", self.json()))),
            format => text::render(self, format == ReportFormat::Full),
        };
        match &request.destination {
            Destination::File(file) => destination::write(file, text.as_bytes()),
            Destination::Stderr => io::stderr().lock().write_all(text.as_bytes()),
            Destination::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes())?;
                stdout.flush()
            }
        }
    }
}

/// Adds a field for each kind of memory.
fn add_kinds(row: &mut Value, usage: &Usage) {
    for kind in KINDS {
        let usage = usage.kind(kind);
        row[kind.name()] = json!(usage);
        row[kind.name()]["huge_share"] = json!(usage.huge_share());
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
