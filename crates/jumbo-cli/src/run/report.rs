//! What came of it: [`Report`], its shape in JSON, and where it is written.
//!
//! The shape is documented in docs/report.md.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::time::Duration;

use jumbo::kernel::process::Change;
use jumbo::kernel::thp::Thp;
use jumbo::policy::{FreeMode, HeapMode, Orders, PoolRequest, ReaperMode};
use jumbo::status::{Kind, KindUsage, Usage};
use jumbo::units::Bytes;
use jumbo_inside::ledger::{self, Ledger, flag, pool_reason};
use jumbo_inside::reaper::State;
use serde::{Serialize, Serializer};
use serde_json::json;

use super::args::{Place, Settings, Wanted};
use super::destination;
use super::held::Supervised;
use super::launch::Launch;
use super::sample::{Peak, Sampled};
use super::shortfall;
use super::supervise::End;
use super::text;
use crate::view::escaped;

const KINDS: [Kind; 6] = [
    Kind::Heap,
    Kind::Text,
    Kind::Data,
    Kind::Shared,
    Kind::Stack,
    Kind::File,
];

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) program: Vec<String>,
    pub(super) pid: u32,
    /// How the program was started: `parent`, since there is a report.
    pub(super) mode: &'static str,
    pub(super) exit: Exit,
    pub(super) wall_seconds: f64,
    pub(super) reach: Reached,
    pub(super) peak: Option<Kinds>,
    pub(super) processes: Vec<ProcessRow>,
    pub(super) sampled: Sampled,
    pub(super) max_rss: Bytes,
    pub(super) faults: Faults,
    pub(super) requested: Requested,
    pub(super) obtained: Obtained,
    pub(super) shortfalls: Vec<shortfall::Shortfall>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Exit {
    Code(i32),
    Signal(i32),
}

