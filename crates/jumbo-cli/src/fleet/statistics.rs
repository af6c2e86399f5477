//! The difference of two arms: [`Difference`] of their pods, [`FleetSaving`] of their totals.
//!
//! Each pod is one value: the samples of a pod are not independent. The interval has the ratios
//! that the Mann-Whitney test does not reject (Hodges and Lehmann). The saving of a fleet depends
//! on totals instead, so its interval is a bootstrap of means.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF as _, Normal};
use statrs::stats_tests::Alternative;
use statrs::stats_tests::mannwhitneyu::{MannWhitneyUMethod, mannwhitneyu};

/// Minimum number of pods in an arm: with three in each, no difference reaches 5 %.
pub(super) const MIN_PODS: usize = 4;

/// Rate of false positives.
const ALPHA: f64 = 0.05;

/// Rate of true positives that an experiment is planned for.
pub(super) const TARGET_POWER: f64 = 0.8;

/// So many times the pods are beyond any experiment.
const MAX_FACTOR: f64 = 100.0;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 2000;

/// Quantile of the standard normal distribution.
pub(super) fn normal_quantile(part: f64) -> f64 {
    Normal::standard().inverse_cdf(part)
}

/// Ratio of two arms, baseline divided by candidate: above 1 the candidate needs less.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    /// Median of the ratios of all pairs of pods.
    pub(super) ratio: f64,
    /// Ends of the 95 % confidence interval.
    pub(super) low: f64,
    pub(super) high: f64,
    /// Two-sided p of the Mann-Whitney U test.
    pub(super) p: f64,
    pub(super) seen: bool,
}

impl Difference {
    /// Compares positive values; `None` if an arm has fewer than [`MIN_PODS`].
    pub(super) fn of(baseline: &[f64], candidate: &[f64]) -> Option<Self> {
        if baseline.len().min(candidate.len()) < MIN_PODS {
            return None;
        }
        // Not `Automatic`: its exact method enumerates all combinations, for example 8 of 1008.
        let method = MannWhitneyUMethod::AsymptoticInclContinuityCorrection;
        let (_, p) = mannwhitneyu(baseline, candidate, method, Alternative::TwoSided).ok()?;
        let shifts = Shifts::of(baseline, candidate);
        let [low, high] = shifts.interval().map(f64::exp);
        Some(Self {
            ratio: shifts.median().exp(),
            low,
            high,
            p,
            // The interval ignores ties; with many, it is wider than the test.
            seen: p < ALPHA && !(low..=high).contains(&1.0),
        })
    }

    /// Returns how many pods would show a difference that these did not, with 80 % power: the
    /// interval becomes shorter by the square root of their number.
    pub(super) fn needed_pods(&self, pods: usize) -> Option<f64> {
        let critical = normal_quantile(1.0 - ALPHA / 2.0);
        let error = (self.high.ln() - self.low.ln()) / 2.0 / critical;
        let factor = ((critical + normal_quantile(TARGET_POWER)) * error / self.ratio.ln()).powi(2);
        (!self.seen && factor < MAX_FACTOR).then(|| (factor * pods as f64).ceil())
    }
}

/// Differences of the logarithms of all pairs. They are computed when needed: too many to store.
pub(super) struct Shifts {
    baseline: Vec<f64>,
    candidate: Vec<f64>,
}

impl Shifts {
    pub(super) fn of(baseline: &[f64], candidate: &[f64]) -> Self {
        let [baseline, candidate] = [baseline, candidate].map(|values| {
            let mut logs: Vec<_> = values.iter().map(|value| value.ln()).collect();
            logs.sort_unstable_by(f64::total_cmp);
            logs
        });
        Self {
            baseline,
            candidate,
        }
    }

    fn pairs(&self) -> usize {
        self.baseline.len() * self.candidate.len()
    }

    /// Number of pairs with a difference of at most `shift`.
    fn count(&self, shift: f64) -> usize {
        let (mut count, mut above) = (0, 0);
        for baseline in &self.baseline {
            let rest = self.candidate.get(above..).unwrap_or_default();
            above += rest.iter().take_while(|it| baseline - *it > shift).count();
            count += self.candidate.len() - above;
        }
        count
    }

    /// The `rank`th smallest difference, counted from 1.
    fn smallest(&self, rank: usize) -> f64 {
        let (Some(first), Some(last)) = (self.baseline.first(), self.baseline.last()) else {
            return f64::NAN;
        };
        let ends = self.candidate.last().zip(self.candidate.first());
        let Some((mut low, mut high)) = ends.map(|(most, least)| (first - most, last - least))
        else {
            return f64::NAN;
        };
        if self.count(low) >= rank {
            return low;
        }
        loop {
            let middle = f64::midpoint(low, high);
            match self.count(middle) >= rank {
                _ if middle <= low || middle >= high => return high,
                true => high = middle,
                false => low = middle,
            }
        }
    }

    fn median(&self) -> f64 {
        let pairs = self.pairs();
        f64::midpoint(
            self.smallest(pairs.div_ceil(2)),
            self.smallest(pairs / 2 + 1),
        )
    }

