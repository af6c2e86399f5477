//! A change, from its plan to what came of it: [`change`].

use std::io;
use std::process::ExitCode;

use anyhow::anyhow;
use jumbo::host_pools::Shortage;
use jumbo::kernel::Root;
use jumbo::knobs::{Boot, Group, Knob, Plan, PlanError, Step, Undone, Value, apply, boot};
use jumbo::units::counted;
use serde::Serialize;

use super::terminal::Terminal;
use super::{How, Manner, PART, Usage, command_line, failure, journal, refused, undo, unrecorded};
use crate::view::{self, View, in_words, is_broken_pipe, tell};

/// What is to be done, and what there is to say about it.
pub(crate) struct Planned<D> {
    pub(crate) plan: Plan,
    pub(crate) boot: Boot,
    pub(crate) notes: Vec<String>,
    /// Notes of a plan that is only shown.
    pub(crate) obstacles: Vec<String>,
    /// Why it takes --force.
    pub(crate) needs_force: Option<String>,
    /// Whether memory is to be moved together first.
    pub(crate) compact: bool,
    pub(crate) details: D,
}

/// What is said about one kind of knobs beside the writes.
pub(crate) trait Details: Serialize {
    /// Lines below the writes.
    fn show(&self, view: &mut View, shortage: Option<&Shortage>) -> io::Result<()>;
    /// Takes in how things are after the writes; gives notes.
    fn look_again(&mut self, root: &Root) -> Vec<String>;
}

/// Nothing more to say.
#[derive(Serialize)]
struct Plain {}

impl Details for Plain {
    fn show(&self, _: &mut View, _: Option<&Shortage>) -> io::Result<()> {
        Ok(())
    }

    fn look_again(&mut self, _: &Root) -> Vec<String> {
        Vec::new()
    }
}

/// Gives knobs of one group their values, or does what else `how` says. `note` is what is worth knowing of a plan.
pub(crate) fn set(
    root: &Root,
    group: &Group,
    how: &How,
    values: &[(Knob, Value)],
    note: fn(&Root, &Plan) -> Option<String>,
) -> anyhow::Result<ExitCode> {
    if how.undo {
        return undo::main(root, std::slice::from_ref(group), &how.manner, false);
    }
    change(root, &how.manner, || {
        let mut plan = match Plan::of(root, group.clone(), values.iter().cloned()) {
            Ok(plan) => plan,
            Err(PlanError::File(error)) => return Err(refused(error)),
            Err(error) => return Err(Usage(error.to_string()).into()),
        };
        let boot = if how.persist {
            let values = values.iter().cloned();
            let values: Vec<_> = values.map(|(knob, value)| (knob.file, value)).collect();
            boot::persist(root, group, &values, &[])?
        } else if how.forget {
            boot::forget(root, group, None)?
        } else {
            Boot::default()
        };
        plan.files.clone_from(&boot.files);
        Ok(Planned {
            notes: note(root, &plan).into_iter().collect(),
            plan,
            boot,
            obstacles: Vec::new(),
            needs_force: None,
            compact: false,
            details: Plain {},
        })
    })
}

/// The JSON, and what the text is made of.
#[derive(Serialize)]
struct Outcome<'a, D> {
    /// True where nothing was written.
    dry_run: bool,
    steps: Vec<Step>,
    /// What the next boot will set.
    boot: Boot,
    shortage: Option<Shortage>,
    notes: Vec<String>,
    #[serde(flatten)]
    details: D,
    #[serde(skip)]
    root: &'a Root,
    #[serde(skip)]
    group: String,
}

