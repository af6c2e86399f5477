//! The report for people.

use std::fmt::Write as _;
use std::time::Duration;

use jumbo::status::{Kind, KindUsage};
use jumbo::units::{Bytes, counted};

use super::report::{Exit, Report};
use crate::view::{self, clean, clean_lines};

/// So many processes are listed; the rest is one line.
const PROCESSES: usize = 5;

pub(super) fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, report);
    clean_lines(&out).into_owned()
}

fn write(out: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(
        out,
        "jumbo: {} {} after {}; {} minor and {} major page faults",
        report
            .program
            .first()
            .map(String::as_str)
            .unwrap_or_default(),
        ended(report.exit),
        duration(report.wall()),
        report.faults.minor,
        report.faults.major,
    )?;
    match &report.peak {
        None => writeln!(out, "\n  no sample: {}", trouble(report))?,
        Some(peak) => {
            writeln!(
                out,
                "\n  {:<8} {:>10} {:>10} {:>6}   folios",
                "", "resident", "huge", "share"
            )?;
            for (kind, row) in &peak.0 {
                let usage = &row.usage;
                if usage.bytes > Bytes(0) || *kind == Kind::Heap {
                    writeln!(
                        out,
                        "  {:<8} {:>10} {:>10} {:>6}   {}",
                        kind.name(),
                        usage.bytes,
                        usage.huge,
                        share(row.huge_share),
                        folios(usage)
                    )?;
                }
            }
            writeln!(out, "\n  {}", how(report))?;
        }
    }
    if report.processes.len() > 1 {
        processes(out, report)?;
    }
    let (requested, ledger) = (&report.requested, &report.obtained.ledger.of);
    let images = counted(report.obtained.images.into(), "program");
    let tunable = requested.tunable.map(|tunable| format!(", {tunable}"));
    writeln!(
        out,
        "  asked     {} advised in {images}, {} of it mappings; {}{}",
        requested.advised,
        Bytes(ledger.maps_advised),
        counted(requested.large_calls, "large allocation"),
        tunable.unwrap_or_default()
    )?;
    writeln!(
        out,
        "  obtained  {} of the heap in huge pages{}",
        report.obtained.huge,
        match report.obtained.huge_share {
            Some(share) => format!(", {:.1} %", share * 100.0),
            None => String::new(),
        }
    )?;
    if let Some(pool) = requested.pool {
        let beyond = match ledger.pool_beyond {
            0 => String::new(),
            beyond => format!("; {} asked for beyond it", Bytes(beyond)),
        };
        let moved = match ledger.pool_moved {
            0 => String::new(),
            moved => format!("; {} moved from the one to the other", Bytes(moved)),
        };
        let (hugetlb, thp) = (Bytes(ledger.pool_hugetlb_peak), Bytes(ledger.pool_thp_peak));
        let run = match report.obtained.ledger.run {
            None => String::from(" in one process"),
            Some(run) => format!("; {run} at most at a time over the run"),
        };
        writeln!(
            out,
            "  pool      {pool}: {hugetlb} of hugetlb pages, {thp} of THPs{run}{moved}{beyond}"
        )?;
        for reason in report.obtained.ledger.pool_reasons() {
            writeln!(out, "            {reason}")?;
        }
    }
    if ledger.free_gathered > 0 {
        writeln!(
            out,
            "  freed     {} by up to {} at once{}",
            Bytes(ledger.free_gathered),
            counted(ledger.free_workers, "thread"),
            match ledger.free_background {
                0 => String::new(),
                background => format!(", {} of it in the background", Bytes(background)),
            }
        )?;
    }
    // These say nothing that a user has to know.
    let reapers = report.obtained.reapers.iter();
    for reaper in reapers
        .filter(|reaper| !["waiting", "uncounted"].contains(&reaper.state))
        .take(PROCESSES)
    {
        writeln!(out, "  reaper    {}: {}", reaper.pid, reaper.reason)?;
    }
    if let Some(supervised) = &report.obtained.supervised {
        writeln!(out, "  ended     {}", supervised.text())?;
    }
    for shortfall in &report.shortfalls {
        writeln!(out, "  less      {}: {}", shortfall.what, shortfall.reason)?;
    }
    writeln!(
        out,
        "  started   as a child of jumbo, for this report; --quiet starts it in place"
    )
}

fn processes(out: &mut String, report: &Report) -> std::fmt::Result {
    for row in report.processes.iter().take(PROCESSES) {
        let heap = row.kinds.heap();
        writeln!(
            out,
            "    {:>8} {:<16} heap {:>10} {:>6}",
            row.pid,
            clean(&row.comm),
            heap.usage.bytes,
            share(heap.huge_share)
        )?;
    }
    match report.processes.len().saturating_sub(PROCESSES) {
        0 => Ok(()),
        more => writeln!(out, "    and {more} more"),
    }
}

fn how(report: &Report) -> String {
    let sampled = &report.sampled;
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

fn trouble(report: &Report) -> &str {
    report
        .sampled
        .trouble
        .as_deref()
        .unwrap_or("nothing was resident")
}

fn ended(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with {code}"),
        Exit::Signal(signal) => format!("was ended by signal {signal}"),
    }
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

fn share(share: Option<f64>) -> String {
    match share {
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
