//! Samples from the HTTP API of Prometheus: a range query for each metric.
//!
//! TLS was rejected: it needs a cryptographic library, in a command that is one small file.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow, bail};
use clap::ValueEnum as _;
use serde::Deserialize;
use ureq::{Agent, Error};

use super::data::{Arm, Data, MAX_TIME_SECONDS, Metric, Refused};
use crate::value::interval;

const MAX_RESPONSE_BYTES: u64 = 64 << 20;
/// Maximum number of samples in a series: enough for means, few enough for one response.
const MAX_SAMPLES: u32 = 240;
const MIN_STEP_SECONDS: u32 = 15;
/// Minimum range of a rate, which needs two scrapes.
const MIN_RATE_SECONDS: u32 = 300;

#[derive(Debug, clap::Args)]
pub(super) struct PrometheusArgs {
    /// Read from the Prometheus at URL, http://HOST:PORT
    #[arg(long, value_name = "URL", conflicts_with = "csv")]
    prometheus: Option<String>,

    /// Hours to compare, until --end
    #[arg(long, value_name = "N", default_value_t = 24, requires = "prometheus",
        value_parser = clap::value_parser!(u32).range(1..=8784))]
    hours: u32,

    /// End of these hours as Unix time [default: now]
    #[arg(long, value_name = "SECONDS", requires = "prometheus")]
    end: Option<u32>,

    /// Labels that name a pod or job
    #[arg(
        long,
        value_name = "LABEL,...",
        default_value = "namespace,pod",
        value_delimiter = ',',
        requires = "prometheus"
    )]
    unit: Vec<String>,

    /// Label that has the arm: plain, jumbo or aa; other values are left out
    #[arg(
        long,
        value_name = "LABEL",
        default_value = "label_jumbo_dev_arm",
        requires = "prometheus"
    )]
    arm: String,

    /// Query for series with both labels, where those of a metric have no arm
    /// [default: kube_pod_labels]
    #[arg(long, value_name = "PROMQL", requires = "prometheus")]
    arms: Option<String>,

    /// Matchers for all default queries, such as namespace="shop"
    #[arg(
        long,
        value_name = "MATCHERS",
        default_value = "",
        hide_default_value = true,
        requires = "prometheus"
    )]
    select: String,

    /// Query for a metric of docs/fleet.md; may be given several times
    #[arg(long, value_name = "METRIC=PROMQL", value_parser = query, requires = "prometheus")]
    query: Vec<(Metric, String)>,

    /// Timeout of each query
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = interval,
        requires = "prometheus")]
    timeout: Duration,
}

fn query(typed: &str) -> Result<(Metric, String), String> {
    let (name, query) = typed.split_once('=').ok_or("expected METRIC=PROMQL")?;
    let metric = Metric::from_str(name, false)?;
    Ok((metric, query.to_owned()))
}

/// Response to a query: data, or an error.
#[derive(Deserialize)]
struct QueryResponse {
    data: Option<QueryData>,
    error: Option<String>,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct QueryData {
    result: Vec<Series>,
}

#[derive(Deserialize)]
struct Series {
    metric: BTreeMap<String, String>,
    values: Vec<(f64, String)>,
}

impl PrometheusArgs {
    /// Reads the samples, with notes on omitted ones; `None` without a URL.
    pub(super) fn read(&self) -> Option<anyhow::Result<(Data, Vec<String>)>> {
        let url = self.prometheus.as_ref()?;
        Some(self.read_from(url.trim_end_matches('/')))
    }

    fn read_from(&self, url: &str) -> anyhow::Result<(Data, Vec<String>)> {
        if !url.starts_with("http://") {
            bail!(
                "cannot read {url}: jumbo speaks plain HTTP, without TLS\nhint: name a local proxy or `kubectl port-forward`, http://127.0.0.1:9090; or give --csv"
            );
        }
        let config = Agent::config_builder().timeout_global(Some(self.timeout));
        let mut client = PrometheusClient {
            agent: config.http_status_as_error(false).build().into(),
            url: format!("{url}/api/v1/query_range"),
            range: self.range(),
            warnings: Vec::new(),
        };
        let (mut data, mut arms) = (Data::default(), None);
        let (mut no_arm, mut no_number) = (0, 0);
        for metric in Metric::value_variants() {
            let Some(query) = self.query_of(*metric, client.range.step) else {
                continue;
            };
            for series in client.query(&query)? {
                let Some(unit) = self.unit_of(&series) else {
                    let labels = self.unit.join(", ");
                    bail!(
                        "{url}: a series of `{query}` has not all of the labels {labels}\nhint: --unit names those that it has"
                    );
                };
                let arm = match series.metric.get(&self.arm) {
                    Some(arm) => Arm::of(arm),
                    None => {
                        let known = match &mut arms {
                            Some(known) => known,
                            None => arms.insert(self.arms_from(&mut client)?),
                        };
                        known.get(&unit).copied()
                    }
                };
                let Some(arm) = arm else {
                    no_arm += 1;
                    continue;
                };
                for (time, value) in series.values {
                    let value: f64 = value.parse().unwrap_or(f64::NAN);
                    if !value.is_finite() || time.abs() >= MAX_TIME_SECONDS {
                        no_number += 1;
                        continue;
                    }
                    #[expect(clippy::cast_possible_truncation, reason = "a time of today")]
                    let added = data.add(&unit, arm, *metric, (time * 1e3) as i64, value);
                    added.map_err(|Refused { why, .. }| {
                        anyhow!(
                            "{url}: `{query}`: {why}\nhint: one series a pod, as by sum by ({})",
                            self.unit.join(",")
                        )
                    })?;
                }
            }
        }
        if data.units.is_empty() {
            let arm = &self.arm;
            bail!(
                "{url} has no series with an arm ({no_arm} without)\nhint: the label {arm} is to be plain or jumbo: see --arm, --arms and docs/fleet.md"
            );
        }
        let mut notes = client.warnings;
        let mut note = |count: u64, what| {
            if count > 0 {
                notes.push(format!("{count} {what}"));
            }
        };
        note(no_arm, "series of no arm were left out");
        note(
            no_number,
            "samples that are no number (NaN: no requests) were left out",
        );
        Ok((data, notes))
    }

