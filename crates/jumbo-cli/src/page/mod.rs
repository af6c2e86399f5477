//! Measurements as one self-contained HTML page: no script, image or font, and a policy that allows
//! no connection. [`bench`] and [`compare`] make it from the values of `--json`.
//!
//! `maud` escapes all text; control characters are replaced before.

mod plot;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use jumbo::units::counted;
use jumbo_bench::machine::Machine;
use jumbo_bench::program::Comparison;
use jumbo_bench::program::verdict::Change;
use jumbo_bench::table::{Missing, Row, Table, Verdict};
use jumbo_host::whole_file;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::bench::all::{Document, Measured};
use crate::bench::render;
use crate::view::{Block, View, clean};

/// Content security policy: no resource is loaded, and no script runs.
const CONTENT_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'";

/// Resolves an output path, and tests before the measurement that it is writable.
pub(crate) fn target(path: &Path) -> anyhow::Result<PathBuf> {
    let shown = path.display();
    let failed =
        || format!("cannot write {shown}\nhint: name a file in a folder that takes new files");
    // A link stays; its target is replaced.
    let path = whole_file::behind_links(path).with_context(failed)?;
    if fs::symlink_metadata(&path).is_ok_and(|found| !found.is_file()) {
        anyhow::bail!(
            "cannot write {shown}: it is no regular file\nhint: name a regular file, or a new one"
        );
    }
    whole_file::probe(&path).with_context(failed)?;
    Ok(path)
}

pub(crate) fn bench(document: &Document) -> String {
    let title = "jumbo: all measurements";
    let elapsed = span(document.seconds);
    let quick = if document.quick {
        ", with less work (--quick)"
    } else {
        ""
    };
    let body = html! {
        h1 { (title) }
        p.soft { "jumbo " (document.version) ", " (date(document.began)) ", measured in " (elapsed) (quick) }
        @if !document.complete {
            p.warn role="alert" { strong { "Incomplete." } " The measurement was interrupted, or is going on. Tables are missing, and some rows may have fewer rounds." }
        }
        (machine(&document.machine))
        details {
            summary { "The kernel and its settings of huge pages (" (document.knobs.len()) " files)" }
            dl { @for (path, value) in &document.knobs { dt { code { (clean(path)) } } dd { (clean(value)) } } }
        }
        (reading())
        (overview(&document.tables))
        @for measured in &document.tables { (section(&measured.table, Some(measured.seconds))) }
        @if !document.not_measured.is_empty() {
            section id="not-measured" {
                h2 { "Tables that were not measured" }
                ul { @for it in &document.not_measured { li { strong { (it.table) } ": " (text(&it.why)) } } }
            }
        }
    };
    page(title, &body)
}

/// Page of `jumbo compare`; `report` is its text.
pub(crate) fn compare(it: &Comparison, report: &View) -> String {
    let command = it.program.join(" ");
    let title = format!("jumbo compare: {}", clean(&command));
    let mut table = it.table.clone();
    for row in &mut table.rows {
        if let Some(verdict) = verdict_of(it, &row.what.name) {
            row.verdict = verdict;
        }
    }
    let runs = counted(table.rounds as u64, "run");
    let body = html! {
        h1 { "jumbo compare" }
        pre { code { (clean(&command)) } }
        p.soft { (runs) " of each kind, in turn, jumbo " (env!("CARGO_PKG_VERSION")) }
        @for block in report.blocks() { (self::block(block)) }
        (machine(&table.machine))
        (reading())
        (section(&table, None))
    };
    page(&title, &body)
}

/// Block of a document. The first cell of a table's row is its name.
fn block(block: &Block) -> Markup {
    let (columns, rows) = match block {
        Block::Heading(title) => return html! { h2 { (title) } },
        Block::Line(line) if line.text.is_empty() => return html! {},
        Block::Line(line) => return html! { p { (line.text) } },
        Block::Table(columns, rows) => (columns.split('|').map(|column| &column[1..]), rows),
    };
    html! { table {
        thead { tr { @for column in columns.clone() { th scope="col" { (column) } } } }
        tbody { @for row in rows { tr { @for (at, (column, cell)) in columns.clone().zip(row).enumerate() {
            @if at == 0 { th scope="row" { (cell) } } @else { td data-of=(column) { (cell) } }
        } } } }
    } }
}

