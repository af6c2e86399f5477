//! The size of an experiment: pods and hours until a difference is detected.
//!
//! The model: the logarithm of a pod's value is normal. It is the sum of a constant part of the pod
//! and a part of the hour, which time averages out. [`power`] has the closed form;
//! [`ExperimentPlan`] also runs the test on simulated fleets.

use std::collections::BTreeMap;
use std::f64::consts::{PI, TAU};
use std::str::FromStr;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF as _, Normal};

use super::data::{Arm, Data, Figure, TIME_BLOCKS};
use super::statistics::{MIN_PODS, Shifts, TARGET_POWER, mean, normal_quantile};

/// Simulated fleets for each row.
const RUNS: u32 = 1000;
const ROW_HOURS: [u32; 4] = [1, 6, 24, 168];

/// Standard deviations of the logarithms, as fractions: between pods, and of a pod between hours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct PodSpread {
    pub(super) between: f64,
    pub(super) hourly: f64,
}

impl FromStr for PodSpread {
    type Err = String;

    fn from_str(typed: &str) -> Result<Self, String> {
        let numbers: Option<Vec<f64>> = typed.split(',').map(|it| it.parse().ok()).collect();
        match numbers.as_deref() {
            Some([between, hourly])
                if [between, hourly]
                    .iter()
                    .all(|it| (0.0..=1000.0).contains(*it))
                    && between + hourly > 0.0 =>
            {
                Ok(Self {
                    between: between / 100.0,
                    hourly: hourly / 100.0,
                })
            }
            _ => Err("expected two percentages, such as 2.5,4".to_owned()),
        }
    }
}

impl PodSpread {
    /// Spread of measured pods, within their arms; `None` without two pods in an arm.
    ///
    /// Changes over time that all pods share affect both arms alike, and are removed. Where each pod
    /// has a single block of time, as a job has, all of the spread is between pods.
    pub(super) fn of(data: &Data, figure: Figure) -> Option<Self> {
        let (mut squares, mut freedom) = (0.0, 0.0);
        let (mut deviations, mut pods, mut blocks) = (Vec::new(), 0.0, 0.0);
        for arm in [Arm::Plain, Arm::Jumbo, Arm::Aa] {
            let (values, _) = data.values(figure, arm);
            let center = mean(values.iter().map(|it| it.value.ln()));
            for it in &values {
                squares += (it.value.ln() - center).powi(2);
                let own = mean(it.blocks.iter().map(|(_, value)| value.ln()));
                let own = it.blocks.iter().map(|(block, it)| (*block, it.ln() - own));
                deviations.extend(own);
                blocks += 1.0 / it.blocks.len() as f64;
            }
            pods += values.len() as f64;
            freedom += (values.len() as f64 - 1.0).max(0.0);
        }
        let mut shared: BTreeMap<i64, Vec<f64>> = BTreeMap::new();
        for (block, deviation) in &deviations {
            shared.entry(*block).or_default().push(*deviation);
        }
        let groups = shared.values();
        let of_block = groups.map(|group| {
            let center = mean(group.iter().copied());
            group.iter().map(|it| (it - center).powi(2)).sum::<f64>()
        });
        let of_block: f64 = of_block.sum();
        let of_block = match deviations.len() as f64 - pods {
            0.0 => 0.0,
            repeated => of_block / (repeated * (1.0 - 1.0 / pods)),
        };
        let between = squares / freedom - of_block * blocks / pods;
        let hours = data.hours() / TIME_BLOCKS as f64;
        (of_block.is_finite() && between.is_finite()).then(|| Self {
            between: between.max(0.0).sqrt(),
            hourly: (of_block * hours).sqrt(),
        })
    }

    /// Variance of a pod's value over `hours`.
    fn variance(self, hours: f64) -> f64 {
        self.between.powi(2) + self.hourly.powi(2) / hours
    }
}

