//! Execution of a change, from its plan to its result: [`change`].

use std::process::ExitCode;

use anyhow::anyhow;
use jumbo::units::counted;
use jumbo_host::host_pools::Shortage;
use jumbo_host::kernel::Root;
use jumbo_host::knobs::{ApplyError, Group, Knob, Plan, Step, Value, apply};
use serde::Serialize;

use super::terminal::Terminal;
use super::{EXIT_PARTIAL, Mode, all_or_part, command_line, failed, failure, journal, lock, usage};
use crate::pool::change::PoolDelta;
use crate::signal::end_by;
use crate::view::{self, View, in_words, is_broken_pipe, tell};

/// A change before or after its execution, for JSON and text.
#[derive(Serialize)]
pub(crate) struct Change {
    #[serde(flatten)]
    plan: Plan,
    pub(crate) notes: Vec<String>,
    /// True where nothing was written.
    dry_run: bool,
    /// Reason why fewer pages were allocated than requested.
    shortage: Option<Shortage>,
    /// Effect on the pool, if the change is of one.
    #[serde(flatten)]
    pub(crate) pool: Option<PoolDelta>,
    #[serde(skip)]
    pub(crate) needs_force: Option<String>,
    #[serde(skip)]
    pub(crate) compact: bool,
}

/// Executes the change that `plan` makes of the current state. It plans again under the lock, when
/// no other process can change that state.
pub(crate) fn change(
    root: &Root,
    mode: &Mode,
    plan: impl Fn() -> anyhow::Result<Change>,
) -> anyhow::Result<ExitCode> {
    let mut change = plan()?;
    if mode.dry_run || change.plan.is_empty() {
        change.dry_run = mode.dry_run;
        change.print(root, mode.json)?;
        return match change.refusal(mode) {
            Some(refusal) => Err(refusal.context("it would be refused without --force")),
            None => Ok(ExitCode::SUCCESS),
        };
    }
    change.plan.writable(root).map_err(failed)?;

    let command = command_line();
    let journal = journal(root)?;
    let group = change.plan.group.clone();
    // Restored knobs can be of another group than written ones.
    let knobs = change.plan.steps.iter().map(|step| &step.knob);
    let knobs = knobs.chain(change.plan.saved.iter().map(|saved| &saved.knob));
    let (locked, pools) = lock(&journal, &group, knobs, &command)?;
    change = plan()?;
    if change.plan.is_empty() {
        // The previous owner of the lock did it.
        change.print(root, mode.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(refusal) = change.refusal(mode) {
        return Err(refusal);
    }
    let mut terminal = Terminal::new(root)?;
    let compact = change.compact;
    let applied = match apply(
        root,
        &locked,
        &change.plan,
        &command,
        compact,
        &mut terminal,
    ) {
        Ok(applied) => applied,
        Err(error) => {
            let ended_by = terminal.done();
            return failure(error).map(|code| ended_by.map_or(code, end_by));
        }
    };
    drop((locked, pools));
    if let Some(undone) = &applied.put_back {
        tell(if undone.complete {
            "interrupted: everything was put back"
        } else {
            "interrupted, and not all could be put back; `--undo` tries again"
        });
        return Ok(terminal.end(ExitCode::from(EXIT_PARTIAL)));
    }
    terminal.done();
    change.shortage = Shortage::of(root, &applied.steps, compact);
    change.plan.steps = applied.steps;
    change.notes.extend(applied.notes);
    if let Some(pool) = &mut change.pool {
        change.notes.extend(pool.reread(root));
    }
    tell_unshown(change.print(root, mode.json));
    if let Some(shortage) = &change.shortage {
        tell_shortage(shortage);
    }
    let came = |step: &Step| step.after.as_ref() == Some(&step.to);
    Ok(all_or_part(change.plan.steps.iter().all(came)))
}

/// Plans these values; an invalid one is wrong usage.
pub(crate) fn plan(root: &Root, group: &Group, values: &[(Knob, Value)]) -> anyhow::Result<Plan> {
    match Plan::of(root, group.clone(), values.iter().cloned()) {
        Ok(plan) => Ok(plan),
        Err(error @ ApplyError::Refused(_)) => Err(failed(error)),
        Err(error) => usage(&error.to_string()),
    }
}

impl Change {
    pub(crate) fn new(plan: Plan, notes: Vec<String>) -> Self {
        Self {
            plan,
            notes,
            dry_run: false,
            shortage: None,
            pool: None,
            needs_force: None,
            compact: false,
        }
    }

    fn refusal(&self, mode: &Mode) -> Option<anyhow::Error> {
        let why = self.needs_force.as_ref().filter(|_| !mode.force)?;
        Some(anyhow!(
            "{why}\nhint: `{} --force` asks for it all the same",
            command_line()
        ))
    }

    fn print(&self, root: &Root, json: bool) -> anyhow::Result<()> {
        view::page(json, self, |view, change| change.show(view, root)).map(drop)
    }

    fn show(&self, view: &mut View, root: &Root) {
        let plan = &self.plan;
        if plan.is_empty() {
            view.line(format!(
                "{}: already as asked, nothing to do",
                plan.group.name
            ));
        }
        super::steps(view, root, &plan.steps);
        if let Some(pool) = &self.pool {
            pool.show(view, self.shortage.as_ref());
        }
        view.lines(self.notes.iter().map(|note| format!("  note: {note}")))
    }
}

/// Prints on stderr why fewer pages were allocated than requested.
pub(crate) fn tell_shortage(shortage: &Shortage) {
    let size = shortage.size;
    let asked = counted(shortage.asked.0, &format!("more {size} page"));
    let mut lines = vec![format!("{} of {asked} came", shortage.came)];
    lines.extend(shortage.reasons.iter().map(|reason| format!("  {reason}")));
    for zone in &shortage.zones {
        let whole = zone.whole.map_or(String::new(), |pages| {
            format!(", {}", counted(pages.0, &format!("whole {size} page")))
        });
        let fixed = zone.fixed_blocks.map_or(String::new(), |(fixed, all)| {
            format!(", {fixed} of {all} pageblocks cannot be moved")
        });
        let (node, name, free) = (zone.node, &zone.zone, zone.free);
        lines.push(format!(
            "  node {node} zone {name}: {free} free{whole}{fixed}"
        ));
    }
    lines.extend(shortage.hints.iter().map(|hint| format!("hint: {hint}")));
    tell(&lines.join("\n"));
}

/// Reports an output error on stderr. The change is done all the same, so the exit status does not
/// depend on it.
pub(crate) fn tell_unshown(printed: anyhow::Result<()>) {
    match printed {
        Err(error) if !is_broken_pipe(&error) => {
            tell(&format!(
                "it is done, but could not be shown: {}",
                in_words(&error)
            ));
        }
        _ => {}
    }
}
