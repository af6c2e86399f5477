//! [`Table`] and [`Row`]: comparisons of two sides of one run.

use std::collections::BTreeMap;

use jumbo_host::kernel::Root;
use serde::Serialize;

use crate::launch::Peer;
use crate::machine::Machine;
use crate::memory::Retakes;
use crate::published::{self, Citation};
use crate::stats::Spread;
use crate::{Error, Settings};

/// Results of a table, as `--json` prints them.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// Name of the table.
    pub table: &'static str,
    /// Short description of the measured object.
    pub what: String,
    /// Number of rounds.
    pub rounds: usize,
    /// Machine that was measured.
    pub machine: Machine,
    /// Rows, from the top.
    pub rows: Vec<Row>,
    pub(crate) ratios: BTreeMap<String, Spread>,
    /// `None` for a value that was not measured; `missing` has the reason.
    values: BTreeMap<String, Option<Value>>,
    /// Samples that waited for the host.
    pub hit: Retakes,
    /// Source of the published figures.
    pub source: Option<Citation>,
    /// Signal that ended the table early: rows have fewer rounds, or are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interrupted: Option<i32>,
    /// Rows that could not be measured, each with its reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
}

/// A part of a table that could not be measured.
#[derive(Clone, Debug, Serialize)]
pub struct Missing {
    /// Short name.
    pub what: &'static str,
    /// Reason.
    pub why: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Value {
    #[serde(flatten)]
    spread: Spread,
    unit: &'static str,
}

/// One quantity, measured on two sides.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name, quantity and unit of both sides.
    #[serde(flatten)]
    pub what: Quantity,
    /// The side that jumbo is compared with.
    pub baseline: Side,
    /// The side that is compared with the baseline.
    pub candidate: Side,
    /// Comparison of the sides.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// Verdict on the candidate.
    pub verdict: Verdict,
}

/// Name, quantity and unit of a row.
#[derive(Clone, Debug, Serialize)]
pub struct Quantity {
    /// Key of the row in `ratios` or `values`.
    pub name: String,
    /// Measured quantity.
    pub measure: String,
    /// Unit of both sides and of a difference: `ms`, `us`, `ns`, `bytes`, `pages` or `faults`.
    pub unit: &'static str,
    /// Published figure of the mechanism, if there is one.
    pub published: Option<&'static str>,
}

/// One side of a row. Every figure is a cost: less is better.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// Name of the side.
    pub name: String,
    /// Spread of its samples.
    #[serde(flatten)]
    pub spread: Spread,
    /// One sample per round.
    pub samples: Vec<f64>,
}

/// Comparison of the two sides of a row, round by round.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// Baseline divided by candidate: above 1 the candidate is better.
    Ratio(Spread),
    /// Candidate minus baseline: below 0 the candidate is better.
    Difference(Spread),
}

/// Verdict on the candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The candidate is better.
    Ahead,
    /// The spread exceeds the difference.
    #[serde(rename = "no_difference_seen")]
    NoDifference,
    /// The candidate is worse.
    Behind,
}

impl Row {
    /// Reports whether the row compares the baseline with itself.
    pub fn is_aa(&self) -> bool {
        self.what.measure.ends_with(", A/A")
    }

    /// Reports whether the row is about jumbo: neither an A/A row nor one of a peer alone.
    pub fn is_of_jumbo(&self) -> bool {
        let name = &self.candidate.name;
        let is_peer = Peer::names().any(|peer| peer == name);
        !self.is_aa() && !is_peer
    }

    /// Text of the verdict for tables. An A/A row is neither ahead nor behind.
    pub fn verdict_text(&self) -> &'static str {
        match self.verdict {
            Verdict::Ahead | Verdict::Behind if self.is_aa() => "differs from itself",
            verdict => verdict.text(),
        }
    }
}

impl Verdict {
    /// Text for tables.
    pub fn text(self) -> &'static str {
        match self {
            Self::Ahead => "ahead",
            Self::NoDifference => "no difference seen",
            Self::Behind => "BEHIND",
        }
    }
}

impl Comparison {
    /// Verdict on the candidate, by one rule for all tables. A difference is seen if all rounds
    /// agree on its direction, and half the distance from minimum to maximum is below the median.
    /// Ratios count by their logarithm.
    pub fn verdict(self) -> Verdict {
        let (median, min, max) = match self {
            Self::Ratio(Spread { median, min, max }) => (median.ln(), min.ln(), max.ln()),
            Self::Difference(Spread { median, min, max }) => (-median, -max, -min),
        };
        let spread = if max > min { (max - min) / 2.0 } else { 0.0 };
        match (min, max) {
            (min, _) if min > 0.0 && median > spread => Verdict::Ahead,
            (_, max) if max < 0.0 && -median > spread => Verdict::Behind,
            _ => Verdict::NoDifference,
        }
    }
}

