//! What a comparison says: [`Change`] of a cost, [`Agreement`] of what a program did.

use serde::Serialize;

use super::Ended;
use crate::table::{Comparison, Table, Verdict};

/// How a cost changed, against what plain runs differ by from each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "change")]
pub enum Change {
    /// Not by more than the same thing differs from itself.
    None {
        /// By so much of it: 0.03 are 3 percent.
        noise: f64,
    },
    /// The cost is less: plain costs so many times as much.
    Less {
        /// Above 1.
        factor: f64,
        /// As above.
        noise: f64,
    },
    /// The cost is more: so many times that of plain.
    More {
        /// Above 1.
        factor: f64,
        /// As above.
        noise: f64,
    },
    /// It was not measured.
    Unknown,
}

/// What is less is not told from noise, whatever the A/A row says: a few rounds may agree by chance.
const LEAST: f64 = 0.01;

/// So many rounds that agree are not likely to do so by chance.
const ENOUGH: usize = 5;

impl Change {
    /// Of a row of ratios, plain divided by the other, with that A/A row beside it.
    pub fn of(table: &Table, row: &str, aa: &str) -> Self {
        let (Some(ratio), Some(aa)) = (table.ratio_of(row), table.ratio_of(aa)) else {
            return Self::Unknown;
        };
        // In both directions: which of the two plain runs is the baseline is chance.
        let noise = aa.max.max(1.0 / aa.min) - 1.0;
        let factor = ratio.median.max(1.0 / ratio.median);
        if !(factor.is_finite() && noise.is_finite()) {
            return Self::Unknown;
        }
        let verdict = Comparison::Ratio(ratio).verdict();
        // Where the row alone shows no difference, or the rounds are few, it has to stand out clearly.
        let is_clear = verdict != Verdict::NoDifference && table.rounds >= ENOUGH;
        let needed = noise.max(LEAST) * if is_clear { 1.0 } else { 2.0 };
        match factor - 1.0 > needed {
            false => Self::None { noise },
            true if ratio.median > 1.0 => Self::Less { factor, noise },
            true => Self::More { factor, noise },
        }
    }
}

/// Whether a program did the same when it was started in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// In all runs.
    Same,
    /// It did the same in all plain runs, and something else in one of these.
    Differs,
    /// Plain runs differ from each other.
    DiffersFromItself,
    /// It cannot be told.
    Unknown,
}

impl Agreement {
    /// Of what `see` finds in plain runs and in others; `None` where it cannot be told.
    pub(super) fn of<T: PartialEq>(
        plain: &[Ended],
        others: &[Ended],
        see: impl Fn(&Ended) -> Option<T>,
    ) -> Self {
        let of = |runs: &[Ended]| runs.iter().map(&see).collect::<Option<Vec<_>>>();
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
        table.rounds = ENOUGH;
        let aa = [least, 1.0, most];
        for (name, [min, median, max]) in [("x", [min, median, max]), ("aa", aa)] {
            table.also(name.into(), Spread { median, min, max });
        }
        Change::of(&table, "x", "aa")
    }

    #[test]
    fn what_the_same_thing_differs_by_is_no_difference() {
        for (row, aa, said) in [
            ([1.01, 1.03, 1.04], [0.96, 1.01], "None"),
            ([1.05, 1.06, 1.07], [0.96, 1.01], "Less"),
            ([0.90, 0.94, 0.96], [0.96, 1.01], "More"),
            // The rounds disagree.
            ([0.99, 1.06, 1.07], [0.96, 1.01], "None"),
            ([0.99, 1.20, 1.27], [0.96, 1.01], "Less"),
            // Two runs that were alike by chance.
            ([1.005; 3], [1.0, 1.0], "None"),
        ] {
            let change = format!("{:?}", change(row, aa));
            assert!(change.starts_with(said), "{row:?} {aa:?}: {change}");
        }
        let nothing = Table::new("t", String::new(), &Settings::for_tests()).unwrap();
        assert_eq!(Change::of(&nothing, "x", "aa"), Change::Unknown);
    }
}
