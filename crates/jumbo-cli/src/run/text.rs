//! The report for people.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use jumbo::units::{self, Bytes};
use jumbo_host::policy::{DataMode, HeapMode, ShmMode, TextMode};
use jumbo_host::status::{Kind, KindUsage};
use jumbo_inside::reaper::State;
use jumbo_inside::sandbox;

use super::report::{KINDS, Report, status};
use super::sample::{Peak, Process, Sampled};
use super::segments;
use super::shmem;
use super::shortfall;
use crate::view::{self, clean, clean_lines};

/// So many processes are listed; the rest is one line.
const PROCESSES: usize = 5;

/// Below this there is too little memory for huge pages to matter: eight of 2 MiB.
const LITTLE: Bytes = Bytes(16 << 20);

const TOO_LITTLE: &str = "has too little memory to gain from huge pages";

/// Of less of its memory than this share nothing is said about all of it.
const SEEN: f64 = 0.5;

/// With this share on huge pages the rest needs no reason.
const MOST: f64 = 0.9;

/// The shortfalls that explain a heap on base pages, the most likely reason first.
const OF_HEAP: [&str; 7] = [
    "huge pages",
    "mappings",
    "advice",
    "large allocations",
    "the pool",
    "allocations",
    "small allocations",
];

/// The text; `full` adds all that is known to the three lines.
pub(super) fn render(report: &Report<'_>, full: bool) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, report, full);
    clean_lines(&out).into_owned()
}

/// The result in a sentence, as the JSON report has it.
pub(super) fn headline(report: &Report<'_>) -> String {
    let name = name(report);
    if let Some(why) = unreached(report) {
        return why;
    }
    let peak = match known(report) {
        Ok(peak) => peak,
        Err(why) => return format!("{name}: what was on huge pages is unknown: {why}"),
    };
    let total = peak.usage.total();
    match ruled_out(report) {
        Some(why) if total.huge == Bytes(0) => {
            format!(
                "none of the {} of {name} is on huge pages: {why}",
                total.bytes
            )
        }
        _ if total.bytes < LITTLE => format!("{name} {TOO_LITTLE}: {}", total.bytes),
        _ => huge(&name, &total),
    }
}

/// The share of a program's memory that is on huge pages.
fn huge(name: &str, total: &KindUsage) -> String {
    format!(
        "{:.0} % of the {} of {name} on huge pages",
        (100.0 * total.huge_share().unwrap_or_default()).floor(),
        total.bytes
    )
}

/// Why the library is in no process of the program; `None` where it is in one.
fn unreached(report: &Report<'_>) -> Option<String> {
    let is_reached = report.reached || report.counted.images > 0;
    let why = || shortfall::unreached(report.launch);
    (!is_reached).then(|| format!("could not help {}: {}", name(report), why()))
}

/// The memory at its peak, or why too little of it was seen.
fn known<'a>(report: &'a Report<'_>) -> Result<&'a Peak, String> {
    let sampled = &report.seen.sampled;
    let Some(peak) = &report.seen.peak else {
        return Err(trouble(sampled).to_owned());
    };
    let largest = Bytes(report.seen.end.faults.max_rss);
    let seen_share = sampled.share_of_max_rss.unwrap_or(1.0);
    match seen_share < SEEN && largest >= LITTLE {
        true => Err(format!(
            "it ended before more than {:.0} % of its {largest} was seen",
            seen_share * 100.0
        )),
        false => Ok(peak),
    }
}

fn trouble(sampled: &Sampled) -> &str {
    sampled.trouble.as_deref().unwrap_or("nothing was resident")
}

/// The reason why the host or a process has no huge page at all.
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

/// A label, and text behind it that goes on below itself.
pub(super) fn line(out: &mut String, label: &str, text: &str) -> std::fmt::Result {
    writeln!(out, "{}", view::wrapped(&format!("  {label:<15}"), text))
}

