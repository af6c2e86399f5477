//! Samples in a CSV: a line each, with the columns time, unit, arm, metric, value.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use clap::ValueEnum as _;
use csv::{ReaderBuilder, StringRecord, Trim};
use serde::Deserialize;

use super::data::{Arm, Data, MAX_TIME_SECONDS, Metric, Refused};

const COLUMNS: [&str; 5] = ["time", "unit", "arm", "metric", "value"];

pub(super) fn read(path: &Path) -> anyhow::Result<Data> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(file);
    let header = reader
        .headers()
        .with_context(|| format!("cannot read {name}"))?;
    let header = header.clone();
    let hint = format!("hint: the first line has the columns {}", COLUMNS.join(","));
    if header.is_empty() {
        bail!("{name} is empty\n{hint}, and each other line one sample");
    }
    let has = |column: &&str| header.iter().any(|title| title == *column);
    if !COLUMNS.iter().all(has) {
        bail!("{name}, line 1: a column is missing\n{hint}");
    }
    let mut data = Data::default();
    let mut record = StringRecord::new();
    while reader
        .read_record(&mut record)
        .with_context(|| format!("cannot read {name}"))?
    {
        let row: CsvRow<'_> = record.deserialize(Some(&header))?;
        row.add_to(&mut data).map_err(|Refused { column, why }| {
            let line = record.position().map_or(0, csv::Position::line);
            let line = line + blank_lines(path, line);
            anyhow!("{name}, line {line}, column {column}: {why}")
        })?;
    }
    if data.units.is_empty() {
        bail!("{name} has no samples\n{hint}, and each other line one sample");
    }
    Ok(data)
}

/// Number of blank lines before a record: the reader's position is that of the first of them.
fn blank_lines(path: &Path, line: u64) -> u64 {
    // A pipe has been read.
    if !path.is_file() {
        return 0;
    }
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let before = usize::try_from(line.saturating_sub(1)).unwrap_or(usize::MAX);
    let blank = text.lines().skip(before);
    blank.take_while(|line| line.trim().is_empty()).count() as u64
}

#[derive(Deserialize)]
struct CsvRow<'a> {
    time: &'a str,
    unit: &'a str,
    arm: &'a str,
    metric: &'a str,
    value: &'a str,
}

impl CsvRow<'_> {
    fn add_to(&self, data: &mut Data) -> Result<(), Refused> {
        let refused = |column, why| Refused { column, why };
        let known =
            |names: &[&str], typed: &str| format!("'{typed}' is none of {}", names.join(", "));
        let time: Option<f64> = self.time.parse().ok();
        let time = time
            .filter(|time| time.abs() < MAX_TIME_SECONDS)
            .ok_or_else(|| {
                let why = format!(
                    "'{}' is no Unix time in seconds, as `date +%s` has it",
                    self.time
                );
                refused("time", why)
            })?;
        if self.unit.is_empty() {
            return Err(refused("unit", String::from("it is empty")));
        }
        let arm = Arm::of(self.arm)
            .ok_or_else(|| refused("arm", known(&["plain", "jumbo", "aa"], self.arm)))?;
        let metric = Metric::from_str(self.metric, false).map_err(|_| {
            let names = Metric::value_variants().iter();
            let names: Vec<_> = names.filter_map(Metric::to_possible_value).collect();
            let names: Vec<_> = names.iter().map(|name| name.get_name()).collect();
            refused("metric", known(&names, self.metric))
        })?;
        let value = self
            .value
            .parse()
            .map_err(|_| refused("value", format!("'{}' is no number", self.value)))?;
        #[expect(clippy::cast_possible_truncation, reason = "bounded above")]
        data.add(self.unit, arm, metric, (time * 1e3) as i64, value)
    }
}