/// Name of a side and its samples, one per round.
pub type Samples = (String, Vec<f64>);

impl Table {
    /// Creates a table without rows.
    ///
    /// # Errors
    /// [`Error::File`] if the machine cannot be described.
    pub fn new(table: &'static str, what: String, settings: &Settings) -> Result<Self, Error> {
        Ok(Self {
            table,
            what,
            rounds: settings.rounds.get(),
            machine: Machine::read(&Root::host())?,
            rows: Vec::new(),
            ratios: BTreeMap::new(),
            values: BTreeMap::new(),
            hit: Retakes::default(),
            source: published::source(table),
            interrupted: None,
            missing: Vec::new(),
        })
    }

    /// Appends a row.
    pub fn push(&mut self, row: Row) {
        let Quantity { name, unit, .. } = row.what.clone();
        match row.comparison {
            Comparison::Ratio(ratio) => drop(self.ratios.insert(name, ratio)),
            Comparison::Difference(spread) => self.value(name, unit, spread),
        }
        self.rows.push(row);
    }

    pub(crate) fn value(&mut self, name: String, unit: &'static str, spread: Spread) {
        self.values.insert(name, Some(Value { spread, unit }));
    }

    /// Adds a part that is not measured, with the reason.
    pub(crate) fn missing(&mut self, what: &'static str, why: impl Into<String>) {
        let why = why.into();
        self.missing.push(Missing { what, why });
    }

    /// Returns the result, or `None` where the host lacks it: then `what` is missing.
    pub(crate) fn available<T>(
        &mut self,
        what: &'static str,
        result: Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        match result {
            Err(error) if error.is_absence() => {
                self.missing(what, error.to_string());
                Ok(None)
            }
            result => result.map(Some),
        }
    }

    /// Ratio of that name.
    pub fn ratio_of(&self, name: &str) -> Option<Spread> {
        self.ratios.get(name).copied()
    }

    /// Value of that name.
    pub fn value_of(&self, name: &str) -> Option<Spread> {
        self.values.get(name)?.map(|value| value.spread)
    }

    /// Values that belong to no row, with their names and units.
    pub fn beside(&self) -> impl Iterator<Item = (&str, Spread, &'static str)> {
        let is_row = |name: &str| self.rows.iter().any(|row| row.what.name == name);
        let values = self.values.iter().filter(move |(name, _)| !is_row(name));
        values.filter_map(|(name, value)| value.map(|value| (&**name, value.spread, value.unit)))
    }

    /// Records that these entries of `values` are not available here.
    pub(crate) fn without(&mut self, values: &[&str], what: &'static str, why: String) {
        let none = values.iter().map(|name| ((*name).to_owned(), None));
        self.values.extend(none);
        self.missing(what, why);
    }
}

impl Row {
    /// Creates a row whose sides are divided.
    pub fn ratio(what: Quantity, sides: [Samples; 2]) -> Self {
        Self::of(what, sides, |b, c| b / c, Comparison::Ratio)
    }

    /// Creates a row whose sides are subtracted.
    pub fn difference(what: Quantity, sides: [Samples; 2]) -> Self {
        Self::of(what, sides, |b, c| c - b, Comparison::Difference)
    }