fn write(out: &mut String, report: &Report<'_>, full: bool) -> std::fmt::Result {
    let Report { seen, counted, .. } = report;
    summary(out, report, full)?;
    if !full {
        return Ok(());
    }
    if let Some(peak) = &seen.peak {
        table(out, report, peak)?;
    }
    writeln!(out)?;
    let ledger = &counted.total.of;
    let images = units::counted(counted.images.into(), "program");
    // No other C library reads it.
    let tunable = report.tunable().filter(|_| report.reached);
    let requested = format!(
        "{} advised in {images} ({} of it mappings); {}{}",
        Bytes(ledger.advised),
        Bytes(ledger.maps_advised),
        units::counted(ledger.large_calls, "large allocation"),
        tunable
            .map(|tunable| format!("; {tunable}"))
            .unwrap_or_default()
    );
    let faults = &seen.end.faults;
    let faults = format!("{} minor and {} major", faults.minor, faults.major);
    line(out, "page faults", &faults)?;
    line(out, "requested", &requested)?;
    let obtained = match seen.heap() {
        None => format!("unknown: {}", trouble(&seen.sampled)),
        Some(heap) => match heap.huge_share() {
            Some(_) => format!("{} of the heap, {}", heap.huge, share(&heap)),
            None => String::from("nothing of the heap was resident"),
        },
    };
    line(out, "huge pages", &obtained)?;
    if let Some(gain) = gain(report) {
        line(
            out,
            "does it pay",
            &format!("{gain}; jumbo compare tells more"),
        )?;
    }
    segments::write(out, report)?;
    shmem::write(out, report)?;
    pool(out, report)?;
    if ledger.free_gathered > 0 {
        let background = match ledger.free_background {
            0 => String::new(),
            background => format!(", {} of it in the background", Bytes(background)),
        };
        let freed = format!(
            "{} by up to {} at once{background}",
            Bytes(ledger.free_gathered),
            units::counted(ledger.free_workers, "thread"),
        );
        line(out, "freed", &freed)?;
    }
    // The others say nothing that a user has to know.
    let silent = [State::Waiting, State::Uncounted];
    let reapers = counted.reapers.iter();
    let told = reapers.filter(|(state, _)| !silent.contains(state));
    for (state, counts) in told.take(PROCESSES) {
        line(out, "reaper", &format!("{}: {}", counts.pid, state.text()))?;
    }
    for (index, shortfall) in report.shortfalls.iter().enumerate() {
        let label = if index == 0 { "why not more" } else { "" };
        line(
            out,
            label,
            &format!("{}: {}", shortfall.what, shortfall.reason),
        )?;
    }
    let started = "as a child of jumbo; --quiet starts it in place";
    line(out, "how it ran", started)
}

/// The three lines that every report begins with: the end, the share on huge pages, and its reason.
fn summary(out: &mut String, report: &Report<'_>, full: bool) -> std::fmt::Result {
    let seen = &report.seen;
    let (name, faults) = (name(report), &seen.end.faults);
    let ended = format!(
        "{name} {} after {} ({} user, {} system)",
        match status(seen.end.change) {
            Ok(code) => format!("exited with {code}"),
            Err(signal) => format!("was ended by signal {signal}"),
        },
        duration(seen.wall),
        duration(faults.user),
        duration(faults.system),
    );
    writeln!(out, "{}", view::wrapped("jumbo: ", &ended))?;
    let share = match known(report) {
        Ok(peak) => huge(&name, &peak.usage.total()),
        Err(_) => format!("how much of {name} was on huge pages is unknown"),
    };
    let more = if full {
        ""
    } else {
        "; --report=full says more"
    };
    for text in [format!("{share}{more}"), reason(report)] {
        writeln!(out, "{}", view::filled("  ", &text, 4, view::WIDTH))?;
    }
    Ok(())
}

