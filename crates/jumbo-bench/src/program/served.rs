//! [`Served`]: throughput and latencies that a load prints; [`Pattern`]: for the output of unknown
//! tools.

use std::str::FromStr;

use regex_lite::Regex;
use serde::Serialize;

use crate::stats::median;

/// Figures that a load printed. Those of pgbench, redis-benchmark, wrk and ab are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Served {
    /// Requests or transactions per second: the mean if the tool prints several.
    pub throughput: Option<f64>,
    /// Median latency, in milliseconds.
    pub p50_ms: Option<f64>,
    /// 99th percentile of the latency, in milliseconds: the largest if the tool prints several.
    pub p99_ms: Option<f64>,
}

/// A regular expression that finds figures in the output of a load.
#[derive(Clone, Debug)]
pub struct Pattern(Regex);

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

impl Served {
    /// Reads the output of a load. `pattern` takes precedence over known tools.
    pub(super) fn read(text: &str, pattern: Option<&Pattern>) -> Self {
        let own = pattern.map_or_else(Self::default, |pattern| pattern.read(text));
        let known = KNOWN_LINES
            .into_iter()
            .filter_map(|regex| Regex::new(regex).ok());
        let known = Self::found(&known.collect::<Vec<_>>(), text);
        Self {
            throughput: own.throughput.or(known.throughput),
            p50_ms: own.p50_ms.or(known.p50_ms),
            p99_ms: own.p99_ms.or(known.p99_ms),
        }
    }

    /// Median of each figure; `None` without any figure.
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

    /// Figures of all named groups. A latency is in milliseconds unless there is a group `unit`.
    fn found(all: &[Regex], text: &str) -> Self {
        let (mut throughput, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new());
        for captures in all.iter().flat_map(|regex| regex.captures_iter(text)) {
            let number = |name| captures.name(name)?.as_str().parse::<f64>().ok();
            let to_ms = match captures.name("unit").map(|unit| unit.as_str()) {
                Some("us") => 1e-3,
                Some("s") => 1e3,
                Some("m") => 6e4,
                _ => 1.0,
            };
            throughput.extend(number("throughput"));
            p50.extend(number("p50").map(|p50| p50 * to_ms));
            p99.extend(number("p99").map(|p99| p99 * to_ms));
        }
        let mean = |figures: &[f64]| {
            (!figures.is_empty()).then(|| figures.iter().sum::<f64>() / figures.len() as f64)
        };
        Self {
            throughput: mean(&throughput),
            p50_ms: mean(&p50),
            p99_ms: p99.into_iter().reduce(f64::max),
        }
    }
}

impl Pattern {
    /// Figures of the named groups; without them, the first group is a latency in milliseconds.
    fn read(&self, text: &str) -> Served {
        let is_named = |name: &str| ["throughput", "p50", "p99"].contains(&name);
        if self.0.capture_names().flatten().any(is_named) {
            return Served::found(std::slice::from_ref(&self.0), text);
        }
        let captures = self.0.captures_iter(text);
        let latencies = captures.filter_map(|captures| captures.get(1)?.as_str().parse().ok());
        let mut latencies: Vec<f64> = latencies.collect();
        latencies.sort_by(f64::total_cmp);
        // Nearest-rank percentile.
        let rank = |percent: usize| latencies.len().saturating_mul(percent).div_ceil(100);
        let at = |percent| latencies.get(rank(percent).saturating_sub(1)).copied();
        Served {
            throughput: None,
            p50_ms: at(50),
            p99_ms: at(99),
        }
    }
}

/// Lines of redis-benchmark, with `-q` and in its last table; pgbench; wrk; ab; both latencies.
const KNOWN_LINES: [&str; 7] = [
    r"(?<throughput>[0-9.]+) requests per second(, p50=(?<p50>[0-9.]+))?",
    r"avg +min +p50 +p95 +p99 +max\s+[0-9.]+ +[0-9.]+ +(?<p50>[0-9.]+) +[0-9.]+ +(?<p99>[0-9.]+)",
    r"tps = (?<throughput>[0-9.]+)",
    r"Requests/sec: +(?<throughput>[0-9.]+)",
    r"Requests per second: +(?<throughput>[0-9.]+)",
    r"(?m)^ *50(\.000)?% +(?<p50>[0-9.]+)(?<unit>[mu]?s|m)?\s*$",
    r"(?m)^ *99(\.000)?% +(?<p99>[0-9.]+)(?<unit>[mu]?s|m)?\s*$",
];

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
    fn known_tools_are_parsed() {
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
    fn each_figure_has_its_median() {
        let of = |throughput| Served {
            throughput,
            ..Served::default()
        };
        let all = [of(Some(1.0)), of(Some(3.0)), of(Some(8.0)), of(None)];
        assert_eq!(Served::median(&all), Some(of(Some(3.0))));
        assert_eq!(Served::median(&[of(None)]), None);
    }
}
