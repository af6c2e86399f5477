//! `jumbo fleet`: comparison of pods or jobs with and without jumbo, across machines.
//!
//! - [`data`]: samples by unit, read by `csv` and `prometheus`.
//! - [`statistics`]: the difference of two arms. [`simulate`]: the size of an experiment.
//! - [`show`]: the text output of both.
//!
//! A unit (pod, job) is one value: its samples are a time series and not independent.

mod csv;
mod data;
mod prometheus;
mod show;
mod simulate;
mod statistics;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use jumbo::units::counted;
use jumbo_bench::stats::median;
use jumbo_host::status::Missing;
use serde::Serialize;

use crate::value::{positive, whole};
use crate::view;
use data::{Arm, Data, Figure, UnitValue};
use simulate::{ExperimentPlan, PodSpread};
use statistics::{Difference, FleetSaving, MIN_PODS, PodPart};

/// Maximum number of pods in a simulation, which takes some seconds.
const MAX_PODS: usize = 10_000;

/// Spread of CPU seconds per request, measured in docs/fleet.md.
const DEFAULT_SPREAD: PodSpread = PodSpread {
    between: 0.027,
    hourly: 0.013,
};

/// Whether jumbo pays across a fleet of pods or jobs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Compare(Box<CompareArgs>),
}

/// Compare pods with and without jumbo, or plan such an experiment
///
/// Reads CPU seconds per request, p99 and memory of pods or jobs in the arms `plain` and `jumbo`,
/// from a CSV or from Prometheus. A difference is claimed if the 95 % confidence interval of the
/// Mann-Whitney test excludes 0. Plain is also compared with itself: the arm `aa`, or two halves of
/// plain drawn at random. docs/fleet.md has the design of an experiment.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo fleet compare --simulate 100              # how many pods, how long
  jumbo fleet compare --prometheus http://127.0.0.1:9090 \\
      --select 'namespace=\"shop\"' --hours 24 --pods 4000
  jumbo fleet compare --csv fleet.csv

CSV:
  time,unit,arm,metric,value
  1700000000,shop-1,plain,cpu_seconds_per_request,0.0123
  1700000000,shop-2,jumbo,cpu_seconds_per_request,0.0119

Exit status: 0 compared, whether there is a difference or none; 1 it could not be compared; \
2 wrong usage.")]
struct CompareArgs {
    /// Read from FILE: columns time (Unix seconds), unit, arm, metric, value
    #[arg(long, value_name = "FILE", required_unless_present_any = ["prometheus", "simulate"])]
    csv: Option<PathBuf>,

    #[command(flatten)]
    prometheus: prometheus::PrometheusArgs,

    /// Pods of the whole fleet, for what it would save [default: those seen]
    #[arg(long, value_name = "N", conflicts_with = "simulate",
        value_parser = positive::<NonZeroUsize>, allow_negative_numbers = true)]
    pods: Option<NonZeroUsize>,

    /// Do not compare: say how many pods and hours it takes on NODES nodes
    ///
    /// Takes the spread of the data, or --spread.
    #[arg(long, value_name = "NODES", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    simulate: Option<u32>,

    /// With --simulate: pods on a node
    #[arg(long, value_name = "N", default_value_t = 1, requires = "simulate",
        value_parser = clap::value_parser!(u32).range(1..=100))]
    pods_per_node: u32,

    /// With --simulate: difference to be seen, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, requires = "simulate",
        value_parser = effect)]
    effect: f64,

    /// With --simulate: percent that pods differ by, and one pod from hour to
    /// hour [default: those of the data, else 2.7,1.3, of docs/fleet.md]
    #[arg(long, value_name = "PODS,HOURS", requires = "simulate")]
    spread: Option<PodSpread>,

    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u64>,
        allow_negative_numbers = true)]
    seed: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn effect(typed: &str) -> Result<f64, String> {
    let percent = typed.parse().ok();
    percent
        .filter(|percent| (0.01..=90.0).contains(percent))
        .ok_or_else(|| "expected a percentage from 0.01 to 90".to_owned())
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let Command::Compare(args) = &args.command;
    let data = match (&args.csv, args.prometheus.read()) {
        (Some(path), _) => Some((csv::read(path)?, Vec::new())),
        (None, read) => read.transpose()?,
    };
    match (args.simulate, data) {
        (Some(nodes), data) => plan(args, nodes, data.map(|(data, _)| data).as_ref()),
        (None, Some((data, notes))) => {
            let mut comparison = FleetComparison::of(&data, args.pods, args.seed)?;
            comparison.notes.extend(notes);
            view::page(args.json, &comparison, show::comparison)
        }
        (None, None) => bail!("no data: give --csv or --prometheus"),
    }
}

