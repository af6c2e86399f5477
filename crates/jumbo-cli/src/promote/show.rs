//! Output of the results, as text and as JSON.

use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::promote::{Access, Outcome, Part, PromotePlan, Split, left_out};
use jumbo_host::status::Kind;

use super::{ProcessResult, PromotePage};
use crate::view::{self, View, duration, percent};

/// Shows all results; tells refusals.
pub(super) fn show(view: &mut View, page: &PromotePage) {
    for done in &page.processes {
        let name = match done.name.as_str() {
            "" => done.pid.to_string(),
            name => format!("{} {}", done.pid, view::clean(name)),
        };
        if let Some(refusal) = &done.refusal {
            let hint = done.hint.map(|hint| format!("\nhint: {hint}"));
            let hint = hint.unwrap_or_default();
            view::tell(&format!("cannot promote {name}: {refusal}{hint}"));
        } else if let Some(split) = &done.split {
            undone(view, &name, page.dry_run, split);
        } else if let (Some(plan), Some(reach)) = (&done.plan, &done.reach) {
            promoted(view, &name, plan, reach, done);
        }
    }
}

fn promoted(view: &mut View, name: &str, plan: &PromotePlan, reach: &Access, done: &ProcessResult) {
    let method = reach.method;
    view.line(match &done.outcome {
        _ if plan.is_empty() => format!("{name}: nothing to promote"),
        None => format!("{name}: {} could be on huge pages (by {method})", plan.gain),
        Some(outcome) => format!(
            "{name}: {} of {} put on huge pages in {} (by {method})",
            outcome.obtained,
            outcome.planned,
            duration(Duration::from_secs_f64(outcome.seconds))
        ),
    });
    for (kind, part) in &plan.kinds {
        view.lines(of_kind(*kind, part).iter().map(|line| format!("  {line}")));
    }
    if !plan.is_empty() {
        let bound = plan
            .bound
            .map(|bound| format!(", of {bound} allowed (--max-waste)"));
        let cost = done
            .outcome
            .as_ref()
            .map_or(plan.cost, |outcome| outcome.cost);
        view.line(format!(
            "  takes {cost} more memory{}",
            bound.unwrap_or_default()
        ));
    }
    if let Some(obstacle) = &done.obstacle {
        view.line(format!("  none of it now: {obstacle}"));
    }
    if let Some(outcome) = &done.outcome {
        view.lines(not_obtained(outcome).iter().map(|line| format!("  {line}")));
    }
}

fn of_kind(kind: Kind, part: &Part) -> Vec<String> {
    let share = percent(part.huge, part.resident);
    let first = match part.resident {
        Bytes(0) => format!("{}: none resident", kind.name()),
        resident => format!(
            "{}: {resident} resident, {share} of it huge before",
            kind.name()
        ),
    };
    let left = part.left.iter();
    let left = left.map(|(reason, bytes)| format!("  {bytes} stay {}", left_out(reason)));
    std::iter::once(first).chain(left).collect()
}

fn not_obtained(outcome: &Outcome) -> Vec<String> {
    let mut lines = Vec::new();
    if outcome.changed > Bytes(0) {
        lines.push(format!(
            "{} unmapped, emptied or huge by their turn",
            outcome.changed
        ));
    }
    for failure in &outcome.failures {
        let first = failure
            .ranges
            .first()
            .map(|at| format!(", first at {at:#x}"));
        let (errno, reason, first) = (failure.errno, failure.reason, first.unwrap_or_default());
        lines.push(format!(
            "{} refused: {errno}, {reason}{first}",
            failure.bytes
        ));
    }
    for (pause, seconds) in &outcome.paused {
        let waited = duration(Duration::from_secs_f64(*seconds));
        lines.push(format!("waited {waited}: {pause}"));
    }
    if outcome.ended {
        lines.push(String::from("it ended meanwhile, or runs another program"));
    }
    lines.extend(
        outcome
            .stopped
            .as_ref()
            .map(|why| format!("the rest was not tried: {why}")),
    );
    lines
}

fn undone(view: &mut View, name: &str, dry_run: bool, split: &Split) {
    let gone = Bytes(split.before.0.saturating_sub(split.after.0));
    let line = match (split.before, dry_run) {
        (Bytes(0), _) => format!("{name}: nothing is huge"),
        (before, true) => format!("{name}: {before} would be split, whatever made them huge"),
        (before, false) => {
            let means = split.means.join(", ");
            format!("{name}: {gone} of {before} split (by {means})")
        }
    };
    view.line(line);
    if let Some(left) = &split.left {
        view.line(format!("  {} stay huge: {left}", split.after));
    }
}