    fn of(
        what: Quantity,
        [baseline, candidate]: [Samples; 2],
        compare: fn(f64, f64) -> f64,
        comparison: fn(Spread) -> Comparison,
    ) -> Self {
        let rounds = baseline.1.iter().zip(&candidate.1);
        let compared: Vec<_> = rounds.map(|(&b, &c)| compare(b, c)).collect();
        let side = |(name, samples): Samples| Side {
            name,
            spread: Spread::of(&samples),
            samples,
        };
        let comparison = comparison(Spread::of(&compared));
        Self {
            what,
            comparison,
            verdict: comparison.verdict(),
            baseline: side(baseline),
            candidate: side(candidate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_rows_about_jumbo_have_a_verdict_on_it() {
        let mut it = row(Row::ratio, "same", &[2.0, 2.1, 2.0], &[4.0, 4.2, 4.1]);
        assert!(it.is_of_jumbo() && it.verdict_text() == "BEHIND");
        it.candidate.name = "jemalloc".to_owned();
        assert!(!it.is_of_jumbo());
        it.candidate.name = "plain again".to_owned();
        it.what.measure += ", A/A";
        assert!(!it.is_of_jumbo() && it.verdict_text() == "differs from itself");
    }

    fn row(
        of: fn(Quantity, [Samples; 2]) -> Row,
        name: &str,
        baseline: &[f64],
        candidate: &[f64],
    ) -> Row {
        let sides = [("plain", baseline), ("jumbo run", candidate)];
        let what = Quantity {
            name: name.to_owned(),
            measure: "what".to_owned(),
            unit: "ms",
            published: None,
        };
        of(
            what,
            sides.map(|(name, samples)| (name.to_owned(), samples.to_vec())),
        )
    }

    #[test]
    fn the_shape_of_the_json() {
        let machine = Machine {
            cpu: Some("a processor".to_owned()),
            cores: 2,
            ram: jumbo::units::Bytes(1 << 30),
            kernel: "6.18".to_owned(),
            load: 0.0,
            thp: BTreeMap::from([("enabled", "madvise".to_owned())]),
        };
        let settings = Settings::for_tests();
        let mut table = Table::new("fork", "2 GiB".to_owned(), &settings).unwrap();
        table.machine = machine;
        let mut total = row(Row::ratio, "heap_total", &[4.0, 8.0], &[2.0, 2.0]);
        total.what.published = Some("1.77");
        table.push(total);
        table.push(row(Row::difference, "startup_ms", &[1.0, 1.0], &[3.0, 2.0]));
        table.value("wait_ms".to_owned(), "ms", Spread::of(&[1.0, 3.0]));
        assert_eq!(
            serde_json::to_value(&table).unwrap(),
            json!({
                "table": "fork", "what": "2 GiB", "rounds": 2,
                "machine": {
                    "cpu": "a processor", "cores": 2, "ram": 1 << 30, "kernel": "6.18", "load": 0.0,
                    "thp": {"enabled": "madvise"},
                },
                "ratios": {"heap_total": {"median": 3.0, "min": 2.0, "max": 4.0}},
                "values": {
                    "startup_ms": {"median": 1.5, "min": 1.0, "max": 2.0, "unit": "ms"},
                    "wait_ms": {"median": 2.0, "min": 1.0, "max": 3.0, "unit": "ms"},
                },
                "hit": {"samples": 0, "taken_again": 0, "kept": 0}, "source": null,
                "rows": [{
                    "name": "heap_total", "measure": "what", "unit": "ms",
                    "baseline": {"name": "plain", "median": 6.0, "min": 4.0, "max": 8.0, "samples": [4.0, 8.0]},
                    "candidate": {"name": "jumbo run", "median": 2.0, "min": 2.0, "max": 2.0, "samples": [2.0, 2.0]},
                    "ratio": {"median": 3.0, "min": 2.0, "max": 4.0},
                    "verdict": "ahead", "published": "1.77",
                }, {
                    "name": "startup_ms", "measure": "what", "unit": "ms",
                    "baseline": {"name": "plain", "median": 1.0, "min": 1.0, "max": 1.0, "samples": [1.0, 1.0]},
                    "candidate": {"name": "jumbo run", "median": 2.5, "min": 2.0, "max": 3.0, "samples": [3.0, 2.0]},
                    "difference": {"median": 1.5, "min": 1.0, "max": 2.0},
                    "verdict": "behind", "published": null,
                }],
            })
        );
        let why = "no privilege".to_owned();
        table.missing.push(Missing {
            what: "hugetlb",
            why,
        });
        let missing = &serde_json::to_value(&table).unwrap()["missing"];
        assert_eq!(
            missing,
            &json!([{"what": "hugetlb", "why": "no privilege"}])
        );
    }

    #[test]
    fn a_loss_is_reported_and_noise_is_no_gain() {
        let verdict = |candidate: &[f64]| {
            let [ratio, difference] = [Row::ratio, Row::difference]
                .map(|of| row(of, "x", &[10.0, 10.0, 10.0], candidate).verdict);
            assert_eq!(ratio, difference);
            ratio
        };
        assert_eq!(verdict(&[9.0, 8.0, 9.5]), Verdict::Ahead);
        assert_eq!(verdict(&[11.0, 12.0, 10.5]), Verdict::Behind);
        // The rounds disagree.
        assert_eq!(verdict(&[5.0, 6.0, 10.1]), Verdict::NoDifference);
        // They agree, but their spread exceeds the difference.
        assert_eq!(verdict(&[9.0, 5.0, 9.5]), Verdict::NoDifference);
        assert_eq!(verdict(&[11.0, 18.0, 10.5]), Verdict::NoDifference);
        assert_eq!(verdict(&[10.0, 10.0, 10.0]), Verdict::NoDifference);
    }
}
