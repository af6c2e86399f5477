//! A comparison for people who have never heard of folios, in 80 columns.

use std::io;
use std::time::Duration;

use jumbo::units::{Bytes, counted};
use jumbo_bench::program::verdict::{Agreement, Change};
use jumbo_bench::program::{Compared, Comparison, PLAIN, Served, Server};

use crate::page;
use crate::view::{NONE, View, WIDTH, duration, filled};

/// Below this a program has too little memory for any of it to be worth a huge page.
const LITTLE: f64 = 16.0 * 1024.0 * 1024.0;

/// Less of it than this, in percent, is hardly any.
const HARDLY: f64 = 5.0;

/// Above this the machine has other work, or the program does not do the same each time.
const NOISY: f64 = 0.1;

/// Shows the figures of each way, and then what they say.
pub(super) fn show(view: &mut View, it: &Comparison, server: Option<&Server>) -> io::Result<()> {
    let runs = counted(it.table.rounds as u64, "run");
    let program = cut(&it.program.join(" "), WIDTH - runs.len() - 20);
    view.line(format!("{program}: {runs} of each kind, in turn"))?;
    view.line("")?;
    let columns = columns(server).map(|column| format!("|>{column}"));
    view.table(&format!("<{}", columns.concat()), rows(it))?;
    show_served(view, it)?;
    view.line("")?;
    for text in said(it, server) {
        view.lines(wrapped(&text).lines())?;
    }
    let missing = it.table.missing.iter();
    view.lines(missing.map(|missing| format!("Left out: {}: {}", missing.what, missing.why)))
}

/// The same as a page.
pub(super) fn page(it: &Comparison, server: Option<&Server>) -> String {
    let rows: Vec<_> = rows(it).map(Vec::from).collect();
    let mut tables = vec![(columns(server).to_vec(), rows)];
    let served = served(it);
    if !served.is_empty() {
        let rows = served.into_iter().map(Vec::from).collect();
        tables.push((vec!["throughput", "p50", "p99"], rows));
    }
    page::compare(it, &said(it, server), &tables)
}

/// The columns of figures behind the name of a side.
fn columns(server: Option<&Server>) -> [&'static str; 6] {
    let time = match server {
        Some(Server { load: Some(_), .. }) => "one load",
        Some(_) => "CPU time",
        None => "time",
    };
    [
        time,
        "user",
        "system",
        "peak memory",
        "in huge pages",
        "faults",
    ]
}

/// The figures of each side.
fn rows(it: &Comparison) -> impl Iterator<Item = [String; 7]> {
    let ways = it
        .ways
        .iter()
        .map(|way| (way.key.as_str(), way.name.as_str()));
    let sides = std::iter::once((PLAIN, PLAIN)).chain(ways);
    sides.map(|(key, name)| cells(it, key, name))
}

/// The report in sentences.
fn said(it: &Comparison, server: Option<&Server>) -> Vec<String> {
    let told = it.ways.iter().flat_map(|way| {
        let verdict = std::iter::once(verdict(it, way, server));
        verdict.chain(advice(it, way))
    });
    let unreached = it.unreached.iter().map(|reason| {
        let what = match it.outside {
            true => "promotes its memory from outside, at a CPU time that is not in the table",
            false => "changes nothing in it",
        };
        format!("LD_PRELOAD cannot reach this program, so `jumbo run` {what}: {reason}.")
    });
    unreached.chain(told).chain(did(it)).collect()
}

/// Shows the figures that the load printed, where it did.
fn show_served(view: &mut View, it: &Comparison) -> io::Result<()> {
    let rows = served(it);
    if rows.is_empty() {
        return Ok(());
    }
    view.line("")?;
    view.table("<The load says|>throughput|>p50|>p99", rows)
}

/// The figures that the load printed, side by side.
fn served(it: &Comparison) -> Vec<[String; 4]> {
    let sides = [(PLAIN, it.plain_served)].into_iter();
    let ways = it.ways.iter().map(|way| (way.name.as_str(), way.served));
    let rows = sides.chain(ways).filter_map(|(name, served)| {
        let Served {
            throughput,
            p50_ms,
            p99_ms,
            ..
        } = served?;
        let throughput = throughput.map(|rate| format!("{rate:.0}/s"));
        let figures = [throughput, p50_ms.map(ms), p99_ms.map(ms)];
        let [throughput, p50, p99] = figures.map(|it| it.unwrap_or_else(|| NONE.to_owned()));
        Some([short(name), throughput, p50, p99])
    });
    rows.collect()
}