#[derive(Debug, Serialize)]
pub(super) struct Reached {
    pub(super) reached: bool,
    pub(super) reason: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Faults {
    pub(super) minor: u64,
    pub(super) major: u64,
}

/// A usage with all kinds, whether there is any of them or not.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Kinds(pub(super) BTreeMap<Kind, KindRow>);

#[derive(Debug, Serialize)]
pub(super) struct KindRow {
    #[serde(flatten)]
    pub(super) usage: KindUsage,
    pub(super) huge_share: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct ProcessRow {
    pub(super) pid: u32,
    pub(super) comm: String,
    #[serde(flatten)]
    pub(super) kinds: Kinds,
    /// What the preload library counted in it; `None` where it is not in it.
    pub(super) ledger: Option<Counts>,
}

/// What was asked: of jumbo, and by jumbo of the kernel.
#[derive(Debug, Serialize)]
pub(super) struct Requested {
    pub(super) heap: bool,
    /// mimalloc serves the heap.
    pub(super) mimalloc: bool,
    pub(super) pool: Option<PoolRequest>,
    pub(super) overcommit: Bytes,
    pub(super) warm: bool,
    pub(super) maps: bool,
    pub(super) max_waste: u32,
    pub(super) follow: bool,
    pub(super) free: FreeMode,
    pub(super) reaper: ReaperMode,
    pub(super) supervise: bool,
    /// What stands in GLIBC_TUNABLES because of us.
    pub(super) tunable: Option<&'static str>,
    /// Memory put under MADV_HUGEPAGE, over the whole run.
    pub(super) advised: Bytes,
    pub(super) large_calls: u64,
}

/// What came of that.
#[derive(Debug, Serialize)]
pub(super) struct Obtained {
    /// Of the heap at its peak.
    pub(super) huge: Bytes,
    pub(super) huge_share: Option<f64>,
    /// Programs that the preload library was loaded into: processes, and again after each exec.
    pub(super) images: u32,
    /// All of them together.
    pub(super) ledger: Counts,
    /// What became of the reaper, in each process that asked for one.
    pub(super) reapers: Vec<Reaped>,
    /// What `--supervise` came to; `None` without it.
    pub(super) supervised: Option<Supervised>,
}

/// A ledger slot, or several added up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) of: ledger::Counts,
    /// The most pool pages that all processes had at a time; `None` where each had a pool of its own.
    pub(super) run: Option<Bytes>,
}

/// What each bit of [`pool_reason`] means to a reader.
const POOL_REASONS: [(u32, &str); 14] = [
    (
        pool_reason::FULL,
        "the pool and its overcommit were used up",
    ),
    (
        pool_reason::LARGER,
        "a block larger than the pool and its overcommit",
    ),
    (
        pool_reason::NONE_FREE,
        "the kernel's hugetlb pool had no free page, or a control group's limit on reservations",
    ),
    (
        pool_reason::NO_SIZE,
        "this kernel has no hugetlb pages of that size",
    ),
    (
        pool_reason::HUGETLB_LIMIT,
        "a control group's hugetlb limit",
    ),
    (
        pool_reason::FORK,
        "no hugetlb pages in a program that forks",
    ),
    (
        pool_reason::THREADS,
        "no hugetlb pages in a program with threads, which might fork; hint: --pool SIZE,nofork",
    ),
    (
        pool_reason::NO_ROOM,
        "the memory cgroup or the host had no room for THPs",
    ),
    (
        pool_reason::FRAGMENTED,
        "no free huge page for a THP; hint: echo 1 > /proc/sys/vm/compact_memory",
    ),
    (
        pool_reason::UNMOVABLE,
        "no hugetlb pages that could not be moved before a fork: a memory cgroup's limit, or room that is \
         short or not known; hint: --pool SIZE,nofork",
    ),
    (
        pool_reason::CONFINED,
        "none behind a seccomp filter of the program's own, and no hugetlb pages behind a chroot",
    ),
    (
        pool_reason::STUCK_ROOM,
        "what hugetlb pages held could not be moved: no room",
    ),
    (
        pool_reason::STUCK_MAPPINGS,
        "what hugetlb pages held could not be moved: no mapping to be had (vm.max_map_count, ulimit)",
    ),
    (
        pool_reason::STUCK_THREADS,
        "what hugetlb pages held could not be moved: another thread was there",
    ),
];

impl Counts {
    /// Whether a fact ([`flag`]) was found at the start.
    pub(super) fn has(&self, flag: u32) -> bool {
        self.of.flags & flag != 0
    }

    /// Why there was not more of the pool, or not hugetlb.
    pub(super) fn pool_reasons(&self) -> Vec<&'static str> {
        let bits = self.of.pool_reasons;
        // Where the kernel's pool has nothing to give it is no matter who would have been refused.
        let refused = pool_reason::FORK | pool_reason::THREADS;
        let absent = pool_reason::NONE_FREE | pool_reason::NO_SIZE;
        let shown = match self.of.pool_hugetlb_peak == 0 && bits & absent != 0 {
            true => bits & !refused,
            false => bits,
        };
        let known = POOL_REASONS.iter().filter(|(bit, _)| shown & bit != 0);
        known.map(|(_, text)| *text).collect()
    }
}

impl Serialize for Counts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = &self.of;
        let mut counts = json!({
            "malloc_diverted": self.has(flag::MALLOC),
            "maps_covered": self.has(flag::MAPS),
            "large_peak": of.large_peak,
            "large_calls": of.large_calls,
            "large_fallback": of.large_fallback,
            "advised": of.advised,
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
            "pool": {
                "hugetlb": of.pool_hugetlb_peak,
                "thp": of.pool_thp_peak,
                "beyond": of.pool_beyond,
                "moved": of.pool_moved,
                "stuck": of.pool_stuck,
                "reasons": self.pool_reasons(),
            },
        });
        if let Some(run) = self.run {
            counts["pool"]["run"] = json!(run);
        }
        counts.serialize(serializer)
    }
}

