//! Text and data in the report.

use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::policy::TextMode;
use jumbo_host::status::Kind;
use jumbo_inside::ledger::{Counts, text_reason as reason};
use serde_json::{Value, json};

use super::report::{self, Meaning, Report, meanings};
use super::text::Lines;

const NO_SEGMENT: &str = "no segment of it holds a whole huge page; hint: jumbo text inspect";

/// Of [`text_reason`](reason).
const MEANING: Meaning = meanings! { reason;
    NOT_CONGRUENT => "its addresses do not fit its place in the file; hint: jumbo text align";
    SMALL_FOLIOS => "the page cache has it in small folios; hint: jumbo text prime";
    CHANGED =>
        "pages of it were changed since it was loaded (text relocations, breakpoints, a probe)";
    UNKNOWN => "how it is mapped cannot be asked: Linux 6.7 and /proc are needed";
    NOT_EXECUTABLE =>
        "the kernel refuses executable memory without a file (vm.memfd_noexec, or a security \
         module)";
    NO_SHARED_HUGE =>
        "no huge page for shared memory (the PMD size's shmem_enabled is never, or none is free)";
    NO_MEMORY => "no memory, no descriptor or no mapping was to be had";
    FILTER => "nothing is moved under a seccomp filter";
    GONE => "the program mapped it anew meanwhile";
    THREADS => "data is copied in programs of one thread, and there were more at the start";
    TAMPERED => "another process of this user wrote to the image while it was made";
    ENDED =>
        "the program changed its user, installed a filter or left its first thread before it \
         had lived long enough";
};

/// Each reason why there is not more.
fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    report::reasons(counts.text_reasons, MEANING)
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
pub(super) fn write(out: &mut Lines, report: &Report<'_>) {
    let (counts, asked) = (&report.counted.total.of, &report.settings.asked);
    match counts.text {
        _ if !report.reached || asked.text == TextMode::Off => {}
        0 => out.line("text", NO_SEGMENT),
        text => {
            let rung = rung(report);
            let what = match rung {
                "shared" => format!(
                    "{} on an image that processes share, in {:.0?}",
                    Bytes(counts.text_shared),
                    Duration::from_nanos(counts.text_ns)
                ),
                "file" => String::from("from the page cache, in huge folios"),
                other => other.to_owned(),
            };
            let text = Bytes(text);
            let what = format!("{text} in segments that hold a huge page: {what}");
            out.line("text", &what);
            // Nothing falls back in silence.
            let is_less = counts.text_shared < counts.text && rung != "file";
            let why = reasons(counts).filter(|_| is_less);
            let when = (rung == "as it is" && asked.text == TextMode::Auto).then_some(WHEN);
            why.chain(when).for_each(|why| out.line("", why));
        }
    }
    if counts.data_moved + counts.data_advised > 0 {
        let (moved, advised) = (Bytes(counts.data_moved), Bytes(counts.data_advised));
        let what = format!("{moved} copied onto huge pages, {advised} of bss advised");
        out.line("data", &what);
    }
}

const WHEN: &str = "a copy is made when 32 MiB of it were touched and it pays; hint: jumbo text prime, or --text=shared";