fn plan(args: &CompareArgs, nodes: u32, data: Option<&Data>) -> anyhow::Result<ExitCode> {
    let pods = (nodes * args.pods_per_node) as usize;
    if pods < 2 * MIN_PODS {
        bail!(
            "{pods} pods are too few: an arm needs {MIN_PODS}\nhint: more NODES, or --pods-per-node"
        );
    }
    if pods > MAX_PODS {
        bail!("{pods} pods are too many to simulate\nhint: {MAX_PODS} of them are enough");
    }
    let of =
        |figure, spread| ExperimentPlan::of(figure, spread, args.effect / 100.0, pods, args.seed);
    let plans: Vec<_> = match (args.spread, data) {
        (Some(spread), _) => vec![of(Figure::Cpu, spread)],
        (None, None) => vec![of(Figure::Cpu, DEFAULT_SPREAD)],
        (None, Some(data)) => Figure::ALL
            .into_iter()
            .filter_map(|figure| Some(of(figure, PodSpread::of(data, figure)?)))
            .collect(),
    };
    if plans.is_empty() {
        bail!(
            "the data do not show how pods differ: no arm has two pods with a figure\nhint: --spread gives it"
        );
    }
    view::page(args.json, &plans, |view, plans| {
        plans.iter().for_each(|it| show::plan(view, it))
    })
}

#[derive(Debug, Serialize)]
struct Pods {
    plain: usize,
    jumbo: usize,
    aa: usize,
}

#[derive(Debug, Serialize)]
struct FleetComparison {
    pods: Pods,
    hours: f64,
    /// CPU is per request, not per pod.
    per_request: bool,
    figures: Vec<FigureComparison>,
    left_out: Vec<Missing>,
    notes: Vec<String>,
}

/// One figure of both arms.
#[derive(Debug, Serialize)]
struct FigureComparison {
    figure: Figure,
    /// Medians of the pods.
    plain: f64,
    jumbo: f64,
    #[serde(flatten)]
    difference: Difference,
    /// Pods of both arms that would show this difference with 80 % power, where it was not seen;
    /// `None` also beyond a hundred times those that there are.
    needed_pods: Option<f64>,
    /// Comparison of plain with itself.
    aa: Option<Difference>,
    /// Cores or bytes that `fleet_pods` plain pods would save under jumbo.
    saving: Option<FleetSaving>,
    fleet_pods: usize,
}

impl FleetComparison {
    fn of(data: &Data, pods: Option<NonZeroUsize>, seed: u64) -> anyhow::Result<Self> {
        let fleet_pods = pods.map_or(data.units.len(), NonZeroUsize::get);
        if let Some(unit) = data.unmatched() {
            bail!(
                "{unit} has cores and requests_per_second, but never at the same time\nhint: write both with one time, or cpu_seconds_per_request"
            );
        }
        let per_request = data.has_requests();
        let (mut figures, mut left_out, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        for figure in Figure::ALL {
            let name = show::name(figure, per_request);
            let mut random = fastrand::Rng::with_seed(seed);
            let arms = [Arm::Plain, Arm::Jumbo, Arm::Aa].map(|arm| {
                let (values, missing) = data.values(figure, arm);
                if missing > 0 && !values.is_empty() {
                    notes.push(format!(
                        "{} of {arm} without {name}",
                        counted(missing as u64, "pod")
                    ));
                }
                values
            });
            match FigureComparison::of(figure, &arms, fleet_pods, &mut random) {
                Ok(compared) => figures.push(compared),
                Err(why) => left_out.push(Missing {
                    what: name.to_owned(),
                    why,
                }),
            }
        }
        if figures.is_empty() {
            let reasons = left_out.iter().map(|it| format!("{}: {}", it.what, it.why));
            let reasons = reasons.collect::<Vec<_>>().join("\n");
            bail!(
                "nothing can be compared\n{reasons}\nhint: both arms need {MIN_PODS} pods with a figure; docs/fleet.md names them"
            );
        }
        let [plain, jumbo, aa] = [Arm::Plain, Arm::Jumbo, Arm::Aa].map(|arm| data.count(arm));
        Ok(Self {
            pods: Pods { plain, jumbo, aa },
            hours: data.hours(),
            per_request,
            figures,
            left_out,
            notes,
        })
    }
}

impl FigureComparison {
    fn of(
        figure: Figure,
        arms: &[Vec<UnitValue>; 3],
        fleet_pods: usize,
        random: &mut fastrand::Rng,
    ) -> Result<Self, String> {
        let [mut plain, jumbo, aa] = arms
            .each_ref()
            .map(|arm| arm.iter().map(|it| it.value).collect::<Vec<_>>());
        let difference = Difference::of(&plain, &jumbo).ok_or_else(|| {
            format!(
                "{} plain and {} jumbo pods have it",
                plain.len(),
                jumbo.len()
            )
        })?;
        let parts = |arm: &[UnitValue]| {
            arm.iter()
                .map(|it| it.part)
                .collect::<Option<Vec<PodPart>>>()
        };
        let [before, after, _] = arms;
        let saving = parts(before).zip(parts(after)).map(|(before, after)| {
            FleetSaving::of(&before, &after, random).times(fleet_pods as f64)
        });
        let middle = median(&plain);
        let aa = match aa.is_empty() {
            false => Difference::of(&plain, &aa),
            true => {
                random.shuffle(&mut plain);
                let (one, other) = plain.split_at(plain.len() / 2);
                Difference::of(one, other)
            }
        };
        Ok(Self {
            figure,
            plain: middle,
            jumbo: median(&jumbo),
            difference,
            needed_pods: difference.needed_pods(arms[0].len() + arms[1].len()),
            aa,
            saving,
            fleet_pods,
        })
    }
}
