//! Tests on simulated fleets: a planted gain is found, and none without one.

use super::data::{Metric, Refused};
use super::simulate::normal;
use super::*;

/// Spread of a pod over time, with a slow return to the mean.
const TIME_SPREAD: f64 = 0.04;
const POD_SPREAD: f64 = 0.02;
const HOURS: i64 = 12;

const PER_REQUEST: [Metric; 1] = [Metric::CpuSecondsPerRequest];
const WITH_CORES: [Metric; 2] = [Metric::CpuSecondsPerRequest, Metric::Cores];

/// `pods` plain pods and as many under jumbo, which need `gain` less. All metrics have the same
/// samples.
fn fleet(pods: usize, gain: f64, seed: u64, metrics: &[Metric]) -> Data {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut data = Data::default();
    for pod in 0..2 * pods {
        let (arm, factor) = match pod % 2 {
            0 => (Arm::Plain, 1.0),
            _ => (Arm::Jumbo, 1.0 - gain),
        };
        let own = POD_SPREAD * normal(&mut random);
        let mut drift = normal(&mut random);
        for hour in 0..HOURS {
            drift = 0.8 * drift + 0.6 * normal(&mut random);
            let value = factor * (own + TIME_SPREAD * drift).exp();
            for metric in metrics {
                let added = data.add(&format!("{pod}"), arm, *metric, hour * 3_600_000, value);
                assert_eq!(added, Ok::<(), Refused>(()));
            }
        }
    }
    data
}

fn compared(data: &Data) -> FigureComparison {
    let mut comparison = FleetComparison::of(data, None, 1).unwrap();
    comparison.figures.remove(0)
}

/// Reports whether a binomial count is within bounds that it exceeds once in 10 000 times.
fn is_likely(count: usize, runs: usize, part: f64) -> bool {
    let mean = runs as f64 * part;
    (count as f64 - mean).abs() < 3.9 * (mean * (1.0 - part)).sqrt() + 1.0
}

#[test]
fn without_a_gain_one_in_twenty_sees_one() {
    let runs = 1000;
    let [mut seen, mut seen_aa] = [0, 0];
    for seed in 0..runs {
        let it = compared(&fleet(24, 0.0, seed as u64, &PER_REQUEST));
        seen += usize::from(it.difference.seen);
        seen_aa += usize::from(it.aa.unwrap().seen);
    }
    assert!(is_likely(seen, runs, 0.05), "{seen}");
    // Halves of 12 pods: the steps of U are coarse, so there are fewer false positives.
    assert!(seen_aa > 10 && seen_aa < 75, "{seen_aa}");
}

#[test]
fn a_planted_gain_is_within_the_interval() {
    let runs = 200;
    let [mut covered, mut saving_covered] = [0, 0];
    for seed in 0..runs {
        let it = compared(&fleet(24, 0.02, seed as u64, &WITH_CORES));
        let ratio = 1.0 / 0.98;
        let Difference { low, high, .. } = it.difference;
        covered += usize::from((low..=high).contains(&ratio));
        let saving = it.saving.unwrap();
        // One core per pod, times the mean of a lognormal distribution.
        let cores = 48.0 * 0.02 * ((POD_SPREAD.powi(2) + TIME_SPREAD.powi(2)) / 2.0).exp();
        saving_covered += usize::from((saving.low..=saving.high).contains(&cores));
    }
    assert!(is_likely(covered, runs, 0.95), "{covered}");
    assert!(is_likely(saving_covered, runs, 0.93), "{saving_covered}");

    let large = compared(&fleet(200, 0.02, 1, &WITH_CORES));
    let Difference { seen, ratio, .. } = large.difference;
    assert!(seen && (1.0 - 1.0 / ratio - 0.02).abs() < 0.01, "{large:?}");
    assert!(!large.aa.unwrap().seen);
}

/// Each pod is one value because its samples as separate values give many false positives.
#[test]
fn samples_as_values_give_false_positives() {
    let runs = 200;
    let err = (0..runs).filter(|seed| {
        let data = fleet(12, 0.0, *seed, &PER_REQUEST);
        let [plain, jumbo] = [Arm::Plain, Arm::Jumbo].map(|arm| {
            let (values, _) = data.values(Figure::Cpu, arm);
            let blocks = values.into_iter().flat_map(|it| it.blocks);
            blocks.map(|(_, value)| value).collect::<Vec<_>>()
        });
        Difference::of(&plain, &jumbo).unwrap().seen
    });
    assert!(err.count() > 40);
}

