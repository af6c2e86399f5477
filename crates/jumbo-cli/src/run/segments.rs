//! What became of text and data, for the report.

use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::policy::TextMode;
use jumbo_host::status::Kind;
use jumbo_inside::ledger::{Counts, text_reason as reason};
use serde_json::{Value, json};

use super::report::Report;
use super::text::line;

const NO_SEGMENT: &str = "no segment of it holds a whole huge page; hint: jumbo text inspect";

/// What a bit of [`text_reason`](reason) means to a reader.
fn meaning(bit: u32) -> Option<&'static str> {
    Some(match bit {
        reason::NOT_CONGRUENT => {
            "its addresses do not fit its place in the file; hint: jumbo text align"
        }
        reason::SMALL_FOLIOS => "the page cache has it in small folios; hint: jumbo text prime",
        reason::CHANGED => {
            "pages of it were changed since it was loaded (text relocations, breakpoints, a probe)"
        }
        reason::UNKNOWN => "how it is mapped cannot be asked: Linux 6.7 and /proc are needed",
        reason::NOT_EXECUTABLE => {
            "the kernel refuses executable memory without a file (vm.memfd_noexec, or a security module)"
        }
        reason::NO_SHARED_HUGE => {
            "no huge page for shared memory (the PMD size's shmem_enabled is never, or none is free)"
        }
        reason::NO_MEMORY => "no memory, no descriptor or no mapping was to be had",
        reason::FILTER => "nothing is moved under a seccomp filter",
        reason::GONE => "the program mapped it anew meanwhile",
        reason::THREADS => {
            "data is copied in programs of one thread, and there were more at the start"
        }
        reason::TAMPERED => "another process of this user wrote to the image while it was made",
        reason::ENDED => {
            "the program changed its user, installed a filter or left its first thread before it had lived long enough"
        }
        _ => return None,
    })
}

/// Each reason why there is not more.
fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    let bits = counts.text_reasons;
    (0..u32::BITS)
        .filter(move |bit| bits & 1 << bit != 0)
        .filter_map(|bit| meaning(1 << bit))
}

/// The rung that text stands on, the most of it.
fn rung(report: &Report<'_>) -> &'static str {
    let counts = &report.counted.total.of;
    let peak = report.seen.peak.as_ref();
    let huge = peak.map_or(Bytes(0), |peak| peak.usage.kind(Kind::Text).huge);
    match counts.text_shared {
        1.. => "shared",
        _ if huge > Bytes(0) => "file",
        _ => "as it is",
    }
}

/// As part of a report in JSON.
pub(super) fn json(report: &Report<'_>) -> Value {
    let counts = &report.counted.total.of;
    json!({
        "segments": counts.text,
        "rung": rung(report),
        "shared": counts.text_shared,
        "images_made": counts.text_images,
        "move_ns": counts.text_ns,
        "data_moved": counts.data_moved,
        "bss_advised": counts.data_advised,
        "reasons": reasons(counts).collect::<Vec<_>>(),
    })
}

/// The first reason why text is not on huge pages.
pub(super) fn why(report: &Report<'_>) -> Option<&'static str> {
    let counts = &report.counted.total.of;
    match counts.text {
        0 => Some(NO_SEGMENT),
        _ => reasons(counts).next(),
    }
}

/// The lines of a report; none where there is nothing to say.
pub(super) fn write(out: &mut String, report: &Report<'_>) -> std::fmt::Result {
    let counts = &report.counted.total.of;
    let asked = &report.settings.asked;
    let covered = report.reached && asked.text != TextMode::Off;
    if covered && counts.text == 0 {
        line(out, "text", NO_SEGMENT)?;
    }
    if covered && counts.text > 0 {
        let took = Duration::from_nanos(counts.text_ns);
        let what = match rung(report) {
            "shared" => format!(
                "{} on an image that processes share, in {took:.0?}",
                Bytes(counts.text_shared)
            ),
            "file" => String::from("from the page cache, in huge folios"),
            other => other.to_owned(),
        };
        let segments = Bytes(counts.text);
        let what = format!("{segments} in segments that hold a huge page: {what}");
        line(out, "text", &what)?;
        let moved = counts.text_shared >= counts.text;
        // Nothing falls back in silence.
        let why = || reasons(counts).filter(|_| !moved && rung(report) != "file");
        for reason in why() {
            line(out, "", reason)?;
        }
        if rung(report) == "as it is" && asked.text == TextMode::Auto {
            let when = "a copy is made when 32 MiB of it were touched and it pays; hint: jumbo text prime, or --text=shared";
            line(out, "", when)?;
        }
    }
    if counts.data_moved + counts.data_advised > 0 {
        let (moved, advised) = (Bytes(counts.data_moved), Bytes(counts.data_advised));
        let what = format!("{moved} copied onto huge pages, {advised} of bss advised");
        line(out, "data", &what)?;
    }
    Ok(())
}
