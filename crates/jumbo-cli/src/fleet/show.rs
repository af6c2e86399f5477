//! Text output of a comparison of arms, and of the plan of an experiment.

use jumbo::units::counted;

use super::data::Figure;
use super::simulate::ExperimentPlan;
use super::statistics::{Difference, FleetSaving};
use super::{FigureComparison, FleetComparison};
use crate::compare::{bytes, percent};
use crate::view::{View, or_none};

pub(super) fn comparison(view: &mut View, it: &FleetComparison) {
    let pods = &it.pods;
    let arms = [
        ("plain", pods.plain),
        ("jumbo", pods.jumbo),
        ("aa", pods.aa),
    ];
    let arms = arms.into_iter().filter(|(_, count)| *count > 0);
    let arms: Vec<_> = arms.map(|(arm, count)| format!("{count} {arm}")).collect();
    let (arms, hours) = (arms.join(", "), it.hours);
    view.line(format!(
        "Pods: {arms}; {hours:.1} hours. A pod counts once, whatever its samples."
    ));
    view.line("");
    let rows = it.figures.iter().map(|of| {
        [
            name(of.figure, it.per_request).to_owned(),
            amount(of.figure, it.per_request, of.plain),
            amount(of.figure, it.per_request, of.jumbo),
            interval(of.difference),
            or_none(of.aa.map(interval)),
        ]
    });
    view.table(
        "<Median pod|>plain|>jumbo|>change, 95 % interval|>plain with itself",
        rows,
    );
    view.line("");
    for of in &it.figures {
        view.lines(verdict(of, it.per_request));
    }
    for of in it
        .figures
        .iter()
        .filter(|of| of.aa.is_some_and(|aa| aa.seen))
    {
        view.line(format!(
            "WARNING: {}: plain differs from itself. \
             By chance one of 20 does; else the arms are not alike.",
            name(of.figure, it.per_request)
        ));
    }
    if !it.per_request {
        view.line("No requests are known: CPU is that of a pod, so all pods need the same load.");
    }
    view.missing("Left out", &it.left_out);
    view.lines(it.notes.iter().map(|note| format!("Note: {note}.")))
}

pub(super) fn name(figure: Figure, per_request: bool) -> &'static str {
    match figure {
        Figure::Cpu if per_request => "CPU per request",
        Figure::Cpu => "CPU",
        Figure::P99 => "p99",
        Figure::Memory => "memory",
    }
}

fn amount(figure: Figure, per_request: bool, value: f64) -> String {
    match figure {
        Figure::Memory => bytes(value),
        Figure::Cpu if !per_request => format!("{value:.3} cores"),
        _ if value < 1e-3 => format!("{:.2} us", value * 1e6),
        _ if value < 1.0 => format!("{:.2} ms", value * 1e3),
        _ => format!("{value:.2} s"),
    }
}

/// Change from the baseline to the candidate, in percent of the baseline.
fn change(ratio: f64) -> f64 {
    (1.0 / ratio - 1.0) * 100.0
}

fn interval(it: Difference) -> String {
    let [middle, low, high] = [it.ratio, it.high, it.low].map(change);
    format!("{middle:+.1} % [{low:+.1} to {high:+.1}]")
}

/// One sentence on a figure, and one on the total.
fn verdict(it: &FigureComparison, per_request: bool) -> Vec<String> {
    let Difference {
        ratio,
        low,
        high,
        seen,
        ..
    } = it.difference;
    let name = name(it.figure, per_request);
    // The larger ratio is the smaller change.
    let [low, high] = [high, low].map(change);
    if !seen {
        let mut lines = vec![format!(
            "{name}: no difference seen ({low:+.1} to {high:+.1} %)."
        )];
        lines.extend(it.needed_pods.map(|pods| {
            let change = change(ratio);
            format!("  If {change:+.1} % is true, {pods} pods in all would show it.")
        }));
        return lines;
    }
    let (word, factor, low, high) = match ratio > 1.0 {
        true => ("less", 1.0 - 1.0 / ratio, -high, -low),
        false => ("more", 1.0 / ratio - 1.0, low, high),
    };
    let mut lines = vec![format!(
        "{name}: {} {word} ({low:.1} to {high:.1} %).",
        percent(factor)
    )];
    if let Some(saving) = it.saving {
        lines.push(format!("  {}", total(it.figure, saving, it.fleet_pods)));
    }
    lines
}

/// Saving, or additional need, of all pods.
fn total(figure: Figure, saving: FleetSaving, pods: usize) -> String {
    let (unit, scale) = match figure {
        Figure::Memory => ("GiB", f64::from(1 << 30)),
        _ => ("cores", 1.0),
    };
    let all = counted(pods as u64, "pod");
    let [amount, low, high] = [saving.amount, saving.low, saving.high].map(|it| it / scale);
    let (word, more, low, high) = match amount >= 0.0 {
        true => ("save", "", low, high),
        false => ("need", " more", -high, -low),
    };
    let amount = digits(amount.abs());
    let doubt = if low > 0.0 { "" } else { ", or none" };
    let [low, high] = [low, high].map(digits);
    format!("{all} under jumbo would {word} {amount} {unit}{more} ({low} to {high}){doubt}.")
}

/// Formats with three significant digits.
fn digits(value: f64) -> String {
    let digits = match value.abs() {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

pub(super) fn plan(view: &mut View, it: &ExperimentPlan) {
    let [between, hourly, effect] = [it.spread.between, it.spread.hourly, it.effect]
        .map(|part| format!("{:.2} %", part * 100.0));
    let has_one_sample = it.spread.hourly == 0.0;
    let over_time = match has_one_sample {
        true => "each is one sample, as jobs are".to_owned(),
        false => format!("{hourly} of a pod from hour to hour"),
    };
    view.heading(&format!(
        "{}: {between} between pods, {over_time}",
        name(it.figure, false)
    ));
    let pods = it.pods;
    let rows = it.rows.iter().map(|row| {
        [
            match has_one_sample {
                true => "any".to_owned(),
                false => row.hours.to_string(),
            },
            row.pods.to_string(),
            format!("{:.0} %", row.power * 100.0),
            format!("{:.1} %", row.simulated * 100.0),
        ]
    });
    view.table(
        &format!(
            ">hours|>pods for 80 %|>power of {pods} pods|>in {} drawn fleets",
            it.runs
        ),
        rows,
    );
    let seen =
        format!("A difference of {effect} is seen by {pods} pods, half of them under jumbo,");
    let end = match it.hours {
        Some(_) if has_one_sample => "with 80 % power.".to_owned(),
        Some(hours) => format!("with 80 % power after {hours} h."),
        None => format!(
            "with 80 % power in no time: the pods differ too much. At least {} pods see it.",
            it.least_pods
        ),
    };
    view.lines([seen, format!("  {end}")])
}
