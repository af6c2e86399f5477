//! The report as text.

use std::borrow::Cow;
use std::path::Path;
use std::time::Duration;

use jumbo::units::{self, Bytes};
use jumbo_host::policy::{DataMode, HeapMode, MaxWaste, ShmMode, TextMode};
use jumbo_host::status::{Kind, KindUsage};
use jumbo_inside::reaper::State;
use jumbo_inside::sandbox;

use super::outcome::{KINDS, Report, pool_reasons, status};
use super::sample::{Peak, SampleStats};
use super::segments;
use super::shmem;
use super::shortfall;
use crate::promote::Promoted;
use crate::view::{self, View, WIDTH};

const MAX_REAPER_LINES: usize = 5;

/// Minimum memory for huge pages to matter: eight of 2 MiB.
const MIN_MEMORY: Bytes = Bytes(16 << 20);

const TOO_LITTLE: &str = "has too little memory to gain from huge pages";

/// Minimum share of the peak memory that samples must have seen for a statement about all of it.
const MIN_SAMPLED_SHARE: f64 = 0.5;

/// Shortfalls that explain a heap on base pages, the most likely reason first.
const HEAP_SHORTFALLS: [&str; 10] = [
    "huge pages",
    "mappings",
    "advice",
    "large allocations",
    "the pool",
    "allocations",
    "small allocations",
    shortfall::FIRST_TOUCHES,
    shortfall::BOUND,
    shortfall::SMALL_MAPPINGS,
];

/// Renders the report; `full` adds all details to the three lines.
pub(super) fn render(report: &Report<'_>, full: bool) -> String {
    let mut view = View::default();
    summary(&mut view, report, full);
    if full {
        write(&mut view, report);
    }
    view.text(Some(WIDTH), false)
}

/// A label, and text wrapped in the column after it.
pub(super) fn fact(view: &mut View, label: &str, text: &str) {
    view.item(&format!("  {label:<15}"), text);
}

/// Summary in one sentence, for the JSON report.
pub(super) fn headline(report: &Report<'_>) -> String {
    let name = name(report);
    if let Some(why) = unreached(report) {
        return why;
    }
    let peak = match known(report) {
        Ok(peak) => peak,
        Err(why) => return format!("{name}: the share on huge pages is unknown: {why}"),
    };
    let total = peak.usage.total();
    match ruled_out(report) {
        Some(why) if total.huge == Bytes(0) => {
            format!(
                "none of the {} of {name} is on huge pages: {why}",
                total.bytes
            )
        }
        _ if total.bytes < MIN_MEMORY => format!("{name} {TOO_LITTLE}: {}", total.bytes),
        _ => huge_share(&name, &total),
    }
}

fn huge_share(name: &str, total: &KindUsage) -> String {
    format!(
        "{:.0} % of the {} of {name} on huge pages",
        (100.0 * total.huge_share().unwrap_or_default()).floor(),
        total.bytes
    )
}

/// Reason why no process of the program loaded the library; `None` if one did, or if its memory was
/// promoted from outside.
fn unreached(report: &Report<'_>) -> Option<String> {
    let is_loaded = report.outcome.sampled.is_loaded;
    let is_reached = report.reached || report.counted.images > 0 || is_loaded;
    if is_reached || promoted(report).is_some() {
        return None;
    }
    let outside = match &report.outcome.outside {
        Some(Err(why)) => format!("; from outside: {why}"),
        _ => String::new(),
    };
    let why = shortfall::unreached(report.launch);
    Some(format!("could not help {}: {why}{outside}", name(report)))
}

fn promoted<'a>(report: &'a Report<'_>) -> Option<&'a Promoted> {
    report.outcome.outside.as_ref()?.as_ref().ok()
}

/// Method of the promotion from outside, and the reason for it.
fn from_outside(report: &Report<'_>) -> Option<String> {
    let promoted = promoted(report)?;
    let method = promoted.method.as_deref().unwrap_or_default();
    let why = shortfall::unreached(report.launch);
    Some(format!("from outside, by {method}: {why}"))
}

/// The memory at its peak, or the reason why samples saw too little of it.
fn known<'a>(report: &'a Report<'_>) -> Result<&'a Peak, String> {
    let sampled = &report.outcome.sampled;
    let Some(peak) = &report.outcome.peak else {
        return Err(trouble(sampled).to_owned());
    };
    let largest = Bytes(report.outcome.end.faults.max_rss);
    let seen_share = sampled.share_of_max_rss.unwrap_or(1.0);
    match seen_share < MIN_SAMPLED_SHARE && largest >= MIN_MEMORY {
        true => Err(format!(
            "it ended before more than {:.0} % of its {largest} was seen",
            seen_share * 100.0
        )),
        false => Ok(peak),
    }
}

