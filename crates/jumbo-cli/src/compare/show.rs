//! Text output of a comparison, in 80 columns, for readers who do not know folios.

use std::time::Duration;

use jumbo::units::{Bytes, counted};
use jumbo_bench::program::verdict::{Agreement, Change};
use jumbo_bench::program::{Compared, Comparison, PLAIN, Served, Server};

use crate::view::{View, WIDTH, duration, or_none};

/// Minimum memory of a program for huge pages to matter.
const MIN_MEMORY_BYTES: f64 = 16.0 * 1024.0 * 1024.0;

/// Share on huge pages, in percent, below which a hint is printed.
const LOW_HUGE_PERCENT: f64 = 5.0;

/// Noise above which a hint is printed: the machine is busy, or the runs of the program differ.
const HIGH_NOISE: f64 = 0.1;

/// Shows the command, and [`body`].
pub(super) fn show(view: &mut View, it: &Comparison, server: Option<&Server>) {
    let runs = counted(it.table.rounds as u64, "run");
    let program = cut(&it.program.join(" "), WIDTH - runs.len() - 20);
    view.line(format!("{program}: {runs} of each kind, in turn"));
    view.line("");
    body(view, it, server);
}

/// Shows the figures of each way, and the conclusions.
pub(super) fn body(view: &mut View, it: &Comparison, server: Option<&Server>) {
    let time = match server {
        Some(Server { load: Some(_), .. }) => "one load",
        Some(_) => "CPU time",
        None => "time",
    };
    let columns = format!("<|>{time}|>user|>system|>peak memory|>in huge pages|>faults");
    view.table(&columns, rows(it));
    let served = served(it);
    if !served.is_empty() {
        view.line("");
        view.table("<The load says|>throughput|>p50|>p99", served);
    }
    view.line("");
    for text in sentences(it, server) {
        view.prose(&text);
    }
    let missing = it.table.missing.iter();
    view.lines(missing.map(|missing| format!("Left out: {}: {}", missing.what, missing.why)));
}

fn rows(it: &Comparison) -> impl Iterator<Item = [String; 7]> {
    let ways = it
        .ways
        .iter()
        .map(|way| (way.key.as_str(), way.name.as_str()));
    let sides = std::iter::once((PLAIN, PLAIN)).chain(ways);
    sides.map(|(key, name)| cells(it, key, name))
}

/// Conclusions in sentences.
fn sentences(it: &Comparison, server: Option<&Server>) -> Vec<String> {
    let verdicts = it.ways.iter().flat_map(|way| {
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
    unreached.chain(verdicts).chain(agreement(it)).collect()
}

/// Figures that the load printed, one row per side.
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
        let [throughput, p50, p99] = figures.map(or_none);
        Some([short(name), throughput, p50, p99])
    });
    rows.collect()
}

/// Name of a way, cut to the width of its column.
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
        or_none(seconds.ok().map(duration))
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
pub(crate) fn bytes(bytes: f64) -> String {
    Bytes(bytes as u64).to_string()
}

/// Sentence about time and memory.
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
        _ if value(it, PLAIN, "rss_bytes") < MIN_MEMORY_BYTES => {
            return format!("{}: {time}.", way.name);
        }
        Change::None { .. } => "as much memory".to_owned(),
        Change::Less { factor, .. } => format!("{} less memory", percent(1.0 - 1.0 / factor)),
        Change::More { factor, .. } => format!("{} more memory", percent(factor - 1.0)),
        Change::Unknown => "memory not known".to_owned(),
    };
    format!("{}: {time}, {memory}.", way.name)
}

/// A detected difference with its noise.
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

/// Percentage with two significant digits: a measurement has no more.
pub(crate) fn percent(part: f64) -> String {
    match part * 100.0 {
        percent if percent < 9.95 => format!("{percent:.1}\u{a0}%"),
        percent => format!("{percent:.0}\u{a0}%"),
    }
}

/// Hints for noisy runs, and for a low share on huge pages.
fn advice(it: &Comparison, way: &Compared) -> Vec<String> {
    let mut lines = Vec::new();
    if let Change::None { noise } = way.time
        && noise > HIGH_NOISE
    {
        lines.push(
            "  A smaller difference may hide in that: try a quieter machine, or more --runs."
                .to_owned(),
        );
    }
    let is_low = value(it, &way.key, "huge_percent") < LOW_HUGE_PERCENT;
    if way.is_jumbo && is_low && value(it, PLAIN, "rss_bytes") >= MIN_MEMORY_BYTES {
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

/// Accessor of a compared part.
type Part = fn(&Compared) -> Option<Agreement>;

/// Sentences on whether output and exit status agree.
fn agreement(it: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    if let (Some(status), Some(words)) = (&it.plain_status, &it.plain_words) {
        lines.push(format!(
            "It failed without jumbo too: {status}; the last it said: {words}"
        ));
    }
    let all_same = |part: Part| (it.ways.iter()).all(|way| part(way) == Some(Agreement::Same));
    let streams: [(&str, Part); 2] = [("stdout", |way| way.stdout), ("stderr", |way| way.stderr)];
    let status: Part = |way| way.status;
    let parts = || streams.into_iter().chain([("exit status", status)]);
    if parts().all(|(_, part)| all_same(part)) {
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
            .filter(|(_, part)| part(way) == Some(Agreement::Differs));
        lines.extend(
            differing
                .map(|(stream, _)| format!("WARNING: {name} printed something else on {stream}.")),
        );
    }
    lines.extend(
        parts().filter_map(|(name, part)| match it.ways.first().and_then(part) {
            Some(Agreement::DiffersFromItself) => Some(format!(
                "Its {name} differs from itself, run by run, without jumbo: not compared."
            )),
            None if name != "exit status" => Some(format!(
                "Its {name} was left open by a process that goes on: not compared."
            )),
            _ => all_same(part).then(|| format!("Its {name} was the same in all runs.")),
        }),
    );
    lines
}

/// Cuts a text to `max` characters.
fn cut(text: &str, max: usize) -> String {
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match flat.chars().count() > max {
        true => flat
            .chars()
            .take(max.saturating_sub(3))
            .chain("...".chars())
            .collect(),
        false => flat,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_and_losses_are_put_in_words() {
        assert_eq!(faster(1.12, false), "12\u{a0}% faster");
        assert_eq!(faster(2.04, false), "2.0 times as fast");
        assert_eq!(slower(1.08, false), "8.0\u{a0}% slower");
        assert_eq!(faster(1.25, true), "20\u{a0}% less CPU time");
        assert_eq!(percent(0.034), "3.4\u{a0}%");
    }

    #[test]
    fn a_command_is_cut() {
        assert_eq!(cut("a\n b c", 80), "a b c");
        assert_eq!(cut("abcdefgh", 6), "abc...");
    }
}