/// The name of a way, as far as it fits.
fn short(name: &str) -> String {
    cut(name.strip_prefix("jumbo run ").unwrap_or(name), 18)
}

fn value(it: &Comparison, key: &str, figure: &str) -> f64 {
    let value = it.table.value_of(&format!("time_{key}_{figure}"));
    value.map_or(f64::NAN, |spread| spread.median)
}

fn cells(it: &Comparison, key: &str, name: &str) -> [String; 7] {
    let value = |figure| value(it, key, figure);
    let time = |figure| {
        let seconds = Duration::try_from_secs_f64(value(figure) / 1e3);
        seconds.map_or_else(|_| NONE.to_owned(), duration)
    };
    [
        short(name),
        time("time_ms"),
        time("user_ms"),
        time("system_ms"),
        bytes(value("rss_bytes")),
        format!("{:.0} %", value("huge_percent")),
        format!("{:.0}", value("faults")),
    ]
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float becomes the nearest number of bytes that there can be"
)]
fn bytes(bytes: f64) -> String {
    Bytes(bytes as u64).to_string()
}

/// One sentence about time and memory.
fn verdict(it: &Comparison, way: &Compared, server: Option<&Server>) -> String {
    if way.status == Some(Agreement::Differs) {
        let name = &way.name;
        return format!("{name}: it did not end as plain did: time and memory say nothing.");
    }
    let cpu = server.is_some_and(|server| server.load.is_none());
    let time = match way.time {
        Change::None { noise } => {
            let noise = percent(noise);
            let none = format!("no difference in time seen (runs differ by {noise})");
            match changed(way.cpu, true) {
                Some(cpu_time) if !cpu => format!("{none}, but {cpu_time}"),
                _ => none,
            }
        }
        change => changed(change, cpu).unwrap_or_else(|| "time not known".to_owned()),
    };
    let memory = match way.memory {
        _ if value(it, PLAIN, "rss_bytes") < LITTLE => return format!("{}: {time}.", way.name),
        Change::None { .. } => "as much memory".to_owned(),
        Change::Less { factor, .. } => format!("{} less memory", percent(1.0 - 1.0 / factor)),
        Change::More { factor, .. } => format!("{} more memory", percent(factor - 1.0)),
        Change::Unknown => "memory not known".to_owned(),
    };
    format!("{}: {time}, {memory}.", way.name)
}

/// A difference that was seen, with its noise.
fn changed(change: Change, cpu: bool) -> Option<String> {
    let (words, noise) = match change {
        Change::Less { factor, noise } => (faster(factor, cpu), noise),
        Change::More { factor, noise } => (slower(factor, cpu), noise),
        Change::None { .. } | Change::Unknown => return None,
    };
    Some(format!("{words} (give or take {})", percent(noise)))
}

fn faster(factor: f64, cpu: bool) -> String {
    match factor {
        _ if cpu => format!("{} less CPU time", percent(1.0 - 1.0 / factor)),
        factor if factor < 2.0 => format!("{} faster", percent(factor - 1.0)),
        factor => format!("{factor:.1} times as fast"),
    }
}

fn slower(factor: f64, cpu: bool) -> String {
    match factor {
        _ if cpu => format!("{} more CPU time", percent(factor - 1.0)),
        factor if factor < 2.0 => format!("{} slower", percent(factor - 1.0)),
        factor => format!("takes {factor:.1} times as long"),
    }
}

/// Two digits are all that such a measurement carries.
pub(crate) fn percent(part: f64) -> String {
    match part * 100.0 {
        percent if percent < 9.95 => format!("{percent:.1}\u{a0}%"),
        percent => format!("{percent:.0}\u{a0}%"),
    }
}