fn trouble(sampled: &SampleStats) -> &str {
    sampled.trouble.as_deref().unwrap_or("nothing was resident")
}

/// Reason why the host or a process has no huge page at all.
fn ruled_out<'a>(report: &'a Report<'_>) -> Option<&'a str> {
    let mut found = report.shortfalls.iter();
    let found = found.find(|shortfall| shortfall.what == "huge pages");
    found.map(|shortfall| shortfall.reason.as_str())
}

fn name<'a>(report: &'a Report<'_>) -> Cow<'a, str> {
    let program = report.settings.command.first().map(Path::new);
    let name = program.and_then(|program| program.file_name());
    name.map(|name| name.to_string_lossy()).unwrap_or_default()
}

/// The details below the three lines.
fn write(view: &mut View, report: &Report<'_>) {
    let Report {
        outcome, counted, ..
    } = report;
    if let Some(peak) = &outcome.peak {
        table(view, report, peak);
    }
    view.line("");
    let ledger = &counted.total;
    let faults = &outcome.end.faults;
    let faults = format!("{} minor and {} major", faults.minor, faults.major);
    fact(view, "page faults", &faults);
    let requested = format!(
        "{} advised in {} ({} of it mappings); {}",
        Bytes(ledger.advised),
        units::counted(counted.by_pid.len() as u64, "process"),
        Bytes(ledger.maps_advised),
        units::counted(ledger.large_calls, "large allocation"),
    );
    fact(view, "requested", &requested);
    let obtained = match outcome.heap() {
        None => format!("unknown: {}", trouble(&outcome.sampled)),
        Some(heap) => match heap.huge_share() {
            Some(_) => format!("{} of the heap, {}", heap.huge, share(&heap)),
            None => String::from("nothing of the heap was resident"),
        },
    };
    fact(view, "huge pages", &obtained);
    if let Some(promoted) = promoted(report) {
        let (all, cost) = (promoted.obtained, promoted.cost);
        let how = from_outside(report).unwrap_or_default();
        fact(
            view,
            "promoted",
            &format!("{all}, {cost} of it filled up, {how}"),
        );
        if let Some(why) = &promoted.reason {
            fact(view, "", why);
        }
    }
    if let MaxWaste::Percent(percent) = report.settings.requested.max_waste {
        let untouched = Bytes(ledger.untouched);
        let untouched = format!(
            "{untouched} at most by jumbo, huge and untouched (--max-waste={percent}); memory that the program \
             or its allocator advises itself is not counted"
        );
        fact(view, "wasted", &untouched);
    }
    if ledger.costly > 0 {
        let millis =
            |nanos: u64| format!("{:.1} ms", Duration::from_nanos(nanos).as_secs_f64() * 1e3);
        let huge = millis(ledger.touch_huge_ns);
        let base = match ledger.touch_base_ns {
            0 => String::new(),
            base => format!(", base pages in its place {}", millis(base)),
        };
        let begun = Bytes(ledger.costly);
        let costly = format!(
            "{begun} began on base pages: the first touch of a huge page took {huge}{base} \
             (see docs/limits.md)"
        );
        fact(view, "first touch", &costly);
    }
    if let Some(gain) = gain(report) {
        let gain = format!("{gain}; jumbo compare tells more");
        fact(view, "does it pay", &gain);
    }
    segments::write(view, report);
    shmem::write(view, report);
    pool(view, report);
    if ledger.free_gathered > 0 {
        let freed = format!(
            "{} by up to {} at once{}",
            Bytes(ledger.free_gathered),
            units::counted(ledger.free_workers, "thread"),
            also(ledger.free_background, ", ", "of it in the background")
        );
        fact(view, "freed", &freed);
    }
    if ledger.populated > 0 {
        let populated = format!(
            "{} by up to {} at once",
            Bytes(ledger.populated),
            units::counted(ledger.populate_workers, "thread"),
        );
        fact(view, "populated", &populated);
    }
    // The other states tell a user nothing.
    let silent = [State::Waiting, State::Uncounted];
    let reapers = counted.reapers.iter();
    let shown = reapers.filter(|(state, _)| !silent.contains(state));
    for (state, counts) in shown.take(MAX_REAPER_LINES) {
        fact(view, "reaper", &format!("{}: {}", counts.pid, state.text()));
    }
    let labels = std::iter::once("why not more").chain(std::iter::repeat(""));
    for (label, shortfall) in labels.zip(&report.shortfalls) {
        fact(
            view,
            label,
            &format!("{}: {}", shortfall.what, shortfall.reason),
        );
    }
    let started = "as a child of jumbo; --quiet starts it in place";
    fact(view, "how it ran", started);
}