/// Efficiency of the Mann-Whitney test on normal values, relative to the t test.
const EFFICIENCY: f64 = 3.0 / PI;

/// Share of the experiments with `arm` pods in each arm that detect a difference of `shift`.
fn power(arm: f64, variance: f64, shift: f64) -> f64 {
    let noise = (2.0 * variance / (arm * EFFICIENCY)).sqrt();
    let critical = normal_quantile(0.975);
    let normal = Normal::standard();
    normal.cdf(shift / noise - critical) + normal.cdf(-shift / noise - critical)
}

/// Maximum of `variance / pods in an arm` at which `shift` is detected with [`TARGET_POWER`].
fn needed(shift: f64) -> f64 {
    let sum = normal_quantile(0.975) + normal_quantile(TARGET_POWER);
    shift.powi(2) * EFFICIENCY / (2.0 * sum.powi(2))
}

/// Draws from the standard normal distribution.
pub(super) fn normal(random: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    radius * (TAU * random.f64()).cos()
}

/// Share of [`RUNS`] simulated fleets in which the test detects the difference.
fn simulated(arm: usize, variance: f64, shift: f64, random: &mut fastrand::Rng) -> f64 {
    let deviation = variance.sqrt();
    let seen = (0..RUNS).filter(|_| {
        let mut draw = |center: f64| -> Vec<f64> {
            let value = |_| (center + deviation * normal(random)).exp();
            (0..arm).map(value).collect()
        };
        Shifts::of(&draw(shift), &draw(0.0)).differ()
    });
    seen.count() as f64 / f64::from(RUNS)
}

/// Experiments that a fleet can run.
#[derive(Debug, Serialize)]
pub(super) struct ExperimentPlan {
    pub(super) figure: Figure,
    pub(super) spread: PodSpread,
    /// Difference to be detected, as a fraction.
    pub(super) effect: f64,
    pub(super) pods: usize,
    pub(super) runs: u32,
    /// Hours until these pods detect it with 80 % power; `None` if no time is enough.
    pub(super) hours: Option<f64>,
    /// Pods that detect it with 80 % power in unlimited time.
    pub(super) least_pods: f64,
    pub(super) rows: Vec<PlanRow>,
}

#[derive(Debug, Serialize)]
pub(super) struct PlanRow {
    pub(super) hours: f64,
    /// Pods for 80 % power, in both arms.
    pub(super) pods: f64,
    /// Power of the fleet's pods, in closed form.
    pub(super) power: f64,
    pub(super) simulated: f64,
}

impl ExperimentPlan {
    pub(super) fn of(
        figure: Figure,
        spread: PodSpread,
        effect: f64,
        pods: usize,
        seed: u64,
    ) -> Self {
        let shift = -(1.0 - effect).ln();
        let arm = pods / 2;
        let mut random = fastrand::Rng::with_seed(seed);
        let pods_for = |variance: f64| {
            let arm = (variance / needed(shift)).ceil();
            2.0 * arm.max(MIN_PODS as f64)
        };
        let rest = needed(shift) * arm as f64 - spread.between.powi(2);
        let hours = (spread.hourly.powi(2) / rest).ceil().max(1.0);
        let hours = (rest > 0.0).then_some(hours);
        let mut all: Vec<_> = ROW_HOURS.into_iter().map(f64::from).chain(hours).collect();
        if spread.hourly == 0.0 {
            all.truncate(1);
        }
        all.sort_unstable_by(f64::total_cmp);
        all.dedup();
        let rows = all.into_iter().map(|hours| {
            let variance = spread.variance(hours);
            PlanRow {
                hours,
                pods: pods_for(variance),
                power: power(arm as f64, variance, shift),
                simulated: simulated(arm, variance, shift, &mut random),
            }
        });
        Self {
            figure,
            spread,
            effect,
            pods: 2 * arm,
            runs: RUNS,
            hours,
            least_pods: pods_for(spread.between.powi(2)),
            rows: rows.collect(),
        }
    }
}
