//! Statistics of samples: [`Spread`], [`median`].

use serde::Serialize;

/// Median and range of samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// Spread of `samples`; NaN (`null` in JSON) without samples.
    pub fn of(samples: &[f64]) -> Self {
        Self {
            median: median(samples),
            min: minimum(samples),
            max: samples.iter().copied().fold(f64::NAN, f64::max),
        }
    }
}

/// Middle sample, or the mean of the two middle ones; NaN without samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.len() % 2, sorted.as_slice()) {
        (_, []) => f64::NAN,
        (0, sorted) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        (_, sorted) => sorted[middle],
    }
}

/// Minimum; NaN without samples.
pub(crate) fn minimum(samples: &[f64]) -> f64 {
    samples.iter().copied().fold(f64::NAN, f64::min)
}

/// Quantile `part` (0 to 1) of the samples; NaN without samples.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a place in the samples"
)]
pub(crate) fn quantile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (sorted.len() as f64 * part) as usize;
    let at = at.min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[-1.0]), -1.0);
        assert!(median(&[]).is_nan() && Spread::of(&[]).max.is_nan());
    }

    proptest! {
        #[test]
        fn the_median_lies_within_and_splits(samples in prop::collection::vec(-1e9..1e9f64, 1..60)) {
            let spread = Spread::of(&samples);
            prop_assert!(spread.min <= spread.median && spread.median <= spread.max);
            let below = samples.iter().filter(|&&sample| sample < spread.median).count();
            let above = samples.iter().filter(|&&sample| sample > spread.median).count();
            prop_assert!(below <= samples.len() / 2 && above <= samples.len() / 2);
        }
    }
}
