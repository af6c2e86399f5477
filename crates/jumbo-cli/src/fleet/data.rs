//! Samples of a fleet: [`Data`], by unit (pod or job).
//!
//! Invariant: a unit has one arm, and at most one sample of a metric at a time.

use std::collections::BTreeMap;
use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use super::statistics::{PodPart, mean};

/// Arms of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Arm {
    Plain,
    /// Named `covered` in the annotation of the NRI plugin.
    #[value(alias = "covered")]
    Jumbo,
    /// A second plain arm, which measures noise.
    Aa,
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value();
        f.write_str(name.as_ref().map_or("", |name| name.get_name()))
    }
}

impl Arm {
    pub(super) fn of(name: &str) -> Option<Self> {
        Self::from_str(name, false).ok()
    }
}

/// Metrics, with their names in a CSV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Metric {
    CpuSecondsPerRequest,
    /// CPU seconds per second.
    Cores,
    RequestsPerSecond,
    P99Seconds,
    MemoryBytes,
}

/// Figures that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Figure {
    Cpu,
    P99,
    Memory,
}

impl Figure {
    pub(super) const ALL: [Self; 3] = [Self::Cpu, Self::P99, Self::Memory];
}

#[derive(Debug)]
pub(super) struct Unit {
    pub(super) arm: Arm,
    /// Values by metric and time in milliseconds.
    samples: BTreeMap<Metric, BTreeMap<i64, f64>>,
}

/// Reason to reject a sample, and its column.
#[derive(Debug, PartialEq)]
pub(super) struct Refused {
    pub(super) column: &'static str,
    pub(super) why: String,
}

#[derive(Debug, Default)]
pub(super) struct Data {
    pub(super) units: BTreeMap<String, Unit>,
}

impl Data {
    pub(super) fn add(
        &mut self,
        unit: &str,
        arm: Arm,
        metric: Metric,
        time_ms: i64,
        value: f64,
    ) -> Result<(), Refused> {
        let refused = |column, why| Err(Refused { column, why });
        if !value.is_finite() || value < 0.0 {
            return refused("value", format!("{value} of {unit} is no number from 0 on"));
        }
        let known = self.units.entry(unit.to_owned()).or_insert(Unit {
            arm,
            samples: BTreeMap::new(),
        });
        if known.arm != arm {
            let why = format!("{unit} was of another arm before; a unit stays in one arm");
            return refused("arm", why);
        }
        let of_metric = known.samples.entry(metric).or_default();
        match of_metric.insert(time_ms, value) {
            Some(_) => refused("time", format!("{unit} has this metric twice at this time")),
            None => Ok(()),
        }
    }

    /// Reports whether at least half of the units with CPU samples have requests too. Else CPU is
    /// compared per pod.
    pub(super) fn has_requests(&self) -> bool {
        let have = |has_requests| {
            let has_cpu = |unit: &&Unit| !unit.samples_of(Figure::Cpu, has_requests).is_empty();
            self.units.values().filter(has_cpu).count()
        };
        let with = have(true);
        with > 0 && with * 2 >= have(false)
    }

    /// Name of a unit that has both cores and requests, but never at the same time.
    pub(super) fn unmatched(&self) -> Option<&str> {
        let of_both = [Metric::Cores, Metric::RequestsPerSecond];
        let is_unmatched = |unit: &Unit| {
            let has_both = of_both.iter().all(|it| unit.samples.contains_key(it));
            has_both && unit.samples_of(Figure::Cpu, true).is_empty()
        };
        let mut units = self.units.iter();
        units.find_map(|(name, unit)| is_unmatched(unit).then_some(name.as_str()))
    }

    /// Values of one arm, one per unit, and the number of units without a value.
    pub(super) fn values(&self, figure: Figure, arm: Arm) -> (Vec<UnitValue>, usize) {
        let (requests, (first, last)) = (self.has_requests(), self.span());
        // + 1: the last sample belongs to the last block.
        let block = |time_ms| (time_ms - first) * TIME_BLOCKS / (last - first + 1);
        let units = self.units.values().filter(|unit| unit.arm == arm);
        let all: Vec<_> = units
            .map(|unit| unit.value(figure, requests, block))
            .collect();
        let missing = all.iter().filter(|value| value.is_none()).count();
        (all.into_iter().flatten().collect(), missing)
    }

    pub(super) fn count(&self, arm: Arm) -> usize {
        self.units.values().filter(|unit| unit.arm == arm).count()
    }

    /// Hours between the first and the last sample.
    pub(super) fn hours(&self) -> f64 {
        let (first, last) = self.span();
        (last - first) as f64 / MS_PER_HOUR
    }

    fn span(&self) -> (i64, i64) {
        let series = self.units.values().flat_map(|unit| unit.samples.values());
        let ends = series.filter_map(|it| Some((*it.keys().next()?, *it.keys().next_back()?)));
        let widest = ends.reduce(|all, it| (all.0.min(it.0), all.1.max(it.1)));
        widest.unwrap_or_default()
    }
}

const MS_PER_HOUR: f64 = 3_600_000.0;

