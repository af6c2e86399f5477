//! What a change of a pool says: the plan, what came of it, and why not more.

use std::collections::BTreeMap;
use std::io;

use jumbo::kernel::Root;
use jumbo::kernel::cgroup::{Limit, Limits};
use jumbo::kernel::hugetlb::Pool;
use jumbo::pool::host::change::Effect;
use jumbo::pool::host::{Boot, Carried, Plan, Shortage, Step, Undone};
use jumbo::units::{PageSize, Pages, counted};
use serde::Serialize;

use crate::view::{self, View, in_words, is_broken_pipe, tell};

/// The JSON, and what the text is made of.
#[derive(Serialize)]
pub(super) struct Outcome {
    size: PageSize,
    /// True where nothing was written.
    dry_run: bool,
    steps: Vec<Step>,
    effect: Effect,
    /// What the next boot will set.
    boot: Boot,
    shortage: Option<Shortage>,
    notes: Vec<String>,
    /// The pool before.
    before: Pool,
    /// The pool now; as before where nothing was written.
    after: Pool,
    #[serde(skip)]
    root: Root,
}

impl Outcome {
    /// What would be done.
    pub(super) fn planned(
        root: &Root,
        before: &Pool,
        plan: Plan,
        boot: Boot,
        notes: Vec<String>,
        dry_run: bool,
    ) -> Self {
        Self {
            size: plan.size,
            dry_run,
            steps: plan.steps,
            effect: plan.effect,
            boot,
            shortage: None,
            notes,
            before: before.clone(),
            after: before.clone(),
            root: root.clone(),
        }
    }

    /// What was done.
    pub(super) fn carried(
        root: &Root,
        before: &Pool,
        plan: Plan,
        carried: Carried,
        boot: Boot,
        mut notes: Vec<String>,
    ) -> Self {
        notes.extend(carried.notes);
        let now = super::pool(root, plan.size);
        notes.extend(now.iter().flat_map(|pool| limits(root, pool)));
        let plan = Plan {
            steps: carried.steps,
            ..plan
        };
        Self {
            shortage: carried.shortage,
            after: now.unwrap_or_else(|_| before.clone()),
            ..Self::planned(root, before, plan, boot, notes, false)
        }
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return view::json(self);
        }
        let mut view = View::stdout();
        self.show(&mut view)?;
        Ok(view.finish()?)
    }

    /// Why not all pages came, on stderr.
    pub(super) fn tell_shortage(&self) {
        if let Some(shortage) = &self.shortage {
            tell_shortage(shortage);
        }
    }

    fn show(&self, view: &mut View) -> io::Result<()> {
        let Self { size, boot, .. } = self;
        if self.steps.is_empty() && boot.files.is_empty() {
            view.line(format!(
                "the pool of {size} pages is already as asked: nothing to do"
            ))?;
        }
        steps(view, &self.root, &self.steps)?;
        self.show_effect(view)?;
        for file in &boot.files {
            let path = self.root.path(&file.file);
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

    fn show_effect(&self, view: &mut View) -> io::Result<()> {
        let Self { size, effect, .. } = self;
        let mut say = |pages: Pages, what: &str| {
            if pages == Pages(0) {
                return Ok(());
            }
            let (pages, memory) = (counted(pages.0, "page"), pages.bytes(*size));
            view.line(format!("    {pages} ({memory}) {what}"))
        };
        let short = self.shortage.as_ref();
        say(effect.adopted, "surplus before, persistent now")?;
        match short {
            Some(short) => say(short.came, &format!("of {} came", short.asked))?,
            None => say(effect.made, "made of free memory")?,
        }
        say(effect.freed, "given back to the host")?;
        say(
            effect.turned_surplus,
            "in use or reserved: they go back when they are free",
        )
    }
}

/// What a control group leaves of the pool to whoever runs where we do: a pool can be larger than that,
/// and then it is not for want of pages that a mapping fails.
fn limits(root: &Root, pool: &Pool) -> Vec<String> {
    let limits = Limits::read(root, &[pool.size]).unwrap_or_default();
    let unused = pool.unused().bytes(pool.size);
    let kinds = [("use", &limits.hugetlb), ("reserve", &limits.reservations)];
    let limit = |(what, limits): (&str, &BTreeMap<PageSize, Limit>)| {
        let limit = limits
            .get(&pool.size)
            .filter(|limit| limit.room() < unused)?;
        Some(format!(
            "this control group may {what} {} of the {unused} that are free ({})",
            limit.room(),
            limit.file.display()
        ))
    };
    kinds.into_iter().filter_map(limit).collect()
}

/// The writes, one a line: file, value before, value asked and, where that is another, obtained.
pub(super) fn steps(view: &mut View, root: &Root, steps: &[Step]) -> io::Result<()> {
    for step in steps {
        let file = root.path(step.knob.file());
        let obtained = match step.after {
            Some(after) if after != step.to => format!(", {after} obtained"),
            _ => String::new(),
        };
        view.line(format!(
            "  {}: {} -> {}{obtained}",
            step.knob, step.before, step.to
        ))?;
        view.line(format!("    {}", file.display()))?;
    }
    Ok(())
}

/// Why not all pages came, on stderr.
pub(super) fn tell_shortage(shortage: &Shortage) {
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
pub(super) fn tell_unshown(printed: anyhow::Result<()>) {
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
pub(super) fn interrupted(undone: &Undone) -> &'static str {
    if undone.complete {
        "interrupted: everything was put back"
    } else {
        "interrupted, and not all could be put back; `jumbo pool --undo` tries again"
    }
}
