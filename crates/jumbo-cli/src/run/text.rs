//! The report for people.

use std::fmt::Write as _;
use std::time::Duration;

use jumbo::status::{Kind, KindUsage};
use jumbo::units::{self, Bytes};
use jumbo_inside::reaper::State;

use super::held;
use super::report::{KINDS, Report, status};
use super::sample::{Process, Sampled};
use super::segments;
use super::shmem;
use crate::view::{self, clean, clean_lines};

/// So many processes are listed; the rest is one line.
const PROCESSES: usize = 5;

pub(super) fn render(report: &Report<'_>) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, report);
    clean_lines(&out).into_owned()
}

fn write(out: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let Report { seen, counted, .. } = report;
    let name = report.settings.command.first();
    writeln!(
        out,
        "jumbo: {} {} after {}; {} minor and {} major page faults",
        name.map(|name| name.to_string_lossy()).unwrap_or_default(),
        match status(seen.end.change) {
            Ok(code) => format!("exited with {code}"),
            Err(signal) => format!("was ended by signal {signal}"),
        },
        duration(seen.wall),
        seen.end.faults.minor,
        seen.end.faults.major,
    )?;
    match &seen.peak {
        None => writeln!(
            out,
            "\n  no sample: {}",
            seen.sampled
                .trouble
                .as_deref()
                .unwrap_or("nothing was resident")
        )?,
        Some(peak) => {
            writeln!(
                out,
                "\n  {:<8} {:>10} {:>10} {:>6}   folios",
                "", "resident", "huge", "share"
            )?;
            for kind in KINDS {
                let usage = peak.usage.kind(kind);
                if usage.bytes > Bytes(0) || kind == Kind::Heap {
                    writeln!(
                        out,
                        "  {:<8} {:>10} {:>10} {:>6}   {}",
                        kind.name(),
                        usage.bytes,
                        usage.huge,
                        share(&usage),
                        folios(&usage)
                    )?;
                }
            }
            writeln!(out, "\n  {}", how(&seen.sampled))?;
            processes(out, &peak.processes)?;
        }
    }
    let ledger = &counted.total.of;
    let images = units::counted(counted.images.into(), "program");
    let tunable = report.tunable().map(|tunable| format!(", {tunable}"));
    writeln!(
        out,
        "  asked     {} advised in {images}, {} of it mappings; {}{}",
        Bytes(ledger.advised),
        Bytes(ledger.maps_advised),
        units::counted(ledger.large_calls, "large allocation"),
        tunable.unwrap_or_default()
    )?;
    let heap = seen.heap().unwrap_or_default();
    writeln!(
        out,
        "  obtained  {} of the heap in huge pages{}",
        heap.huge,
        match heap.huge_share() {
            Some(_) => format!(", {}", share(&heap)),
            None => String::new(),
        }
    )?;
    segments::write(out, report)?;
    shmem::write(out, report)?;
    if let Some(pool) = report.pool() {
        let also = |bytes: u64, what: &str| match bytes {
            0 => String::new(),
            _ => format!("; {} {what}", Bytes(bytes)),
        };
        let beyond = also(ledger.pool_beyond, "asked for beyond it");
        let moved = also(ledger.pool_moved, "moved from the one to the other");
        let (hugetlb, thp) = (Bytes(ledger.pool_hugetlb_peak), Bytes(ledger.pool_thp_peak));
        let run = match counted.total.run {
            None => String::from(" in one process"),
            Some(run) => format!("; {run} at most at a time over the run"),
        };
        writeln!(
            out,
            "  pool      {pool}: {hugetlb} of hugetlb pages, {thp} of THPs{run}{moved}{beyond}"
        )?;
        for reason in counted.total.pool_reasons() {
            writeln!(out, "            {reason}")?;
        }
    }
    if ledger.free_gathered > 0 {
        writeln!(
            out,
            "  freed     {} by up to {} at once{}",
            Bytes(ledger.free_gathered),
            units::counted(ledger.free_workers, "thread"),
            match ledger.free_background {
                0 => String::new(),
                background => format!(", {} of it in the background", Bytes(background)),
            }
        )?;
    }
    // These say nothing that a user has to know.
    let reapers = counted.reapers.iter();
    for (state, counts) in reapers
        .filter(|(state, _)| ![State::Waiting, State::Uncounted].contains(state))
        .take(PROCESSES)
    {
        writeln!(out, "  reaper    {}: {}", counts.pid, state.text())?;
    }
    if let Some(supervised) = &seen.supervised {
        writeln!(out, "  ended     {}", held::text(supervised))?;
    }
    for shortfall in &report.shortfalls {
        writeln!(out, "  less      {}: {}", shortfall.what, shortfall.reason)?;
    }
    writeln!(
        out,
        "  started   as a child of jumbo, for this report; --quiet starts it in place"
    )
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
        parts.push(format!("size unknown: {}", usage.unknown));
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
