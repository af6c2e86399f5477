//! [`Table`] and [`Row`]: two sides of one run, held against each other.

use std::borrow::Cow;
use std::collections::BTreeMap;

use jumbo::units::counted;
use serde::Serialize;

use crate::machine::Machine;
use crate::memory::Hit;
use crate::stats::{Spread, paired};

/// What a table found: what `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    table: &'static str,
    /// What was measured, in a few words.
    what: String,
    rounds: usize,
    machine: Machine,
    rows: Vec<Row>,
    ratios: BTreeMap<Cow<'static, str>, Spread>,
    values: BTreeMap<Cow<'static, str>, Value>,
    /// The samples that waited for the host.
    hit: Hit,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    missing: Vec<Missing>,
}

/// What could not be measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Missing {
    /// What, in a few words.
    pub what: &'static str,
    /// Why not.
    pub why: String,
}

/// A spread that needs its unit to be understood.
#[derive(Clone, Copy, Debug, Serialize)]
struct Value {
    #[serde(flatten)]
    spread: Spread,
    unit: Unit,
}

/// One measure, on two sides.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The row's key in `ratios` or `values`.
    pub name: Cow<'static, str>,
    /// What was measured.
    pub measure: Cow<'static, str>,
    /// Of both sides, and of a difference.
    pub unit: Unit,
    /// What jumbo is held against.
    pub baseline: Side,
    /// What is held against it.
    pub candidate: Side,
    /// How they compare.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// What that says about the candidate.
    pub verdict: Verdict,
    /// The figure that came with the mechanism, where there is one.
    pub published: Option<&'static str>,
}

/// One side of a row: every figure is a cost, so less is better.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// What ran.
    pub name: Cow<'static, str>,
    /// Its samples, one a round.
    #[serde(flatten)]
    pub spread: Spread,
}

/// How the two sides of a row compare, round by round.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// The baseline divided by the candidate: above 1 the candidate is ahead.
    Ratio(Spread),
    /// The candidate minus the baseline: below 0 the candidate is ahead.
    Difference(Spread),
}

/// What a comparison says about the candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was better in every round.
    Ahead,
    /// The rounds do not agree.
    Even,
    /// It was worse in every round.
    Behind,
}

/// What a side's figures are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
    /// Bytes.
    Bytes,
    /// Page faults.
    Faults,
}