#[test]
fn the_drawn_fleets_and_the_closed_form_agree() {
    let spread = PodSpread {
        between: 0.01,
        hourly: 0.03,
    };
    let plan = ExperimentPlan::of(Figure::Cpu, spread, 0.01, 60, 7);
    // Computed by hand: 2 * 2.8016^2 * variance / ln(0.99)^2 * pi / 3 in each arm.
    let hour = plan.rows.iter().find(|row| row.hours == 1.0).unwrap();
    assert_eq!(hour.pods, 2.0 * (162_744.06_f64 * 0.001).ceil());
    let hours = plan.hours.unwrap();
    let enough = plan.rows.iter().find(|row| row.hours == hours).unwrap();
    assert!(enough.power >= 0.8 && enough.pods <= 60.0, "{plan:?}");
    for row in &plan.rows {
        let error = (row.simulated - row.power).abs();
        // Three and a half standard deviations, and 0.02 for the limit of the closed form.
        let bound = 3.5 * (row.power * (1.0 - row.power) / f64::from(plan.runs)).sqrt() + 0.02;
        assert!(error < bound, "{row:?}");
    }
    assert_eq!(
        serde_json::to_string(&plan).unwrap(),
        serde_json::to_string(&ExperimentPlan::of(Figure::Cpu, spread, 0.01, 60, 7)).unwrap()
    );
    let never = ExperimentPlan::of(Figure::Cpu, spread, 0.01, 10, 7);
    assert!(never.hours.is_none() && never.least_pods > 10.0);
}

#[test]
fn jobs_of_one_sample_each_differ_among_themselves_alone() {
    let mut random = fastrand::Rng::with_seed(5);
    let mut data = Data::default();
    for job in 0..400 {
        let arm = [Arm::Plain, Arm::Jumbo][job % 2];
        let value = (0.03 * normal(&mut random)).exp();
        let (name, time) = (format!("{job}"), job as i64 * 37_000);
        let metric = Metric::CpuSecondsPerRequest;
        assert_eq!(data.add(&name, arm, metric, time, value), Ok(()));
    }
    let spread = PodSpread::of(&data, Figure::Cpu).unwrap();
    assert!((spread.between - 0.03).abs() < 0.005, "{spread:?}");
    assert_eq!(spread.hourly.to_bits(), 0.0_f64.to_bits());
    let plan = ExperimentPlan::of(Figure::Cpu, spread, 0.01, 400, 1);
    assert_eq!(plan.rows.len(), 1);
}

#[test]
fn as_many_pods_as_are_needed_see_the_difference() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut draw = |pods: usize, center: f64| -> Vec<f64> {
        let value = |_| (center + 0.03 * normal(&mut random)).exp();
        (0..pods).map(value).collect()
    };
    let few = Difference::of(&draw(20, 0.01), &draw(20, 0.0)).unwrap();
    assert!(!few.seen, "{few:?}");
    // As the middle of the interval would have it.
    let needed = few.needed_pods(40).unwrap();
    let arm = needed.to_string().parse::<usize>().unwrap() / 2;
    let runs = 100;
    let shift = few.ratio.ln();
    let seen = (0..runs)
        .filter(|_| Difference::of(&draw(arm, shift), &draw(arm, 0.0)).is_some_and(|it| it.seen));
    assert!(
        (60..=98).contains(&seen.count()),
        "{needed} pods for {shift}"
    );
}

#[test]
fn the_spread_of_data_is_that_of_its_pods_and_hours() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut data = Data::default();
    for pod in 0..400 {
        let arm = [Arm::Plain, Arm::Jumbo][pod % 2];
        let own = 0.03 * normal(&mut random) - 0.2 * (pod % 2) as f64;
        for hour in 0..80 {
            // All pods share a wave.
            let wave = (hour as f64 / 10.0).sin();
            let value = (own + 0.05 * normal(&mut random) + wave).exp();
            let added = data.add(
                &format!("{pod}"),
                arm,
                Metric::P99Seconds,
                hour * 3_600_000,
                value,
            );
            assert_eq!(added, Ok::<(), Refused>(()));
        }
    }
    let spread = PodSpread::of(&data, Figure::P99).unwrap();
    assert!((spread.between - 0.03).abs() < 0.005, "{spread:?}");
    assert!((spread.hourly - 0.05).abs() < 0.005, "{spread:?}");
    assert_eq!(PodSpread::of(&data, Figure::Memory), None);
}