/// What became of the reaper in one process.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Reaped {
    /// The program's process.
    pub(super) pid: u32,
    /// The sibling's process; 0 where none was started.
    pub(super) reaper_pid: u32,
    pub(super) state: &'static str,
    pub(super) reason: &'static str,
    /// What was given back by the time of this report: the reaper does not wait for it.
    pub(super) freed: Bytes,
}

impl From<Change> for Exit {
    fn from(change: Change) -> Self {
        match change {
            Change::Exited(code) => Self::Code(code),
            Change::Killed(signal) | Change::Stopped(signal) => Self::Signal(signal),
            Change::Trapped(_) | Change::Continued => Self::Signal(libc::SIGCONT),
        }
    }
}

impl From<&Usage> for Kinds {
    fn from(usage: &Usage) -> Self {
        let row = |kind| {
            let usage = usage.kind(kind);
            let huge_share = usage.huge_share();
            (kind, KindRow { usage, huge_share })
        };
        Self(KINDS.map(row).into())
    }
}

impl Reaped {
    /// `None` where no reaper was asked for.
    fn of(counts: &ledger::Counts) -> Option<Self> {
        let state = State::from_code(counts.reaper)?;
        (state != State::Off).then(|| Self {
            pid: counts.pid,
            reaper_pid: counts.reaper_pid,
            state: state.name(),
            reason: state.text(),
            freed: Bytes(counts.reaper_freed),
        })
    }
}

/// Everything that was counted, by process ID.
#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) images: u32,
    pub(super) total: Counts,
    /// Of the processes in which a reaper was asked for: see [`last_of_each`].
    pub(super) reapers: Vec<Reaped>,
    by_pid: BTreeMap<u32, Counts>,
}

impl Counted {
    pub(super) fn read(ledger: Option<&Ledger>) -> Self {
        let mut counted = Self {
            images: ledger.map_or(0, Ledger::claimed),
            ..Self::default()
        };
        let slots = ledger.into_iter().flat_map(Ledger::slots);
        for counts in slots.map(ledger::Counts::of) {
            counted.total.of = counted.total.of.and(counts);
            let theirs = counted.by_pid.entry(counts.pid).or_default();
            theirs.of = theirs.of.and(counts);
            counted.reapers.extend(Reaped::of(&counts));
        }
        counted.reapers = last_of_each(counted.reapers);
        let shared = ledger.filter(|ledger| ledger.pool.most() > 0);
        counted.total.run = shared.map(|ledger| Bytes(ledger.pool.peak()));
        counted
    }

    pub(super) fn of(&self, pid: u32) -> Option<Counts> {
        self.by_pid.get(&pid).copied()
    }
}

/// A process that was several programs, one after the other, has a reaper for each: the last one counts, and those
/// that had something to give back, or to say.
fn last_of_each(mut reapers: Vec<Reaped>) -> Vec<Reaped> {
    let mut seen = BTreeSet::new();
    reapers.reverse();
    let silent = [State::Waiting, State::Uncounted, State::Retired].map(State::name);
    reapers.retain(|reaper| {
        let says = reaper.freed > Bytes(0) || !silent.contains(&reaper.state);
        seen.insert(reaper.pid) || says
    });
    reapers.reverse();
    reapers
}

/// The processes at the peak, those with the most heap first.
fn rows(peak: Option<&Peak>, counted: &Counted) -> Vec<ProcessRow> {
    let processes = peak
        .map(|peak| peak.processes.as_slice())
        .unwrap_or_default();
    let mut rows: Vec<ProcessRow> = processes
        .iter()
        .map(|process| ProcessRow {
            pid: process.pid,
            comm: process.name.clone(),
            kinds: Kinds::from(&process.usage),
            ledger: counted.of(process.pid),
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.kinds.heap().usage.bytes));
    rows
}

impl Kinds {
    /// The heap, which is there even if it is empty.
    pub(super) fn heap(&self) -> &KindRow {
        &self.0[&Kind::Heap]
    }
}

