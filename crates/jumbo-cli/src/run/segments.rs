//! Text and data segments in the report.

use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::policy::TextMode;
use jumbo_host::status::Kind;
use jumbo_inside::ledger::{Counts, text_reason as reason};
use serde_json::{Value, json};

use super::outcome::{self, Meaning, Report, meanings};
use super::text::fact;
use crate::view::View;

const NO_SEGMENT: &str = "no segment of it holds a whole huge page; hint: jumbo files show";

const TEXT_REASONS: Meaning = meanings! { reason;
    NOT_CONGRUENT => "its addresses do not fit its place in the file; hint: jumbo text align";
    SMALL_FOLIOS => "the page cache has it in small folios; hint: jumbo files prime";
    CHANGED =>
        "pages of it were changed since it was loaded (text relocations, breakpoints, a probe)";
    UNKNOWN => "how it is mapped cannot be asked: Linux 6.7 and /proc are needed";
    NOT_EXECUTABLE =>
        "the kernel refuses executable memory without a file (vm.memfd_noexec, or a security \
         module)";
    NO_SHARED_HUGE =>
        "no huge page for shared memory (the PMD size's shmem_enabled is never, or none is free)";
    NO_MEMORY => "no memory, no file descriptor or no mapping was available";
    FILTER => "nothing is moved under a seccomp filter";
    GONE => "the program remapped it meanwhile";
    THREADS => "data is copied only in programs with one thread at the start";
    TAMPERED => "another process of this user wrote to the image before it was sealed";
    ENDED =>
        "the program changed its user, installed a filter or left its first thread before it \
         had lived long enough";
};

fn reasons(counts: &Counts) -> impl Iterator<Item = &'static str> {
    outcome::reasons(counts.text_reasons, TEXT_REASONS)
}

/// Method that put most of the text on huge pages.
fn method(report: &Report<'_>) -> &'static str {
    let counts = &report.counted.total;
    let peak = report.outcome.peak.as_ref();
    let huge = peak.map_or(Bytes(0), |peak| peak.usage.kind(Kind::Text).huge);
    match counts.text_shared {
        1.. => "shared",
        _ if huge > Bytes(0) => "file",
        _ => "as it is",
    }
}

/// Section of a JSON report.
pub(super) fn json(report: &Report<'_>) -> Value {
    let counts = &report.counted.total;
    json!({
        "segments": counts.text,
        "rung": method(report),
        "shared": counts.text_shared,
        "images_made": counts.text_images,
        "move_ns": counts.text_ns,
        "data_moved": counts.data_moved,
        "bss_advised": counts.data_advised,
        "reasons": reasons(counts).collect::<Vec<_>>(),
    })
}

/// First reason why text is not on huge pages.
pub(super) fn why(report: &Report<'_>) -> Option<&'static str> {
    let counts = &report.counted.total;
    match counts.text {
        0 => Some(NO_SEGMENT),
        _ => reasons(counts).next(),
    }
}

/// Writes the lines of a report, if jumbo covers text or data.
pub(super) fn write(view: &mut View, report: &Report<'_>) {
    let (counts, requested) = (&report.counted.total, &report.settings.requested);
    match counts.text {
        _ if !report.reached || requested.text == TextMode::Off => {}
        0 => fact(view, "text", NO_SEGMENT),
        text => {
            let method = method(report);
            let what = match method {
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
            fact(view, "text", &what);
            // Each fallback has its reasons in the report.
            let is_less = counts.text_shared < counts.text && method != "file";
            let why = reasons(counts).filter(|_| is_less);
            let when =
                (method == "as it is" && requested.text == TextMode::Auto).then_some(AUTO_COPY);
            why.chain(when).for_each(|why| fact(view, "", why));
        }
    }
    if counts.data_moved + counts.data_advised > 0 {
        let (moved, advised) = (Bytes(counts.data_moved), Bytes(counts.data_advised));
        let what = format!("{moved} copied onto huge pages, {advised} of bss advised");
        fact(view, "data", &what);
    }
    if counts.files_advised > 0 {
        let files = Bytes(counts.files_advised);
        let what = format!("{files} of data files mapped, to be read by huge folios");
        fact(view, "files", &what);
    }
}

const AUTO_COPY: &str = "a copy is made when 32 MiB of it were touched and it pays; hint: jumbo files prime, or --text=shared";