    fn range(&self) -> QueryRange {
        let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let end = self.end.map_or_else(|| now().as_secs_f64(), f64::from);
        let seconds = self.hours * 3600;
        QueryRange {
            start: end - f64::from(seconds),
            end,
            step: (seconds / MAX_SAMPLES).max(MIN_STEP_SECONDS),
        }
    }

    /// Query for a metric: the given one, or that for the metrics of cAdvisor and client libraries.
    fn query_of(&self, metric: Metric, step: u32) -> Option<String> {
        if let Some((_, query)) = self.query.iter().find(|(of, _)| *of == metric) {
            return Some(query.clone());
        }
        let by = format!("{},{}", self.unit.join(","), self.arm);
        let (all, rate) = (&self.select, step.max(MIN_RATE_SECONDS));
        Some(match metric {
            Metric::CpuSecondsPerRequest => return None,
            Metric::Cores => format!(
                "sum by ({by}) (rate(container_cpu_usage_seconds_total{{container!=\"\",{all}}}[{rate}s]))"
            ),
            Metric::RequestsPerSecond => {
                format!("sum by ({by}) (rate(http_requests_total{{{all}}}[{rate}s]))")
            }
            Metric::P99Seconds => format!(
                "histogram_quantile(0.99, sum by ({by},le) (rate(http_request_duration_seconds_bucket{{{all}}}[{rate}s])))"
            ),
            Metric::MemoryBytes => format!(
                "sum by ({by}) (container_memory_working_set_bytes{{container!=\"\",{all}}})"
            ),
        })
    }

    fn unit_of(&self, series: &Series) -> Option<String> {
        let labels = self.unit.iter();
        let labels: Option<Vec<_>> = labels
            .map(|label| series.metric.get(label).map(String::as_str))
            .collect();
        labels.map(|labels| labels.join("/"))
    }

    fn arms_from(&self, client: &mut PrometheusClient) -> anyhow::Result<BTreeMap<String, Arm>> {
        let query = self.arms.clone().unwrap_or_else(|| {
            let (unit, arm, all) = (self.unit.join(","), &self.arm, &self.select);
            format!("group by ({unit},{arm}) (kube_pod_labels{{{arm}!=\"\",{all}}})")
        });
        let (mut arms, mut contradictory) = (BTreeMap::new(), BTreeSet::new());
        for series in client.query(&query)? {
            let arm = series.metric.get(&self.arm).and_then(|arm| Arm::of(arm));
            let Some((unit, arm)) = self.unit_of(&series).zip(arm) else {
                continue;
            };
            if arms
                .insert(unit.clone(), arm)
                .is_some_and(|before| before != arm)
            {
                contradictory.insert(unit);
            }
        }
        for unit in contradictory {
            arms.remove(&unit);
            let why = "a pod stays in one arm, so its series count as those of no arm";
            client
                .warnings
                .push(format!("{unit} had two arms by `{query}`; {why}"));
        }
        Ok(arms)
    }
}

struct QueryRange {
    start: f64,
    end: f64,
    step: u32,
}

struct PrometheusClient {
    agent: Agent,
    url: String,
    range: QueryRange,
    warnings: Vec<String>,
}

impl PrometheusClient {
    fn query(&mut self, query: &str) -> anyhow::Result<Vec<Series>> {
        let QueryRange { start, end, step } = self.range;
        let url = &self.url;
        let failed = || format!("cannot query {url} for `{query}`");
        let request = self.agent.get(url).query("query", query);
        let request = request
            .query("start", start.to_string())
            .query("end", end.to_string())
            .query("step", step.to_string());
        let mut response = request.call().map_err(hinted).with_context(failed)?;
        let body = response.body_mut().with_config().limit(MAX_RESPONSE_BYTES);
        let body = body.read_to_vec().map_err(hinted).with_context(failed)?;
        let status = response.status();
        let answer = serde_json::from_slice::<QueryResponse>(&body);
        let answer = match answer {
            Ok(QueryResponse {
                error: Some(error), ..
            }) => bail!("{}: {status}: {error}", failed()),
            _ if !status.is_success() => bail!("{}: {status}", failed()),
            Ok(answer) => answer,
            Err(error) => bail!("{}: {error}\nhint: is this a Prometheus?", failed()),
        };
        self.warnings.extend(answer.warnings);
        Ok(answer.data.map(|data| data.result).unwrap_or_default())
    }
}

fn hinted(error: Error) -> anyhow::Error {
    let hint = match &error {
        Error::Timeout(_) => "--timeout waits longer",
        Error::BodyExceedsLimit(_) => {
            "--select asks for fewer series, --query for what needs no labels but those of a pod"
        }
        Error::TlsRequired => "jumbo speaks plain HTTP: name a local proxy, or give --csv",
        _ => return error.into(),
    };
    anyhow!("{error}\nhint: {hint}")
}
