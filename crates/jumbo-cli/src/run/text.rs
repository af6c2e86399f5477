//! The report for people.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use jumbo::policy::{DataMode, HeapMode, ReaperMode, ShmMode, TextMode};
use jumbo::status::{Kind, KindUsage};
use jumbo::units::{self, Bytes};
use jumbo_inside::reaper::State;
use jumbo_inside::sandbox;

use super::report::{KINDS, Report, status};
use super::sample::{Peak, Process, Sampled};
use super::segments;
use super::shmem;
use super::shortfall::{self, Shortfall};
use crate::view::{self, clean, clean_lines};

/// So many processes are listed; the rest is one line.
const PROCESSES: usize = 5;

/// Below this there is too little memory for huge pages to matter: eight of 2 MiB.
const LITTLE: Bytes = Bytes(16 << 20);

/// Of less of its memory than this share nothing is said about all of it.
const SEEN: f64 = 0.5;

/// `full`: with all that is known, rather than what matters.
pub(super) fn render(report: &Report<'_>, full: bool) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, report, full);
    clean_lines(&out).into_owned()
}

/// The one thing that matters, in a sentence.
pub(super) fn headline(report: &Report<'_>) -> String {
    let Report { seen, counted, .. } = report;
    let name = name(report);
    if !report.reached && counted.images == 0 {
        let why = shortfall::unreached(report.launch);
        return format!("could not help {name}: {why}");
    }
    let Some(peak) = &seen.peak else {
        let trouble = seen.sampled.trouble.as_deref();
        let why = trouble.unwrap_or("nothing was resident");
        return format!("{name}: what was on huge pages is unknown: {why}");
    };
    let (total, largest) = (peak.usage.total(), Bytes(seen.end.faults.max_rss));
    let seen_share = seen.sampled.share_of_max_rss.unwrap_or(1.0);
    if seen_share < SEEN && largest >= LITTLE {
        return format!(
            "{name}: what was on huge pages is unknown: it ended before more than {:.0} % of its {largest} was seen",
            seen_share * 100.0
        );
    }
    let ruled_out = |shortfall: &&Shortfall| shortfall.what == "huge pages";
    match report.shortfalls.iter().find(ruled_out) {
        Some(why) if total.huge == Bytes(0) => format!(
            "none of the {} of {name} is on huge pages: {}",
            total.bytes, why.reason
        ),
        _ if total.bytes < LITTLE => format!(
            "{name} has too little memory to gain from huge pages: {}",
            total.bytes
        ),
        _ => format!(
            "{:.0} % of the {} of {name} on huge pages",
            (100.0 * total.huge_share().unwrap_or_default()).floor(),
            total.bytes
        ),
    }
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
    writeln!(out, "{}", view::wrapped("jumbo: ", &headline(report)))?;
    let ended = format!(
        "{} {} after {}; {} minor and {} major page faults",
        name(report),
        match status(seen.end.change) {
            Ok(code) => format!("exited with {code}"),
            Err(signal) => format!("was ended by signal {signal}"),
        },
        duration(seen.wall),
        seen.end.faults.minor,
        seen.end.faults.major,
    );
    writeln!(out, "{}", view::wrapped("  ", &ended))?;
    if let Some(peak) = &seen.peak {
        table(out, report, peak, full)?;
    }
    writeln!(out)?;
    let asked = &report.settings.asked;
    let ledger = &counted.total.of;
    let images = units::counted(counted.images.into(), "program");
    // No other C library reads it.
    let tunable = report.tunable().filter(|_| report.reached);
    let mappings = match full {
        true => format!(" ({} of it mappings)", Bytes(ledger.maps_advised)),
        false => String::new(),
    };
    let requested = format!(
        "{} advised in {images}{mappings}; {}{}",
        Bytes(ledger.advised),
        units::counted(ledger.large_calls, "large allocation"),
        tunable
            .map(|tunable| format!("; {tunable}"))
            .unwrap_or_default()
    );
    line(out, "requested", &requested)?;
    let obtained = match seen.heap() {
        None => {
            let trouble = seen.sampled.trouble.as_deref();
            format!("unknown: {}", trouble.unwrap_or("nothing was resident"))
        }
        Some(heap) => match heap.huge_share() {
            Some(_) => format!("{} of the heap, {}", heap.huge, share(&heap)),
            None => String::from("nothing of the heap was resident"),
        },
    };
    line(out, "huge pages", &obtained)?;
    if let Some(gain) = pays(report) {
        line(out, "does it pay", &gain)?;
    }
    if full || asked.text != TextMode::Auto {
        segments::write(out, report)?;
    }
    if full || asked.shm != ShmMode::Auto {
        shmem::write(out, report)?;
    }
    pool(out, report)?;
    if full && ledger.free_gathered > 0 {
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
    let told = counted.reapers.iter().filter(|(state, _)| {
        ![State::Waiting, State::Uncounted].contains(state)
            && (full || asked.reaper == ReaperMode::On)
    });
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
    line(out, "how it ran", started)?;
    match full {
        true => Ok(()),
        false => line(out, "more", "--report=full"),
    }
}

/// The memory at its peak, by kind; what jumbo leaves alone in a full report only.
fn table(out: &mut String, report: &Report<'_>, peak: &Peak, full: bool) -> std::fmt::Result {
    let folios_title = if full { "   folios" } else { "" };
    writeln!(
        out,
        "\n  {:<8} {:>10} {:>10} {:>7}{folios_title}",
        "", "resident", "huge", "share"
    )?;
    let mut unknown = false;
    for kind in KINDS {
        let usage = peak.usage.kind(kind);
        let covered = is_covered(report, kind);
        if kind != Kind::Heap && (usage.bytes == Bytes(0) || !covered && !full) {
            continue;
        }
        let (bytes, huge, share) = (usage.bytes, usage.huge, share(&usage));
        let row = format!("  {:<8} {bytes:>10} {huge:>10} {share:>7}", kind.name());
        if full {
            unknown |= usage.unknown > Bytes(0);
            let left = if covered { "" } else { " (not covered)" };
            let folios = format!("{}{left}", folios(&usage));
            write!(out, "{}", view::wrapped(&format!("{row}   "), &folios))?;
        } else {
            out.push_str(&row);
        }
        writeln!(out)?;
    }
    if full {
        writeln!(out)?;
        if unknown {
            let why = "size unknown: resident in folios whose size smaps does not tell; jumbo status -p looks them up, as root";
            line(out, "?", why)?;
        }
        line(out, "measured", &how(&report.seen.sampled))?;
        processes(out, &peak.processes)?;
    }
    Ok(())
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

/// Whether it seems to pay: what its huge pages took to come, and what base pages in their place would have taken.
fn pays(report: &Report<'_>) -> Option<String> {
    let huge = report.seen.heap()?.huge;
    // To measure takes calls that a filter may end the process for.
    if huge < LITTLE || sandbox::inherited() != Some(0) {
        return None;
    }
    let touch = jumbo_bench::memory::first_touch().ok()?;
    let times = |per_mib: Duration| per_mib.mul_f64(huge.0 as f64 / f64::from(1 << 20));
    let (base, huge) = (times(touch.base), times(touch.huge));
    let took = format!(
        "first touches take about {} in huge faults and {} in base faults, measured just now",
        duration(huge),
        duration(base)
    );
    Some(match huge < base {
        true => format!("it seems so: {took}; jumbo compare tells more"),
        false => format!("only where memory is used often: {took}; jumbo compare tells more"),
    })
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