/// The reason for the largest part that is not on huge pages, or the gain where most is.
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
    if total.bytes < LITTLE {
        return format!("{name} {TOO_LITTLE}", name = name(report));
    }
    let is_most = total.huge_share().is_some_and(|share| share >= MOST);
    let why = largest.filter(|_| !is_most).and_then(|kind| {
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

/// The reason why memory of a kind is not on huge pages, where one is known.
fn why(report: &Report<'_>, kind: Kind) -> Option<String> {
    if !is_covered(report, kind) {
        return Some(String::from("jumbo leaves it alone"));
    }
    match kind {
        Kind::Text => segments::why(report).map(String::from),
        Kind::Shared => shmem::why(report).map(String::from),
        Kind::Heap => {
            let of = |what| report.shortfalls.iter().find(|found| found.what == what);
            let found = OF_HEAP.into_iter().find_map(of)?;
            Some(match found.what {
                "huge pages" => found.reason.clone(),
                what => format!("{what}: {}", found.reason),
            })
        }
        _ => None,
    }
}

/// The memory at its peak, by kind; a kind that jumbo leaves alone is marked.
fn table(out: &mut String, report: &Report<'_>, peak: &Peak) -> std::fmt::Result {
    writeln!(
        out,
        "\n  {:<8} {:>10} {:>10} {:>7}   folios",
        "", "resident", "huge", "share"
    )?;
    let mut unknown = false;
    for kind in KINDS {
        let usage = peak.usage.kind(kind);
        if kind != Kind::Heap && usage.bytes == Bytes(0) {
            continue;
        }
        let (bytes, huge, share) = (usage.bytes, usage.huge, share(&usage));
        let row = format!("  {:<8} {bytes:>10} {huge:>10} {share:>7}", kind.name());
        unknown |= usage.unknown > Bytes(0);
        let left = match is_covered(report, kind) {
            true => "",
            false => " (not covered)",
        };
        let folios = format!("{}{left}", folios(&usage));
        writeln!(out, "{}", view::wrapped(&format!("{row}   "), &folios))?;
    }
    writeln!(out)?;
    if unknown {
        let why = "size unknown: resident in folios whose size smaps does not tell; \
                   jumbo status -p looks them up, as root";
        line(out, "?", why)?;
    }
    line(out, "measured", &how(&report.seen.sampled))?;
    processes(out, &peak.processes)
}

/// Whether jumbo was to put memory of this kind on huge pages.
fn is_covered(report: &Report<'_>, kind: Kind) -> bool {
    let asked = &report.settings.asked;
    match kind {
        Kind::Heap => asked.heap != HeapMode::Off || asked.maps,
        Kind::Text => asked.text != TextMode::Off,
        Kind::Data => asked.data != DataMode::Off,
        Kind::Shared => asked.shm != ShmMode::Off,
        _ => false,
    }
}

/// The gain of the huge pages of the heap: the time of their first touch, and that of base pages.
fn gain(report: &Report<'_>) -> Option<String> {
    let heap = report.seen.heap()?.huge;
    // To measure takes calls that a filter may end the process for.
    if heap < LITTLE || sandbox::inherited() != Some(0) {
        return None;
    }
    let touch = jumbo_bench::memory::first_touch().ok()?;
    let mib = heap.0 as f64 / f64::from(1 << 20);
    let [huge, base] = [touch.huge, touch.base].map(|per_mib| per_mib.mul_f64(mib));
    let pays = match huge < base {
        true => "it seems to pay",
        false => "it pays where memory is used often",
    };
    let (huge, base) = (duration(huge), duration(base));
    Some(format!(
        "{pays}: first touches take {huge}, on base pages {base}"
    ))
}

fn pool(out: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let (Some(pool), total) = (report.pool(), &report.counted.total) else {
        return Ok(());
    };
    let also = |bytes: u64, what: &str| match bytes {
        0 => String::new(),
        _ => format!("; {} {what}", Bytes(bytes)),
    };
    let ledger = &total.of;
    let beyond = also(ledger.pool_beyond, "asked for beyond it");
    let moved = also(ledger.pool_moved, "moved from the one to the other");
    let (hugetlb, thp) = (Bytes(ledger.pool_hugetlb_peak), Bytes(ledger.pool_thp_peak));
    let run = match total.run {
        None => String::from(" in one process"),
        Some(run) => format!("; {run} at most at a time over the run"),
    };
    let what = format!("{pool}: {hugetlb} of hugetlb pages, {thp} of THPs{run}{moved}{beyond}");
    line(out, "pool", &what)?;
    (total.pool_reasons().into_iter()).try_for_each(|reason| line(out, "", reason))
}

/// Where there are several.
fn processes(out: &mut String, all: &[Process]) -> std::fmt::Result {
    if all.len() < 2 {
        return Ok(());
    }
    for process in all.iter().take(PROCESSES) {
        let heap = process.usage.kind(Kind::Heap);
        writeln!(
            out,
            "    {:>8} {:<16} heap {:>10} {:>6}",
            process.pid,
            clean(&process.name),
            heap.bytes,
            share(&heap)
        )?;
    }
    match all.len().saturating_sub(PROCESSES) {
        0 => Ok(()),
        more => writeln!(out, "    and {more} more"),
    }
}

fn how(sampled: &Sampled) -> String {
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
    match usage.huge_share() {
        Some(share) => format!("{:.1} %", share * 100.0),
        None => String::from("-"),
    }
}

fn duration(duration: Duration) -> String {
    match duration.as_secs_f64() {
        seconds if seconds < 120.0 => view::duration(duration),
        seconds => format!("{:.1} min", seconds / 60.0),
    }
}