/// The three lines of every report: exit status, share on huge pages, and the reason for it.
fn summary(view: &mut View, report: &Report<'_>, full: bool) {
    let outcome = &report.outcome;
    let (name, faults) = (name(report), &outcome.end.faults);
    let ended = format!(
        "{name} {} after {} ({} user, {} system)",
        match status(outcome.end.change) {
            Ok(code) => format!("exited with {code}"),
            Err(signal) => format!("was ended by signal {signal}"),
        },
        duration(outcome.wall),
        duration(faults.user),
        duration(faults.system),
    );
    view.item("jumbo: ", &ended);
    let share = match known(report) {
        Ok(peak) => huge_share(&name, &peak.usage.total()),
        Err(_) => format!("the share of {name} on huge pages is unknown"),
    };
    let more = if full {
        ""
    } else {
        "; --report=full says more"
    };
    view.prose(&format!("  {share}{more}"));
    view.prose(&format!("  {}", reason(report)));
}

/// Reason for the largest part on base pages, or the gain if most memory is huge.
fn reason(report: &Report<'_>) -> String {
    let peak = match known(report) {
        Ok(peak) => peak,
        Err(why) => return unreached(report).unwrap_or(why),
    };
    let total = peak.usage.total();
    let on_base = |kind: &Kind| {
        let usage = peak.usage.kind(*kind);
        Bytes(usage.bytes.0.saturating_sub(usage.huge.0))
    };
    let largest = KINDS.into_iter().max_by_key(on_base);
    if let Some(why) = unreached(report) {
        return why;
    }
    if let (Some(why), Bytes(0)) = (ruled_out(report), total.huge) {
        return format!("why not more: {why}");
    }
    if total.bytes < MIN_MEMORY {
        return format!("{name} {TOO_LITTLE}", name = name(report));
    }
    if let Some(how) = from_outside(report) {
        return how;
    }
    let is_good = (total.huge_share()).is_some_and(|share| share >= shortfall::GOOD_HUGE_SHARE);
    let why = largest.filter(|_| !is_good).and_then(|kind| {
        let why = why(report, kind)?;
        Some(match kind {
            Kind::Heap => format!("why not more: {why}"),
            _ => format!("why not more: {} of {}: {why}", on_base(&kind), kind.name()),
        })
    });
    why.or_else(|| gain(report)).unwrap_or_else(|| {
        let heap = peak.usage.kind(Kind::Heap);
        format!("{} of {} of heap on huge pages", heap.huge, heap.bytes)
    })
}

/// Reason why memory of a kind is not on huge pages; `None` if unknown.
fn why(report: &Report<'_>, kind: Kind) -> Option<String> {
    if !is_covered(report, kind) {
        return Some(String::from("jumbo leaves it alone"));
    }
    match kind {
        Kind::Text => segments::why(report).map(String::from),
        Kind::Shared => shmem::why(report).map(String::from),
        Kind::Heap => {
            let of = |what| report.shortfalls.iter().find(|found| found.what == what);
            let found = HEAP_SHORTFALLS.into_iter().find_map(of)?;
            Some(match found.what {
                "huge pages" => found.reason.clone(),
                what => format!("{what}: {}", found.reason),
            })
        }
        _ => None,
    }
}

/// Table of the memory at its peak, by kind; kinds that jumbo does not cover are marked.
fn table(view: &mut View, report: &Report<'_>, peak: &Peak) {
    let usages = KINDS.map(|kind| (kind, peak.usage.kind(kind)));
    let shown = usages.iter();
    let shown = shown.filter(|(kind, usage)| *kind == Kind::Heap || usage.bytes > Bytes(0));
    let row = |(kind, usage): &(Kind, KindUsage)| {
        let mark = match is_covered(report, *kind) {
            true => "",
            false => " (not covered)",
        };
        [
            kind.name().to_owned(),
            usage.bytes.to_string(),
            usage.huge.to_string(),
            share(usage),
            format!("{}{mark}", folios(usage)),
        ]
    };
    view.line("");
    view.table("<|>resident|>huge|>share|<folios", shown.map(row));
    view.line("");
    if usages.iter().any(|(_, usage)| usage.unknown > Bytes(0)) {
        let why = "size unknown: resident in folios whose size smaps does not tell; \
                   jumbo status -p looks them up, as root";
        fact(view, "?", why);
    }
    fact(view, "measured", &sampling(&report.outcome.sampled));
    if let [first, _, ..] = peak.processes.as_slice() {
        let (name, heap) = (&first.name, first.usage.kind(Kind::Heap));
        let all = units::counted(peak.processes.len() as u64, "process");
        let most = format!(
            "{all}; most heap: {name} ({}) with {}",
            first.pid, heap.bytes
        );
        fact(view, "", &most);
    }
}

