//! Output of the results, as text and as JSON.

use std::time::Duration;

use jumbo::units::Bytes;
use jumbo_host::teardown::{Reason, TeardownMethod};
use serde_json::json;

use super::target::{KillOutcome, KillResult};
use crate::signal::Number;
use crate::view::{self, View, duration};

pub(super) fn json(signal: Number, concluded: &[KillResult]) -> anyhow::Result<()> {
    let row = |one: &KillResult| {
        let (outcome, reason) = match &one.outcome {
            KillOutcome::Ended => ("ended", None),
            KillOutcome::WasEnded { .. } => ("had-ended", None),
            KillOutcome::Alive(why) => ("alive", Some(why)),
            KillOutcome::Failed { why, .. } => ("failed", Some(why)),
        };
        json!({
            "pid": one.pid,
            "name": one.name,
            "outcome": outcome,
            "reason": reason,
            "wait_ms": one.waited.map(|waited| waited.as_secs_f64() * 1e3),
            "unheld": one.unheld,
            "gain": one.gain,
        })
    };
    let processes: Vec<_> = concluded.iter().map(row).collect();
    view::json(&json!({"signal": signal.to_string(), "processes": processes}))
}

pub(super) fn text(signal: Number, concluded: &[KillResult]) -> anyhow::Result<()> {
    let mut view = View::stdout();
    for one in concluded {
        let name = match one.name.as_str() {
            "" => one.pid.to_string(),
            name => format!("{} {}", one.pid, view::clean(name)),
        };
        match &one.outcome {
            KillOutcome::Ended => {
                let waited = one.waited.map(duration).unwrap_or_default();
                view.line(format!("{name}: ended, {waited} after {signal}"))?;
                view.lines(lines(one).iter().map(|line| format!("  {line}")))?;
            }
            KillOutcome::WasEnded { parent } => view.line(format!(
                "{name}: had ended before; its parent {parent} has not waited for it"
            ))?,
            KillOutcome::Alive(why) => {
                let hint =
                    "hint: SIGKILL can be neither handled, blocked nor ignored: --signal KILL";
                view::tell(&format!("{name} goes on: {why}\n{hint}"));
            }
            KillOutcome::Failed { why, hint } => {
                let hint = hint
                    .map(|hint| format!("\nhint: {hint}"))
                    .unwrap_or_default();
                view::tell(&format!("cannot end {name}: {why}{hint}"));
            }
        }
    }
    view.finish()?;
    Ok(())
}

/// Lines about the freed memory, and about the reasons for less.
fn lines(one: &KillResult) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(gain) = &one.gain {
        let time = gain
            .teardown_ms
            .map(|ms| duration(Duration::from_secs_f64(ms / 1e3)));
        let time = time.unwrap_or_default();
        let anonymous = gain.anonymous;
        lines.push(match gain.released {
            Some(ours) if gain.reason.is_none() => format!(
                "{anonymous} given back in {time} from both sides, about {ours} of it by jumbo"
            ),
            // A reaper still holds the memory.
            _ if gain.reason == Some(Reason::SharedMemory) => {
                format!(
                    "{anonymous} not back yet; `jumbo wait {}` waits until a reaper has given it back",
                    one.pid
                )
            }
            _ => format!("{anonymous} given back in {time} by the kernel alone"),
        });
        if gain.left > Bytes(0) {
            lines.push(format!(
                "{} shared or hugetlb, which is the kernel's alone to unmap",
                gain.left
            ));
        }
        lines.extend(gain.reason.map(|reason| format!("less: {reason}")));
        if gain.way == TeardownMethod::Raced && gain.reason.is_none() {
            lines.push(String::from("raced, and won"));
        }
    }
    lines.extend(one.unheld.map(|reason| format!("not held: {reason}")));
    lines
}