/// The reason why no difference is seen, or no huge page.
fn advice(it: &Comparison, way: &Compared) -> Vec<String> {
    let mut lines = Vec::new();
    if let Change::None { noise } = way.time
        && noise > NOISY
    {
        lines.push(
            "  A smaller difference may hide in that: try a quieter machine, or more --runs."
                .to_owned(),
        );
    }
    let hardly = value(it, &way.key, "huge_percent") < HARDLY;
    if way.is_jumbo && hardly && value(it, PLAIN, "rss_bytes") >= LITTLE {
        lines.push(
            "  Hardly any of its memory came on huge pages; `jumbo run --report -- PROGRAM` says why."
                .to_owned(),
        );
    }
    lines
}

fn ms(ms: f64) -> String {
    duration(Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default())
}

/// A compared part.
type See = fn(&Compared) -> Option<Agreement>;

/// Whether the program did the same.
fn did(it: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    if let (Some(status), Some(words)) = (&it.plain_status, &it.plain_words) {
        lines.push(format!(
            "It failed without jumbo too: {status}; the last it said: {words}"
        ));
    }
    let all = |see: See, agreement| it.ways.iter().all(|way| see(way) == Some(agreement));
    let streams: [(&str, See); 2] = [("stdout", |way| way.stdout), ("stderr", |way| way.stderr)];
    let status: See = |way| way.status;
    let parts = || streams.into_iter().chain([("exit status", status)]);
    if parts().all(|(_, see)| all(see, Agreement::Same)) {
        lines.push("Output and exit status were the same in all runs.".to_owned());
        return lines;
    }
    if it.ways.iter().all(|way| way.status.is_none()) {
        let server =
            "It was ended as a server is: how it ends and what it prints was not compared.";
        lines.push(server.to_owned());
        return lines;
    }
    for way in &it.ways {
        let name = &way.name;
        if way.status == Some(Agreement::Differs) {
            let ended = way.ended.as_ref().zip(it.plain_status.as_ref());
            let how = ended.map_or("otherwise than plain".to_owned(), |(ended, plain)| {
                format!("with {ended}, plain with {plain}")
            });
            lines.push(format!("WARNING: {name} ended {how}."));
        }
        let differing = streams
            .iter()
            .filter(|(_, see)| see(way) == Some(Agreement::Differs));
        lines.extend(
            differing
                .map(|(stream, _)| format!("WARNING: {name} printed something else on {stream}.")),
        );
    }
    lines.extend(
        parts().filter_map(|(part, see)| match it.ways.first().and_then(see) {
            Some(Agreement::DiffersFromItself) => Some(format!(
                "Its {part} differs from itself, run by run, without jumbo: not compared."
            )),
            None if part != "exit status" => Some(format!(
                "Its {part} was left open by a process that goes on: not compared."
            )),
            _ => all(see, Agreement::Same).then(|| format!("Its {part} was the same in all runs.")),
        }),
    );
    lines
}

/// The beginning of a text.
fn cut(text: &str, most: usize) -> String {
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match flat.chars().count() > most {
        true => flat
            .chars()
            .take(most.saturating_sub(3))
            .chain("...".chars())
            .collect(),
        false => flat,
    }
}

/// Lines that fit; those behind the first are indented, and a figure stays with its unit.
fn wrapped(text: &str) -> String {
    let words = text.trim_start();
    let indent = text.len() - words.len();
    let folded = filled(&text[..indent], words, indent + 2, WIDTH);
    folded.replace('\u{a0}', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_and_losses_are_said_in_words() {
        assert_eq!(faster(1.12, false), "12\u{a0}% faster");
        assert_eq!(faster(2.04, false), "2.0 times as fast");
        assert_eq!(slower(1.08, false), "8.0\u{a0}% slower");
        assert_eq!(faster(1.25, true), "20\u{a0}% less CPU time");
        assert_eq!(percent(0.034), "3.4\u{a0}%");
    }

    #[test]
    fn no_line_is_too_long() {
        let text = format!("  {}", ["word"; 40].join(" "));
        let lines = wrapped(&text);
        let lines: Vec<_> = lines.lines().collect();
        assert!(lines.len() > 2 && lines.iter().all(|line| line.chars().count() <= WIDTH));
        assert!(lines[0].starts_with("  w") && lines[1].starts_with("    w"));
        assert_eq!(wrapped("short"), "short");
        assert_eq!(cut("a\n b c", 80), "a b c");
        assert_eq!(cut("abcdefgh", 6), "abc...");
    }
}