/// A side's name and its samples, one a round.
pub type Samples<'a, N = &'static str> = (N, &'a [f64]);

impl Table {
    /// A table without rows.
    pub fn new(table: &'static str, what: String, rounds: usize, machine: Machine) -> Self {
        Self {
            table,
            what,
            rounds,
            machine,
            rows: Vec::new(),
            ratios: BTreeMap::new(),
            values: BTreeMap::new(),
            hit: Hit::default(),
            missing: Vec::new(),
        }
    }

    /// Adds a row below the others.
    pub fn push(&mut self, row: Row) {
        match row.comparison {
            Comparison::Ratio(ratio) => {
                self.ratios.insert(row.name.clone(), ratio);
            }
            Comparison::Difference(spread) => {
                let unit = row.unit;
                self.values.insert(row.name.clone(), Value { spread, unit });
            }
        }
        self.rows.push(row);
    }

    /// Adds a figure that is compared with nothing: it stands in `values`, and in no row.
    pub fn value(&mut self, name: impl Into<Cow<'static, str>>, unit: Unit, samples: &[f64]) {
        let spread = Spread::of(samples);
        self.values.insert(name.into(), Value { spread, unit });
    }

    /// Says what could not be measured, and why: rows that are left out are not left out in silence.
    pub fn missing(&mut self, what: &'static str, why: String) {
        self.missing.push(Missing { what, why });
    }

    /// What could not be measured.
    pub fn all_missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Says which samples waited for the host.
    pub(crate) fn set_hit(&mut self, hit: Hit) {
        self.hit = hit;
    }

    /// The samples that waited for the host.
    pub fn hit(&self) -> Hit {
        self.hit
    }

    /// The rows, from the top.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Where it was measured.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// What was measured and how often, in one line.
    pub fn title(&self) -> String {
        let rounds = counted(self.rounds as u64, "round");
        format!("{}: {}, {rounds}", self.table, self.what)
    }
}

impl Row {
    /// A row whose sides are divided.
    pub fn ratio(
        (name, measure, unit): (
            impl Into<Cow<'static, str>>,
            impl Into<Cow<'static, str>>,
            Unit,
        ),
        baseline: Samples<'_, impl Into<Cow<'static, str>>>,
        candidate: Samples<'_, impl Into<Cow<'static, str>>>,
    ) -> Self {
        let ratio = Spread::of(&paired(baseline.1, candidate.1, |b, c| b / c));
        Self {
            name: name.into(),
            measure: measure.into(),
            unit,
            baseline: Side::of(baseline),
            candidate: Side::of(candidate),
            comparison: Comparison::Ratio(ratio),
            verdict: Verdict::of(ratio.min > 1.0, ratio.max < 1.0),
            published: None,
        }
    }

    /// A row whose sides are subtracted.
    pub fn difference(
        (name, measure, unit): (
            impl Into<Cow<'static, str>>,
            impl Into<Cow<'static, str>>,
            Unit,
        ),
        baseline: Samples<'_, impl Into<Cow<'static, str>>>,
        candidate: Samples<'_, impl Into<Cow<'static, str>>>,
    ) -> Self {
        let difference = Spread::of(&paired(baseline.1, candidate.1, |b, c| c - b));
        Self {
            name: name.into(),
            measure: measure.into(),
            unit,
            baseline: Side::of(baseline),
            candidate: Side::of(candidate),
            comparison: Comparison::Difference(difference),
            verdict: Verdict::of(difference.max < 0.0, difference.min > 0.0),
            published: None,
        }
    }

    /// The same row with the published figure beside it.
    #[must_use]
    pub fn published(self, figure: &'static str) -> Self {
        Self {
            published: Some(figure),
            ..self
        }
    }
}

impl Side {
    fn of((name, samples): Samples<'_, impl Into<Cow<'static, str>>>) -> Self {
        Self {
            name: name.into(),
            spread: Spread::of(samples),
        }
    }
}

impl Verdict {
    fn of(always_better: bool, always_worse: bool) -> Self {
        match (always_better, always_worse) {
            (true, _) => Self::Ahead,
            (_, true) => Self::Behind,
            _ => Self::Even,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn machine() -> Machine {
        Machine {
            cpu: Some("a processor".to_owned()),
            cores: 2,
            ram: jumbo::units::Bytes(1 << 30),
            kernel: "6.18".to_owned(),
            load: 0.0,
            thp: BTreeMap::from([("enabled", "madvise".to_owned())]),
        }
    }

    #[test]
    fn the_shape_of_the_json() {
        let mut table = Table::new("heap", "2 GiB".to_owned(), 2, machine());
        let total = ("heap_total", "total", Unit::Ms);
        let start = ("startup_ms", "start-up", Unit::Ms);
        table.push(
            Row::ratio(total, ("plain", &[4.0, 8.0]), ("jumbo run", &[2.0, 2.0])).published("1.77"),
        );
        table.push(Row::difference(
            start,
            ("direct", &[1.0, 1.0]),
            ("jumbo run", &[3.0, 2.0]),
        ));
        table.value("wait_ms", Unit::Ms, &[1.0, 3.0]);
        assert_eq!(
            serde_json::to_value(&table).unwrap(),
            json!({
                "table": "heap",
                "what": "2 GiB",
                "rounds": 2,
                "machine": {
                    "cpu": "a processor", "cores": 2, "ram": 1 << 30, "kernel": "6.18", "load": 0.0,
                    "thp": {"enabled": "madvise"},
                },
                "rows": [
                    {
                        "name": "heap_total", "measure": "total", "unit": "ms",
                        "baseline": {"name": "plain", "median": 6.0, "min": 4.0, "max": 8.0},
                        "candidate": {"name": "jumbo run", "median": 2.0, "min": 2.0, "max": 2.0},
                        "ratio": {"median": 3.0, "min": 2.0, "max": 4.0},
                        "verdict": "ahead", "published": "1.77",
                    },
                    {
                        "name": "startup_ms", "measure": "start-up", "unit": "ms",
                        "baseline": {"name": "direct", "median": 1.0, "min": 1.0, "max": 1.0},
                        "candidate": {"name": "jumbo run", "median": 2.5, "min": 2.0, "max": 3.0},
                        "difference": {"median": 1.5, "min": 1.0, "max": 2.0},
                        "verdict": "behind", "published": null,
                    },
                ],
                "ratios": {"heap_total": {"median": 3.0, "min": 2.0, "max": 4.0}},
                "values": {
                    "startup_ms": {"median": 1.5, "min": 1.0, "max": 2.0, "unit": "ms"},
                    "wait_ms": {"median": 2.0, "min": 1.0, "max": 3.0, "unit": "ms"},
                },
                "hit": {"samples": 0, "taken_again": 0, "kept": 0},
            })
        );
        table.missing("hugetlb", "no privilege".to_owned());
        assert_eq!(
            serde_json::to_value(&table).unwrap()["missing"],
            json!([{"what": "hugetlb", "why": "no privilege"}])
        );
    }

    #[test]
    fn a_loss_is_called_one_and_noise_is_not_a_win() {
        let what = ("x", "x", Unit::Ns);
        let verdict = |candidate: &[f64]| {
            let ratio = Row::ratio(what, ("b", &[10.0, 10.0, 10.0]), ("c", candidate)).verdict;
            let difference =
                Row::difference(what, ("b", &[10.0, 10.0, 10.0]), ("c", candidate)).verdict;
            assert_eq!(ratio, difference);
            ratio
        };
        assert_eq!(verdict(&[9.0, 8.0, 9.9]), Verdict::Ahead);
        assert_eq!(verdict(&[11.0, 12.0, 10.1]), Verdict::Behind);
        assert_eq!(verdict(&[5.0, 6.0, 10.1]), Verdict::Even);
        assert_eq!(verdict(&[10.0, 10.0, 10.0]), Verdict::Even);
    }
}
