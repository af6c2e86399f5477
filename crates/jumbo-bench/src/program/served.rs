//! [`Served`]: throughput and latencies of a load, as its tool prints them; [`Pattern`]: where a tool is none that is known.

use std::str::FromStr;

use regex_lite::Regex;
use serde::Serialize;

use crate::stats::median;

/// The figures that a load printed. Those of pgbench, redis-benchmark, wrk and ab are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Served {
    /// Requests or transactions a second: the mean where the tool prints several.
    pub throughput: Option<f64>,
    /// The median of the latencies, in milliseconds.
    pub p50_ms: Option<f64>,
    /// The latency that one request in a hundred exceeds, in milliseconds: the largest where the tool prints several.
    pub p99_ms: Option<f64>,
}

/// A regular expression that finds figures in the output of a load.
#[derive(Clone, Debug)]
pub struct Pattern(Regex);

/// The names of its groups.
const GROUPS: [&str; 3] = ["throughput", "p50", "p99"];

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let regex = Regex::new(text).map_err(|error| error.to_string())?;
        match regex.captures_len() {
            1 => Err("it has no group, such as `latency: ([0-9.]+) ms`".to_owned()),
            _ => Ok(Self(regex)),
        }
    }
}

/// All that a tool printed of each figure.
#[derive(Default)]
struct Found {
    throughput: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Served {
    /// Reads what a load printed. A `pattern` comes before what is known of tools.
    pub(super) fn read(text: &str, pattern: Option<&Pattern>) -> Self {
        let own = pattern.map_or_else(Self::default, |pattern| pattern.read(text));
        let known = known(text);
        Self {
            throughput: own.throughput.or(known.throughput),
            p50_ms: own.p50_ms.or(known.p50_ms),
            p99_ms: own.p99_ms.or(known.p99_ms),
        }
    }

    /// The median of each figure; `None` where there is none of any.
    pub(super) fn median(all: &[Self]) -> Option<Self> {
        let of = |figure: fn(&Self) -> Option<f64>| {
            let figures: Vec<_> = all.iter().filter_map(figure).collect();
            (!figures.is_empty()).then(|| median(&figures))
        };
        let median = Self {
            throughput: of(|served| served.throughput),
            p50_ms: of(|served| served.p50_ms),
            p99_ms: of(|served| served.p99_ms),
        };
        (median != Self::default()).then_some(median)
    }
}

impl Found {
    fn served(&self) -> Served {
        let mean = |figures: &[f64]| {
            (!figures.is_empty()).then(|| figures.iter().sum::<f64>() / figures.len() as f64)
        };
        Served {
            throughput: mean(&self.throughput),
            p50_ms: mean(&self.p50),
            p99_ms: self.p99.iter().copied().reduce(f64::max),
        }
    }
}

impl Pattern {
    /// The figures of its named groups; without these the first group is a latency in milliseconds, a request a match.
    fn read(&self, text: &str) -> Served {
        let mut found = Found::default();
        let is_named = |name: &str| GROUPS.contains(&name);
        if self.0.capture_names().flatten().any(is_named) {
            for captures in self.0.captures_iter(text) {
                let number = |name| captures.name(name)?.as_str().parse().ok();
                found.throughput.extend::<Option<f64>>(number("throughput"));
                found.p50.extend::<Option<f64>>(number("p50"));
                found.p99.extend::<Option<f64>>(number("p99"));
            }
            return found.served();
        }
        let captures = self.0.captures_iter(text);
        let latencies = captures.filter_map(|captures| captures.get(1)?.as_str().parse().ok());
        let mut latencies: Vec<f64> = latencies.collect();
        latencies.sort_by(f64::total_cmp);
        // The nearest rank.
        let rank = |percent: usize| latencies.len().saturating_mul(percent).div_ceil(100);
        let at = |percent| latencies.get(rank(percent).saturating_sub(1)).copied();
        Served {
            throughput: None,
            p50_ms: at(50),
            p99_ms: at(99),
        }
    }
}

/// The figures of the tools that are known.
fn known(text: &str) -> Served {
    let mut found = Found::default();
    // The columns of redis-benchmark's last table, once their names were seen.
    let mut columns: Vec<&str> = Vec::new();
    for line in text.split(['\n', '\r']) {
        let words: Vec<_> = line.split_whitespace().collect();
        if let Some((before, after)) = line.split_once(" requests per second") {
            // redis-benchmark: `SET: 31250.00 requests per second, p50=0.383 msec`.
            found.throughput.extend(last_number(before));
            let p50 = after.split_once("p50=").map(|(_, rest)| rest);
            found.p50.extend(p50.and_then(first_number));
        } else if let ["avg", "min", rest @ ..] = words.as_slice() {
            columns = ["avg", "min"].iter().chain(rest).copied().collect();
        } else if !columns.is_empty() {
            for (column, value) in columns.drain(..).zip(&words) {
                let value = value.parse().ok();
                match column {
                    "p50" => found.p50.extend::<Option<f64>>(value),
                    "p99" => found.p99.extend::<Option<f64>>(value),
                    _ => {}
                }
            }
        } else {
            match words.as_slice() {
                // pgbench.
                ["tps", "=", tps, ..] => found.throughput.extend(first_number(tps)),
                // wrk.
                ["Requests/sec:", rate, ..] => found.throughput.extend(first_number(rate)),
                // ab.
                ["Requests", "per", "second:", rate, ..] => {
                    found.throughput.extend(first_number(rate));
                }
                // wrk --latency, and ab.
                [percent @ ("50%" | "50.000%" | "99%" | "99.000%"), latency] => {
                    let list = match percent.starts_with("50") {
                        true => &mut found.p50,
                        false => &mut found.p99,
                    };
                    list.extend(milliseconds(latency));
                }
                _ => {}
            }
        }
    }
    found.served()
}

fn first_number(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    text.get(..end.unwrap_or(text.len()))?.parse().ok()
}

fn last_number(text: &str) -> Option<f64> {
    text.split_whitespace().next_back()?.parse().ok()
}

/// `1.20ms`, `350.00us`, `1.02s`, `2.00m`, and a number of milliseconds.
fn milliseconds(text: &str) -> Option<f64> {
    let at = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, unit) = text.split_at(at.unwrap_or(text.len()));
    let factor = match unit {
        "us" => 1e-3,
        "" | "ms" => 1.0,
        "s" => 1e3,
        "m" => 6e4,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> [Option<f64>; 3] {
        let Served {
            throughput,
            p50_ms,
            p99_ms,
        } = Served::read(text, None);
        [throughput, p50_ms, p99_ms]
    }

    #[test]
    fn the_tools_that_are_known_are_read() {
        let quiet = "SET: rps=0.0 (overall: 0.0) avg_msec=-nan\r   \rSET: 31250.00 requests per second, p50=0.300 msec\n\
                     GET: 33750.00 requests per second, p50=0.500 msec\n";
        assert_eq!(read(quiet), [Some(32500.0), Some(0.4), None]);
        let redis = "98.500% <= 5.103 milliseconds (cumulative count 1970)\n\
                     Summary:\n  throughput summary: 42553.19 requests per second\n  latency summary (msec):\n\
                     \x20         avg       min       p50       p95       p99       max\n\
                     \x20       0.836     0.096     0.351     4.327     5.263     5.375\n";
        assert_eq!(read(redis), [Some(42553.19), Some(0.351), Some(5.263)]);
        let pgbench = "latency average = 0.811 ms\ninitial connection time = 2.1 ms\n\
                       tps = 1233.04 (without initial connection time)\n";
        assert_eq!(read(pgbench), [Some(1233.04), None, None]);
        let wrk = "  Latency Distribution\n     50%  635.00us\n     75%    1.10ms\n     99%    1.02s \n\
                   Requests/sec:  748868.53\nTransfer/sec:    606.33MB\n";
        assert_eq!(read(wrk), [Some(748_868.53), Some(0.635), Some(1020.0)]);
        let ab = "Requests per second:    7014.20 [#/sec] (mean)\n  50%      1\n  99%      3\n";
        assert_eq!(read(ab), [Some(7014.2), Some(1.0), Some(3.0)]);
        assert_eq!(read("done\n"), [None; 3]);
    }

    #[test]
    fn a_pattern_names_figures_or_finds_latencies() {
        let pattern: Pattern = r"rate (?<throughput>[0-9.]+).*tail (?<p99>[0-9.]+)"
            .parse()
            .unwrap();
        let served = Served::read("rate 12.5/s tail 3 ms\n", Some(&pattern));
        assert_eq!((served.throughput, served.p99_ms), (Some(12.5), Some(3.0)));
        let pattern: Pattern = "took ([0-9]+) ms".parse().unwrap();
        let text: String = (1..=200).map(|ms| format!("took {ms} ms\n")).collect();
        let served = Served::read(&text, Some(&pattern));
        assert_eq!((served.p50_ms, served.p99_ms), (Some(100.0), Some(198.0)));
        assert!(
            "no group"
                .parse::<Pattern>()
                .unwrap_err()
                .contains("no group")
        );
        assert!("(".parse::<Pattern>().is_err());
    }

    #[test]
    fn the_median_is_of_each_figure() {
        let of = |throughput| Served {
            throughput,
            ..Served::default()
        };
        let all = [of(Some(1.0)), of(Some(3.0)), of(Some(8.0)), of(None)];
        assert_eq!(Served::median(&all), Some(of(Some(3.0))));
        assert_eq!(Served::median(&[of(None)]), None);
    }
}