/// Bound of a sample's time: the year 33658.
pub(super) const MAX_TIME_SECONDS: f64 = 1e12;

/// Number of equal blocks of time; the spread of a unit over time is that of its blocks.
pub(super) const TIME_BLOCKS: i64 = 8;

/// Value of a unit, over its whole time and by block.
#[derive(Debug)]
pub(super) struct UnitValue {
    pub(super) value: f64,
    /// Block numbers and values.
    pub(super) blocks: Vec<(i64, f64)>,
    /// Part in the totals, if the resource is known.
    pub(super) part: Option<PodPart>,
}

struct WeightedSample {
    time_ms: i64,
    sum: f64,
    weight: f64,
}

fn ratio(samples: &[WeightedSample]) -> Option<f64> {
    let sum: f64 = samples.iter().map(|sample| sample.sum).sum();
    let ratio = sum / samples.iter().map(|sample| sample.weight).sum::<f64>();
    (ratio.is_finite() && ratio > 0.0).then_some(ratio)
}

impl Unit {
    fn unweighted(&self, metric: Metric) -> Vec<WeightedSample> {
        let samples = self.samples.get(&metric).into_iter().flatten();
        let sample = |(time_ms, sum): (&i64, &f64)| WeightedSample {
            time_ms: *time_ms,
            sum: *sum,
            weight: 1.0,
        };
        samples.map(sample).collect()
    }

    fn samples_of(&self, figure: Figure, has_requests: bool) -> Vec<WeightedSample> {
        let metric = match figure {
            Figure::P99 => Metric::P99Seconds,
            Figure::Memory => Metric::MemoryBytes,
            Figure::Cpu if !has_requests => Metric::Cores,
            Figure::Cpu if self.samples.contains_key(&Metric::CpuSecondsPerRequest) => {
                Metric::CpuSecondsPerRequest
            }
            Figure::Cpu => {
                // The ratio of the totals: an hour is weighted by its requests.
                let requests = self.samples.get(&Metric::RequestsPerSecond);
                let mut both = self.unweighted(Metric::Cores);
                both.retain_mut(|sample| {
                    let requests = requests.and_then(|it| it.get(&sample.time_ms));
                    sample.weight = requests.copied().unwrap_or_default();
                    requests.is_some()
                });
                return both;
            }
        };
        self.unweighted(metric)
    }

    /// Value of the unit; `None` without samples, or if all are 0: an idle pod.
    fn value(
        &self,
        figure: Figure,
        has_requests: bool,
        block: impl Fn(i64) -> i64,
    ) -> Option<UnitValue> {
        let samples = self.samples_of(figure, has_requests);
        let value = ratio(&samples)?;
        let blocks = samples.chunk_by(|one, next| block(one.time_ms) == block(next.time_ms));
        let numbered =
            |samples: &[WeightedSample]| Some((block(samples.first()?.time_ms), ratio(samples)?));
        let resource = match figure {
            Figure::Cpu => self.samples.get(&Metric::Cores),
            Figure::Memory => self.samples.get(&Metric::MemoryBytes),
            Figure::P99 => None,
        };
        let count = samples.len() as f64;
        let weight = samples.iter().map(|sample| sample.weight).sum::<f64>() / count;
        Some(UnitValue {
            value,
            blocks: blocks.filter_map(numbered).collect(),
            part: resource.map(|resource| PodPart {
                sum: value * weight,
                weight,
                amount: mean(resource.values().copied()),
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_per_request_is_a_ratio_of_totals_and_a_pod_has_one_value() {
        let mut data = Data::default();
        for (hour, cores, requests) in [(0, 1.0, 10.0), (1, 4.0, 90.0)] {
            let mut add =
                |metric, value| data.add("a", Arm::Plain, metric, hour * 3_600_000, value);
            add(Metric::Cores, cores).unwrap();
            add(Metric::RequestsPerSecond, requests).unwrap();
        }
        // Without requests at this time.
        data.add("a", Arm::Plain, Metric::Cores, 7_200_000, 100.0)
            .unwrap();
        data.add("idle", Arm::Plain, Metric::Cores, 0, 0.0).unwrap();
        let (values, missing) = data.values(Figure::Cpu, Arm::Plain);
        assert_eq!((values.len(), missing), (1, 1));
        assert_eq!(values[0].value, 0.05);
        assert_eq!(values[0].blocks, [(0, 0.1), (3, 4.0 / 90.0)]);
        assert_eq!(values[0].part.unwrap().amount, 35.0);
        assert_eq!(data.hours(), 2.0);
    }

    #[test]
    fn samples_that_contradict_are_refused() {
        let mut data = Data::default();
        let mut add = |arm, time, value| {
            let added = data.add("a", arm, Metric::Cores, time, value);
            added.map_err(|refused| refused.column)
        };
        assert_eq!(add(Arm::Plain, 1, 0.0), Ok(()));
        assert_eq!(add(Arm::Plain, 1, 0.0), Err("time"));
        assert_eq!(add(Arm::Jumbo, 2, 0.0), Err("arm"));
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(add(Arm::Plain, 3, value), Err("value"));
        }
    }
}