/// Carries out what `plan` makes of how things are; it is asked again when no other process can change them.
pub(crate) fn change<D: Details>(
    root: &Root,
    manner: &Manner,
    plan: impl Fn() -> anyhow::Result<Planned<D>>,
) -> anyhow::Result<ExitCode> {
    let Planned {
        plan: writes,
        boot,
        mut notes,
        obstacles,
        needs_force,
        details,
        ..
    } = plan()?;
    let refusal = |needs_force: Option<String>| {
        let why = needs_force.filter(|_| !manner.force)?;
        Some(anyhow!("{why}\nhint: `--force` asks for it all the same"))
    };
    if manner.dry_run || writes.is_empty() {
        if manner.dry_run {
            notes.extend(obstacles);
        }
        let outcome = Outcome::planned(root, writes, boot, notes, details, manner.dry_run);
        outcome.print(manner.json)?;
        return match refusal(needs_force) {
            Some(refusal) => Err(refusal.context("it would be refused without --force")),
            None => Ok(ExitCode::SUCCESS),
        };
    }
    writes.writable(root).map_err(refused)?;

    let command = command_line();
    let locked = journal(root)?
        .lock(&writes.group, &command)
        .map_err(unrecorded)?;
    let planned = plan()?;
    let (writes, compact) = (planned.plan, planned.compact);
    let mut outcome = Outcome::planned(
        root,
        writes.clone(),
        planned.boot,
        planned.notes,
        planned.details,
        false,
    );
    if writes.is_empty() {
        // The process that had the lock has done it.
        outcome.print(manner.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(refusal) = refusal(planned.needs_force) {
        return Err(refusal);
    }
    let mut terminal = Terminal::new(root)?;
    let applied = match apply(root, &locked, &writes, &command, compact, &mut terminal) {
        Ok(applied) => applied,
        Err(error) => {
            terminal.done();
            return failure(error);
        }
    };
    drop(locked);
    if let Some(undone) = &applied.put_back {
        tell(interrupted(undone));
        return Ok(terminal.end(ExitCode::from(PART)));
    }
    // Done: a signal that comes now finds nothing to put back.
    terminal.done();
    let other = |step: &Step| step.after.as_ref() != Some(&step.to);
    let part = applied.steps.iter().any(other);
    outcome.shortage = Shortage::of(root, &applied.steps, compact);
    outcome.steps = applied.steps;
    outcome.notes.extend(applied.notes);
    outcome.notes.extend(outcome.details.look_again(root));
    tell_unshown(outcome.print(manner.json));
    if let Some(shortage) = &outcome.shortage {
        tell_shortage(shortage);
    }
    Ok(if part {
        ExitCode::from(PART)
    } else {
        ExitCode::SUCCESS
    })
}

impl<'a, D: Details> Outcome<'a, D> {
    fn planned(
        root: &'a Root,
        plan: Plan,
        boot: Boot,
        notes: Vec<String>,
        details: D,
        dry_run: bool,
    ) -> Self {
        Self {
            dry_run,
            steps: plan.steps,
            boot,
            shortage: None,
            notes,
            details,
            root,
            group: plan.group.name,
        }
    }

    fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return view::json(self);
        }
        let mut view = View::stdout();
        self.show(&mut view)?;
        Ok(view.finish()?)
    }

    fn show(&self, view: &mut View) -> io::Result<()> {
        let Self { boot, root, .. } = self;
        if self.steps.is_empty() && boot.files.is_empty() {
            view.line(format!("{}: already as asked, nothing to do", self.group))?;
        }
        super::steps(view, root, &self.steps)?;
        self.details.show(view, self.shortage.as_ref())?;
        for file in &boot.files {
            let path = root.path(&file.file);
            match &file.after {
                None => view.line(format!("  remove {}", path.display()))?,
                Some(text) => {
                    view.line(format!("  at boot, from {}:", path.display()))?;
                    for line in text.lines().filter(|line| !line.starts_with('#')) {
                        view.line(format!("    {line}"))?;
                    }
                }
            }
        }
        if let Some(arguments) = &boot.command_line {
            view.line(
                "  at boot, for sure only from the kernel command line (of the boot loader):",
            )?;
            view.line(format!("    {arguments}"))?;
        }
        for note in boot.notes.iter().chain(&self.notes) {
            view.line(format!("  note: {note}"))?;
        }
        Ok(())
    }
}

/// Why not all pages came, on stderr.
pub(crate) fn tell_shortage(shortage: &Shortage) {
    let Shortage {
        size,
        asked,
        came,
        reasons,
        hints,
        ..
    } = shortage;
    let asked = counted(asked.0, &format!("more {size} page"));
    let mut lines = vec![format!("{came} of {asked} came")];
    lines.extend(reasons.iter().map(|reason| format!("  {reason}")));
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
    lines.extend(hints.iter().map(|hint| format!("hint: {hint}")));
    tell(&lines.join("\n"));
}

/// Says that what was done could not be shown. It is done all the same, so the exit status is of that.
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

/// What became of a change that a signal cut short.
fn interrupted(undone: &Undone) -> &'static str {
    if undone.complete {
        "interrupted: everything was put back"
    } else {
        "interrupted, and not all could be put back; `--undo` tries again"
    }
}
