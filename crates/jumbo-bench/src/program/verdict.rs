//! Verdicts of a comparison: [`Change`] of a cost, [`Agreement`] of the output.

use serde::Serialize;

use super::RunResult;
use crate::table::{Comparison, Table, Verdict};

/// Change of a cost, relative to the noise between plain runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "change")]
pub enum Change {
    /// No change beyond the noise.
    None {
        /// Noise: 0.03 are 3 percent.
        noise: f64,
    },
    /// Lower cost: plain costs `factor` times as much.
    Less {
        /// Above 1.
        factor: f64,
        /// Noise, as above.
        noise: f64,
    },
    /// Higher cost: `factor` times that of plain.
    More {
        /// Above 1.
        factor: f64,
        /// Noise, as above.
        noise: f64,
    },
    /// The cost was not measured.
    Unknown,
}

/// Minimum change that counts, whatever the A/A row says: a few rounds may agree by chance.
const MIN_CHANGE: f64 = 0.01;

/// Minimum number of rounds that are unlikely to agree by chance.
const MIN_ROUNDS: usize = 5;

impl Change {
    /// Change in a row of ratios (plain divided by the other), with the noise of an A/A row.
    pub fn of(table: &Table, row: &str, aa: &str) -> Self {
        let (Some(ratio), Some(aa)) = (table.ratio_of(row), table.ratio_of(aa)) else {
            return Self::Unknown;
        };
        // In both directions: which of the plain runs is the baseline is chance.
        let noise = aa.max.max(1.0 / aa.min) - 1.0;
        let factor = ratio.median.max(1.0 / ratio.median);
        if !(factor.is_finite() && noise.is_finite()) {
            return Self::Unknown;
        }
        let verdict = Comparison::Ratio(ratio).verdict();
        // Without a clear verdict, or with few rounds, twice the noise is required.
        let is_clear = verdict != Verdict::NoDifference && table.rounds >= MIN_ROUNDS;
        let needed = noise.max(MIN_CHANGE) * if is_clear { 1.0 } else { 2.0 };
        match factor - 1.0 > needed {
            false => Self::None { noise },
            true if ratio.median > 1.0 => Self::Less { factor, noise },
            true => Self::More { factor, noise },
        }
    }
}

/// Agreement of a program's behaviour between two ways to start it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// The same in all runs.
    Same,
    /// The same in all plain runs, and different in another run.
    Differs,
    /// Plain runs differ from each other.
    DiffersFromItself,
    /// Unknown.
    Unknown,
}

impl Agreement {
    /// Agreement of what `see` returns for plain and other runs; `Unknown` if one is `None`.
    pub(super) fn of<T: PartialEq>(
        plain: &[RunResult],
        others: &[RunResult],
        see: impl Fn(&RunResult) -> Option<T>,
    ) -> Self {
        let of = |runs: &[RunResult]| runs.iter().map(&see).collect::<Option<Vec<_>>>();
        let (Some(plain), Some(others)) = (of(plain), of(others)) else {
            return Self::Unknown;
        };
        match plain.first() {
            None => Self::Unknown,
            Some(first) if plain.iter().any(|run| run != first) => Self::DiffersFromItself,
            Some(first) if others.iter().any(|run| run != first) => Self::Differs,
            Some(_) => Self::Same,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::stats::Spread;

    fn change([min, median, max]: [f64; 3], [least, most]: [f64; 2]) -> Change {
        let mut table = Table::new("t", String::new(), &Settings::for_tests()).unwrap();
        table.rounds = MIN_ROUNDS;
        let aa = [least, 1.0, most];
        for (name, [min, median, max]) in [("x", [min, median, max]), ("aa", aa)] {
            let spread = Spread { median, min, max };
            table.ratios.insert(name.into(), spread);
        }
        Change::of(&table, "x", "aa")
    }

    #[test]
    fn differences_within_the_noise_do_not_count() {
        for (row, aa, said) in [
            ([1.01, 1.03, 1.04], [0.96, 1.01], "None"),
            ([1.05, 1.06, 1.07], [0.96, 1.01], "Less"),
            ([0.90, 0.94, 0.96], [0.96, 1.01], "More"),
            // The rounds disagree.
            ([0.99, 1.06, 1.07], [0.96, 1.01], "None"),
            ([0.99, 1.20, 1.27], [0.96, 1.01], "Less"),
            // Two runs alike by chance.
            ([1.005; 3], [1.0, 1.0], "None"),
        ] {
            let change = format!("{:?}", change(row, aa));
            assert!(change.starts_with(said), "{row:?} {aa:?}: {change}");
        }
        let nothing = Table::new("t", String::new(), &Settings::for_tests()).unwrap();
        assert_eq!(Change::of(&nothing, "x", "aa"), Change::Unknown);
    }
}