/// Verdict of the report on a row; unlike the row's own it considers the noise of plain runs.
fn verdict_of(it: &Comparison, row: &str) -> Option<Verdict> {
    let of = |way: &jumbo_bench::program::Compared| {
        let base = if way.key == "default" {
            "time".to_owned()
        } else {
            format!("time_{}", way.key)
        };
        let changes = [("", way.time), ("_cpu", way.cpu), ("_rss", way.memory)];
        let found = changes
            .into_iter()
            .find(|(suffix, _)| row == format!("{base}{suffix}"));
        found.map(|(_, change)| change)
    };
    it.ways.iter().find_map(of).map(|change| match change {
        Change::Less { .. } => Verdict::Ahead,
        Change::More { .. } => Verdict::Behind,
        Change::None { .. } | Change::Unknown => Verdict::NoDifference,
    })
}

fn text(lines: &str) -> String {
    clean(&lines.replace('\n', "; ")).into_owned()
}

fn page(title: &str, body: &Markup) -> String {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(CONTENT_POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                link rel="icon" href="data:,";
                title { (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                main { (body) }
                footer { p { "Made by jumbo " (env!("CARGO_PKG_VERSION")) ". This file loads nothing and runs no script." } }
            }
        }
    }
    .into_string()
}

fn machine(machine: &Machine) -> Markup {
    let thp = machine
        .thp
        .iter()
        .map(|(knob, value)| format!("{knob} {value}"));
    let thp: Vec<_> = thp.collect();
    let facts = [
        (
            "Processor",
            machine.cpu.clone().unwrap_or_else(|| "unknown".to_owned()),
        ),
        ("Processors used", machine.cores.to_string()),
        ("Memory", machine.ram.to_string()),
        ("Kernel", format!("Linux {}", machine.kernel)),
        (
            "Transparent huge pages",
            if thp.is_empty() {
                "none".to_owned()
            } else {
                thp.join(", ")
            },
        ),
        (
            "Load before",
            format!("{:.1} runnable processes", machine.load),
        ),
    ];
    html! {
        section id="machine" {
            h2 { "Machine" }
            dl { @for (name, value) in &facts { dt { (name) } dd { (clean(value)) } } }
        }
    }
}

fn reading() -> Markup {
    html! {
        section id="reading" {
            h2 { "Reading the tables" }
            p { "Each figure is a cost: less is better. It is the median of the rounds, with the least and the most below. A ratio is baseline divided by compared, round by round: above 1 the compared side is ahead." }
            p { "A row says “no difference seen” where the rounds disagree about the direction, or where half of the distance from least to most is at least as large as the difference itself (of ratios, by their logarithm). Rows with “A/A” hold the baseline against itself: what they differ by is noise." }
            p { "Plots of samples begin at 0: each circle is a round of the baseline, each disc one of the compared side, and the strokes are the medians." }
        }
    }
}

fn overview(tables: &[Measured]) -> Markup {
    let count = |table: &Table, verdict| {
        let rows = table.rows.iter().filter(|row| row.is_of_jumbo());
        rows.filter(|row| row.verdict == verdict).count()
    };
    html! {
        section id="overview" {
            h2 { "Overview" }
            table {
                caption { "Rows of each table by verdict, without A/A rows and those of other mechanisms alone" }
                thead { tr { @for head in ["table", "measured", "ahead", "no difference seen", "behind", "time"] { th scope="col" { (head) } } } }
                tbody { @for Measured { table, seconds } in tables { tr {
                    th scope="row" { a href={ "#" (table.table) } { (table.table) } }
                    td { (clean(&table.what)) }
                    (counted_cell("ahead", count(table, Verdict::Ahead)))
                    td data-of="no difference seen" { (count(table, Verdict::NoDifference)) }
                    (counted_cell("behind", count(table, Verdict::Behind)))
                    td.number data-of="time" { (span(*seconds)) }
                } } }
            }
        }
    }
}