impl Requested {
    fn new(settings: &Settings, orders: &Orders, counted: &Counted) -> Self {
        let asked = &settings.asked;
        let pool = settings.pool;
        Self {
            heap: asked.heap != HeapMode::Off,
            mimalloc: asked.heap == HeapMode::Mimalloc,
            pool: pool.map(|pool| orders.pool.map_or(pool, |order| pool.rounded(order))),
            overcommit: pool.map(|pool| pool.overcommit).unwrap_or_default(),
            warm: pool.is_some_and(|pool| pool.warm),
            maps: asked.maps,
            max_waste: asked.max_waste,
            follow: asked.follow,
            free: asked.free,
            reaper: asked.reaper,
            supervise: settings.supervise,
            tunable: orders.tunable.then_some("glibc.malloc.hugetlb=1"),
            advised: Bytes(counted.total.of.advised),
            large_calls: counted.total.of.large_calls,
        }
    }
}

/// All that there is to report from.
pub(super) struct Seen<'a> {
    pub(super) pid: u32,
    pub(super) end: End,
    pub(super) wall: Duration,
    pub(super) peak: Option<Peak>,
    pub(super) sampled: Sampled,
    pub(super) ledger: Option<&'a Ledger>,
    /// Why there is no ledger.
    pub(super) trouble: Option<rustix::io::Errno>,
    /// `thp_fault_fallback` over the run, of the whole host.
    pub(super) fallbacks: Option<u64>,
    /// At the start and at the end: what ruled huge pages out at either counts.
    pub(super) controls: [Option<Thp>; 2],
    pub(super) supervised: Option<Supervised>,
}

impl Report {
    pub(super) fn new(settings: &Settings, launch: &Launch<'_>, seen: Seen<'_>) -> Self {
        let counted = Counted::read(seen.ledger);
        let kinds = seen.peak.as_ref().map(|peak| Kinds::from(&peak.usage));
        // What the file shows is all there is to go by without a ledger.
        let reached = match seen.ledger {
            Some(_) => counted.of(seen.pid).is_some(),
            None => launch.program.reach.is_reached(),
        };
        let shortfalls =
            shortfall::find(settings, launch, &seen, &counted, kinds.as_ref(), reached);
        let heap = kinds.as_ref().map(Kinds::heap);
        let command = settings.command.iter();
        Self {
            program: command
                .map(|arg| arg.to_string_lossy().into_owned())
                .collect(),
            pid: seen.pid,
            mode: "parent",
            exit: seen.end.change.into(),
            wall_seconds: seen.wall.as_secs_f64(),
            reach: Reached {
                reached,
                reason: (!reached).then(|| shortfall::unreached(launch)),
            },
            processes: rows(seen.peak.as_ref(), &counted),
            sampled: seen.sampled,
            max_rss: Bytes(seen.end.faults.max_rss),
            faults: Faults {
                minor: seen.end.faults.minor,
                major: seen.end.faults.major,
            },
            requested: Requested::new(settings, &launch.plan.orders, &counted),
            obtained: Obtained {
                huge: heap.map(|heap| heap.usage.huge).unwrap_or_default(),
                huge_share: heap.and_then(|heap| heap.huge_share),
                images: counted.images,
                ledger: counted.total,
                reapers: counted.reapers,
                supervised: seen.supervised,
            },
            peak: kinds,
            shortfalls,
        }
    }

    /// How long the program ran.
    pub(super) fn wall(&self) -> Duration {
        Duration::from_secs_f64(self.wall_seconds)
    }

    /// Writes the report where it is wanted.
    pub(super) fn write(&self, wanted: &Wanted) -> io::Result<()> {
        let text = match wanted.json {
            true => format!("{}\n", escaped(serde_json::to_string_pretty(self)?)),
            false => text::render(self),
        };
        match &wanted.place {
            Place::File(file) => destination::write(file, text.as_bytes()),
            Place::Stderr => io::stderr().lock().write_all(text.as_bytes()),
            Place::Stdout => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(text.as_bytes())?;
                stdout.flush()
            }
        }
    }
}