    /// Rank of the interval's lower end: U of the most extreme result that the test accepts.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among the pairs, of at least 1"
    )]
    fn rank(&self) -> usize {
        let (pairs, pods) = (self.pairs(), self.baseline.len() + self.candidate.len());
        let deviation = (pairs as f64 * (pods as f64 + 1.0) / 12.0).sqrt();
        let rank = pairs as f64 / 2.0 - 0.5 - normal_quantile(1.0 - ALPHA / 2.0) * deviation;
        rank.ceil().max(1.0) as usize
    }

    fn interval(&self) -> [f64; 2] {
        let rank = self.rank();
        [rank, self.pairs() + 1 - rank].map(|rank| self.smallest(rank))
    }

    /// Reports whether the interval excludes 0, without computing the interval.
    pub(super) fn differ(&self) -> bool {
        let (rank, below) = (self.rank(), self.count(0.0));
        below < rank || self.pairs() - below < rank
    }
}

/// Part of a pod in the totals: `sum` / `weight` is its value, `amount` the resource that it uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct PodPart {
    pub(super) sum: f64,
    pub(super) weight: f64,
    pub(super) amount: f64,
}

/// Mean amount that a pod of the baseline would save.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct FleetSaving {
    pub(super) amount: f64,
    /// Ends of the 95 % confidence interval.
    pub(super) low: f64,
    pub(super) high: f64,
}

impl FleetSaving {
    pub(super) fn of(
        baseline: &[PodPart],
        candidate: &[PodPart],
        random: &mut fastrand::Rng,
    ) -> Self {
        let mut draw = |parts: &[PodPart]| -> Vec<PodPart> {
            let picks = parts.iter().filter_map(|_| random.choice(parts));
            picks.copied().collect()
        };
        let mut drawn: Vec<_> = (0..RESAMPLES)
            .map(|_| saved(&draw(baseline), &draw(candidate)))
            .collect();
        drawn.sort_unstable_by(f64::total_cmp);
        let cut = RESAMPLES / 40;
        let end = |at: usize| drawn.get(at).copied().unwrap_or(f64::NAN);
        Self {
            amount: saved(baseline, candidate),
            low: end(cut),
            high: end(RESAMPLES - 1 - cut),
        }
    }

    pub(super) fn times(self, pods: f64) -> Self {
        Self {
            amount: self.amount * pods,
            low: self.low * pods,
            high: self.high * pods,
        }
    }
}

fn saved(baseline: &[PodPart], candidate: &[PodPart]) -> f64 {
    let [before, after] = [baseline, candidate].map(|parts| {
        let sum: f64 = parts.iter().map(|part| part.sum).sum();
        sum / parts.iter().map(|part| part.weight).sum::<f64>()
    });
    mean(baseline.iter().map(|part| part.amount)) * (1.0 - after / before)
}

/// Mean of the values; NaN without values.
pub(super) fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::simulate::normal;

    fn values(random: &mut fastrand::Rng, count: usize, factor: f64, spread: f64) -> Vec<f64> {
        (0..count)
            .map(|_| factor * (spread * normal(random)).exp())
            .collect()
    }

    #[test]
    fn ranks_are_those_of_all_pairs_sorted() {
        let mut random = fastrand::Rng::with_seed(1);
        for [many, few] in [[4, 4], [7, 5], [20, 31]] {
            let [a, b] = [many, few].map(|count| values(&mut random, count, 1.0, 0.1));
            let mut all: Vec<_> = a
                .iter()
                .flat_map(|a| b.iter().map(|b| a.ln() - b.ln()))
                .collect();
            all.sort_unstable_by(f64::total_cmp);
            let shifts = Shifts::of(&a, &b);
            for (index, expected) in all.iter().enumerate() {
                assert_eq!(shifts.smallest(index + 1), *expected);
            }
            let middle = jumbo_bench::stats::median(&all);
            assert!((shifts.median() - middle).abs() < 1e-12);
        }
    }

    /// R: `wilcox.test(log(a), log(b), conf.int=TRUE, exact=FALSE)`: W = 20, p = 0.02157.
    #[test]
    fn test_and_interval_agree_with_each_other() {
        let a = [1.1, 1.2, 1.4, 1.3, 1.6];
        let apart = Difference::of(&a, &[1.0, 0.9, 0.8, 0.7]).unwrap();
        assert!(
            apart.seen && (apart.p - 0.019_964).abs() < 1e-6,
            "{apart:?}"
        );
        assert!(apart.low > 1.0 && apart.low < apart.ratio && apart.ratio < apart.high);
        let mut random = fastrand::Rng::with_seed(2);
        for _ in 0..300 {
            let [a, b] = [1.0, 1.05].map(|factor| values(&mut random, 12, factor, 0.05));
            let it = Difference::of(&a, &b).unwrap();
            assert_eq!(it.p < ALPHA, it.seen, "{it:?}");
            assert_eq!(Shifts::of(&a, &b).differ(), it.seen, "{it:?}");
        }
    }

    #[test]
    fn ties_and_few_pods_are_no_difference() {
        let same = Difference::of(&[2.0; 30], &[2.0; 30]).unwrap();
        assert!(!same.seen && same.ratio == 1.0 && same.p == 1.0, "{same:?}");
        assert_eq!(Difference::of(&[1.0, 1.1, 1.2], &[9.0; 50]), None);
        let tied = Difference::of(&[1.0, 1.0, 1.0, 2.0, 2.0], &[2.0, 2.0, 1.0, 2.0]).unwrap();
        assert!(
            !tied.seen && tied.low <= 1.0 && tied.high >= 1.0,
            "{tied:?}"
        );
    }
}