/// Reports whether the options cover memory of this kind.
fn is_covered(report: &Report<'_>, kind: Kind) -> bool {
    let requested = &report.settings.requested;
    match kind {
        Kind::Heap => requested.heap != HeapMode::Off || requested.maps,
        Kind::Text => requested.text != TextMode::Off,
        Kind::Data => requested.data != DataMode::Off,
        Kind::Shared => requested.shm != ShmMode::Off,
        _ => false,
    }
}

/// Estimated gain: the first touch of the heap's huge pages, and of the same memory in base pages.
///
/// It is measured on memory that the host of a virtual machine has at hand; the program's first touches
/// may have taken longer. They took no longer than its system time.
fn gain(report: &Report<'_>) -> Option<String> {
    // A killed program, at a memory limit for example, gained nothing.
    status(report.outcome.end.change).ok()?;
    let heap = report.outcome.heap()?.huge;
    // A seccomp filter may kill this process for the calls of the measurement.
    if heap < MIN_MEMORY || sandbox::inherited() != Some(0) {
        return None;
    }
    let touch = jumbo_bench::memory::first_touch().ok()?;
    let mib = heap.0 as f64 / f64::from(1 << 20);
    let [huge, base] = [touch.huge, touch.base].map(|per_mib| per_mib.mul_f64(mib));
    let system = report.outcome.end.faults.system;
    let touches = format!(
        "first touches take {}, on base pages {}",
        duration(huge),
        duration(base)
    );
    Some(match (huge < base, system < base) {
        (true, true) => format!("it seems to pay: {touches}"),
        (true, false) => format!(
            "it pays if {touches}, as now; its system time was {}: jumbo compare tells",
            duration(system)
        ),
        (false, _) => format!("it pays where memory is used often: {touches}"),
    })
}

fn pool(view: &mut View, report: &Report<'_>) {
    let Some(pool) = report.pool() else {
        return;
    };
    let ledger = &report.counted.total;
    let beyond = also(ledger.pool_beyond, "; ", "asked for beyond it");
    let moved = also(ledger.pool_moved, "; ", "moved from the one to the other");
    let (hugetlb, thp) = (Bytes(ledger.pool_hugetlb_peak), Bytes(ledger.pool_thp_peak));
    let run = match report.counted.run_pool_peak {
        None => String::from(" in one process"),
        Some(run) => format!("; {run} at most at a time over the run"),
    };
    let what = format!("{pool}: {hugetlb} of hugetlb pages, {thp} of THPs{run}{moved}{beyond}");
    fact(view, "pool", &what);
    let reasons = pool_reasons(ledger);
    reasons.iter().for_each(|reason| fact(view, "", reason));
}

/// Optional part of a line, empty for 0 bytes.
fn also(bytes: u64, before: &str, what: &str) -> String {
    match bytes {
        0 => String::new(),
        _ => format!("{before}{} {what}", Bytes(bytes)),
    }
}

fn sampling(sampled: &SampleStats) -> String {
    let at = sampled.peak_at_seconds.unwrap_or_default();
    let coverage = match sampled.share_of_max_rss {
        Some(share) => format!(", saw {:.0} % of the largest resident size", share * 100.0),
        None => String::new(),
    };
    format!(
        "peak of the heap at {}: samples: {}, a look each {}{coverage}{}",
        duration(Duration::from_secs_f64(at)),
        sampled.samples,
        duration(Duration::from_secs_f64(sampled.interval_seconds)),
        match &sampled.trouble {
            Some(trouble) => format!("; {trouble}"),
            None => String::new(),
        }
    )
}

fn folios(usage: &KindUsage) -> String {
    let known = usage.folios.iter().rev();
    let mut parts: Vec<String> = known
        .map(|(size, bytes)| format!("{size}: {bytes}"))
        .collect();
    if usage.unknown > Bytes(0) {
        parts.push(format!("?: {}", usage.unknown));
    }
    parts.join(", ")
}

fn share(usage: &KindUsage) -> String {
    let share = usage.huge_share();
    view::or_none(share.map(|share| format!("{:.1} %", share * 100.0)))
}

fn duration(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 120.0 => view::duration(duration),
        seconds => format!("{:.1} min", seconds / 60.0),
    }
}
