//! Metrics with their samples, and the bound on their number: [`Metrics`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge};
use prometheus_client::registry::{Registry, Unit};

/// Labels of a sample. Values are never empty: to Prometheus an empty label is an absent one.
pub(super) type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Family {
    name: String,
    help: String,
    unit: Option<Unit>,
    kind: MetricType,
    samples: Vec<(Labels, f64)>,
}

#[derive(Debug, Default)]
pub(super) struct Metrics(Vec<Family>);

/// Splits a line of a table of gauges: the name, the unit (`bytes`, `seconds` or `-`), and the help.
fn parse_gauge(line: &str) -> Option<(&str, Option<Unit>, &str)> {
    let (name, rest) = line.split_once(' ')?;
    let (unit, help) = rest.trim_start().split_once(' ')?;
    let unit = match unit {
        "bytes" => Some(Unit::Bytes),
        "seconds" => Some(Unit::Seconds),
        _ => None,
    };
    Some((name, unit, help.trim_start()))
}

/// Name of a gauge, and an additional label.
type Key = (&'static str, Option<(&'static str, &'static str)>);

/// Values with the same labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) labels: Labels,
    pub(super) values: BTreeMap<Key, u64>,
}

impl Row {
    /// Value of a gauge without an additional label.
    fn weight(&self, gauge: &'static str) -> u64 {
        self.values.get(&(gauge, None)).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (key, value) in &other.values {
            let sum = self.values.entry(*key).or_default();
            *sum = sum.saturating_add(*value);
        }
    }
}

impl Metrics {
    /// Adds a metric; the encoder adds its unit, and `_total` to a counter.
    pub(super) fn add(
        &mut self,
        kind: MetricType,
        name: &str,
        unit: Option<Unit>,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        self.0.push(Family {
            name: name.to_owned(),
            help: format!("{help}."),
            unit,
            kind,
            samples: samples.into_iter().collect(),
        });
    }

    /// Adds the gauges of a table, each with its samples.
    pub(super) fn each<S: IntoIterator<Item = (Labels, f64)>>(
        &mut self,
        table: &str,
        samples: impl IntoIterator<Item = S>,
    ) {
        let gauges = table.lines().filter_map(parse_gauge);
        for ((name, unit, help), samples) in gauges.zip(samples) {
            self.add(Gauge, name, unit, help, samples);
        }
    }

    /// Adds the gauges of a table, with all rows.
    pub(super) fn gauges(&mut self, table: &str, rows: &[Row]) {
        for (name, unit, help) in table.lines().filter_map(parse_gauge) {
            let samples = rows.iter().flat_map(|row| {
                let own = row.values.iter().filter(|((gauge, _), _)| *gauge == name);
                own.map(|((_, label), value)| {
                    let label = label.map(|(name, value)| (name, value.to_owned()));
                    let labels = row.labels.iter().cloned().chain(label).collect();
                    (labels, *value as f64)
                })
            });
            self.add(Gauge, name, unit, help, samples.collect::<Vec<_>>());
        }
    }

    pub(super) fn series(&self) -> usize {
        self.0.iter().map(|family| family.samples.len()).sum()
    }

    /// Encodes the metrics in the text format of Prometheus, version 0.0.4.
    pub(super) fn text(self) -> Result<String, fmt::Error> {
        let (mut text, mut registry) = (String::new(), Registry::default());
        registry.register_collector(Box::new(self));
        prometheus_text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for family in &self.0 {
            let (unit, kind) = (family.unit.as_ref(), family.kind);
            let mut metric = encoder.encode_descriptor(&family.name, &family.help, unit, kind)?;
            for (labels, value) in &family.samples {
                let mut sample = metric.encode_family(labels)?;
                match kind {
                    Counter => sample.encode_counter::<Labels, _, u64>(value, None)?,
                    _ => sample.encode_gauge(value)?,
                }
            }
        }
        Ok(())
    }
}

/// Keeps the rows with the largest values of the gauge `by` whose series fit into `room`. One row
/// with the labels `other` has the sum of the rest. Returns the number of summed series.
pub(super) fn bound(rows: &mut Vec<Row>, room: usize, by: &'static str, other: Labels) -> usize {
    let all: usize = rows.iter().map(|row| row.values.len()).sum();
    if all <= room {
        return 0;
    }
    rows.sort_by_cached_key(|row| (Reverse(row.weight(by)), row.labels.clone()));
    let keys: BTreeSet<_> = rows.iter().flat_map(|row| row.values.keys()).collect();
    let mut left = room.saturating_sub(keys.len());
    let fits = |row: &&Row| {
        let rest = left.checked_sub(row.values.len());
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    let kept = rows.iter().take_while(fits).count();
    let beyond: Vec<Row> = rows.drain(kept..).collect();
    // A program may have this name: two series of the same labels are an error.
    let named = rows.iter().position(|row| row.labels == other);
    let mut sum = match named {
        Some(at) => rows.remove(at),
        None => Row {
            labels: other,
            ..Row::default()
        },
    };
    beyond.iter().for_each(|row| sum.add(row));
    rows.push(sum);
    beyond.iter().map(|row| row.values.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(comm: &str, values: &[(&'static str, u64)]) -> Row {
        Row {
            labels: vec![("comm", comm.to_owned())],
            values: values
                .iter()
                .map(|(gauge, value)| ((*gauge, None), *value))
                .collect(),
        }
    }

    #[test]
    fn rows_beyond_the_bound_are_summed() {
        let all = [
            row("small", &[("a", 1), ("b", 10)]),
            row("large", &[("a", 9), ("b", 20)]),
            row("middle", &[("a", 5), ("c", 30)]),
        ];
        let bound = |room| {
            let mut rows = all.to_vec();
            let other = vec![("comm", String::from("other"))];
            (super::bound(&mut rows, room, "a", other), rows)
        };
        assert_eq!(bound(6), (0, all.to_vec()));
        let sum = row("other", &[("a", 6), ("b", 10), ("c", 30)]);
        assert_eq!(bound(5), (4, vec![all[1].clone(), sum]));
        let sum = row("other", &[("a", 15), ("b", 30), ("c", 30)]);
        assert_eq!(bound(0), (6, vec![sum]));
    }

    #[test]
    fn the_text_has_help_type_and_unit_and_names_are_escaped() {
        let mut page = Metrics::default();
        let labels = || vec![("comm", String::from("a\"b\\c\nd"))];
        page.add(Gauge, "a", Some(Unit::Bytes), "A gauge", [(labels(), 2.0)]);
        page.add(
            Counter,
            "b",
            Some(Unit::Seconds),
            "A counter",
            [(vec![], 0.5)],
        );
        assert_eq!(page.series(), 2);
        let expected = "# HELP a_bytes A gauge.\n# TYPE a_bytes gauge\n\
            a_bytes{comm=\"a\\\"b\\\\c\\nd\"} 2.0\n\
            # HELP b_seconds_total A counter.\n# TYPE b_seconds_total counter\n\
            b_seconds_total 0.5\n";
        assert_eq!(page.text().unwrap(), expected);
    }
}