/// Cell with a number of rows, in the colour of the verdict unless it is 0.
fn counted_cell(verdict: &str, rows: usize) -> Markup {
    html! { td.(if rows > 0 { verdict } else { "none" }) data-of=(verdict) { (rows) } }
}

fn section(table: &Table, seconds: Option<f64>) -> Markup {
    let beside: Vec<_> = table.beside().map(render::beside).collect();
    html! {
        section id=(table.table) {
            h2 { (if seconds.is_some() { table.table } else { "Every run" }) }
            @if table.interrupted.is_some() { p.warn { "Interrupted: rows may have fewer rounds, or be missing." } }
            table.rows {
                caption {
                    (clean(&table.what)) ", " (counted(table.rounds as u64, "round"))
                    @if let Some(seconds) = seconds { ", in " (span(seconds)) }
                }
                thead { tr {
                    @for head in ["measure", "baseline", "compared", "samples from 0", "ratio, or difference", "verdict", "published"] {
                        th scope="col" { (head) }
                    }
                } }
                tbody { @for row in &table.rows { (line(row)) } }
            }
            (source(table))
            @if !beside.is_empty() {
                details {
                    summary { (counted(beside.len() as u64, "value")) " beside the rows" }
                    dl { @for [name, value] in &beside { dt { code { (name) } } dd { (value) } } }
                }
            }
            @for Missing { what, why } in &table.missing { p { strong { "Not measured: " } (what) ": " (text(why)) } }
        }
    }
}

fn line(row: &Row) -> Markup {
    let [
        measure,
        baseline,
        base,
        candidate,
        cand,
        compared,
        _,
        published,
    ] = render::cells(row);
    let samples = format!("{measure}: {baseline} {base}; {candidate} {cand}");
    html! {
        tr.aa[row.is_aa()] {
            th scope="row" { (clean(&measure)) }
            td.baseline data-of="baseline" { span.name { (clean(&baseline)) } (figure(&base)) }
            td.candidate data-of="compared" { span.name { (clean(&candidate)) } (figure(&cand)) }
            td.plot data-of="samples from 0" { (plot::samples(row, &clean(&samples))) }
            td data-of="ratio, or difference" { (figure(&compared)) }
            td data-of="verdict" { (verdict(row)) }
            td data-of="published" { (published) }
        }
    }
}

fn verdict(row: &Row) -> Markup {
    let class = match row.verdict {
        _ if row.is_aa() => "none",
        Verdict::Ahead => "ahead",
        Verdict::NoDifference => "none",
        Verdict::Behind => "behind",
    };
    html! { span.(class) { (row.verdict_text()) } }
}

/// Splits `MEDIAN UNIT [LEAST to MOST]`, with the spread on a line of its own.
fn figure(text: &str) -> Markup {
    match text.split_once(" [") {
        Some((median, spread)) => {
            html! { span.number { (median) } small { (spread.trim_end_matches(']')) } }
        }
        None => html! { (text) },
    }
}

fn source(table: &Table) -> Markup {
    let Some(source) = &table.source else {
        return html! {};
    };
    html! {
        p.soft {
            "Published: "
            @match &source.url {
                Some(url) => a href=(url) rel="noreferrer" { (source.title) },
                None => (source.title),
            }
            ". " (source.conditions)
        }
    }
}

fn span(seconds: f64) -> String {
    match (seconds / 60.0).floor() {
        0.0 => format!("{seconds:.0} s"),
        minutes => format!("{minutes} min {:.0} s", (seconds - minutes * 60.0).floor()),
    }
}

/// Date and time to the minute, from seconds since 1970.
fn date(seconds: u64) -> String {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let text = humantime::format_rfc3339_seconds(time)
        .to_string()
        .replace('T', " ");
    format!("{} UTC", text.get(..16).unwrap_or_default())
}

#[cfg(test)]
mod tests;
