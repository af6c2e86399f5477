//! `--undo`.

use std::process::ExitCode;

use jumbo_host::host_pools::Shortage;
use jumbo_host::kernel::Root;
use jumbo_host::knobs::apply::{check_unchanged, undo_steps};
use jumbo_host::knobs::{Group, Record, Undone, undo};
use serde_json::json;

use super::terminal::Terminal;
use super::{Mode, all_or_part, change, command_line, failed, failure, journal, lock};
use crate::view::{self, View, tell};

/// Undoes the last change of any of `groups`.
pub(crate) fn main(
    root: &Root,
    groups: &[Group],
    mode: &Mode,
    compact: bool,
) -> anyhow::Result<ExitCode> {
    let journal = journal(root)?;
    let none = || {
        let of = match groups {
            [only] => format!(" of {}", only.name),
            _ => String::new(),
        };
        let hint = match rustix::process::geteuid().is_root() {
            true => "",
            false => " of this user's\nhint: root undoes the changes of root",
        };
        tell(&format!("no change{of} is recorded: nothing to undo{hint}"));
        if mode.json {
            view::json(&json!({"steps": [], "complete": true, "dry_run": mode.dry_run}))?;
        }
        Ok(ExitCode::SUCCESS)
    };
    let Some(last) = journal.last(groups).map_err(failed)? else {
        return none();
    };
    if mode.dry_run {
        let undone = Undone {
            steps: undo_steps(root, &last).map_err(failed)?,
            complete: false,
        };
        print(root, &last, &undone, mode, compact)?;
        return match check_unchanged(root, &last) {
            Err(error) if !mode.force => {
                Err(failed(error).context("it would be refused without --force"))
            }
            _ => Ok(ExitCode::SUCCESS),
        };
    }
    let command = command_line();
    let knobs = last.saved.iter().map(|saved| &saved.knob);
    let (locked, _pools) = lock(&journal, &last.group, knobs, &command)?;
    // Another process may have undone it before the lock.
    let Some(last) = locked.last().map_err(failed)? else {
        return none();
    };
    let mut terminal = Terminal::new(root)?;
    match undo(root, &locked, &last, compact, mode.force, &mut terminal) {
        Err(error) => {
            terminal.done();
            failure(error)
        }
        Ok(undone) => {
            change::tell_unshown(print(root, &last, &undone, mode, compact));
            Ok(terminal.end(all_or_part(undone.complete)))
        }
    }
}

fn print(
    root: &Root,
    last: &Record,
    undone: &Undone,
    mode: &Mode,
    compact: bool,
) -> anyhow::Result<()> {
    let shortage = Shortage::of(root, &undone.steps, compact);
    if mode.json {
        let mut page = json!(undone);
        page["group"] = json!(last.group);
        page["command"] = json!(last.command);
        page["finished"] = json!(last.finished);
        page["dry_run"] = json!(mode.dry_run);
        page["shortage"] = json!(shortage);
        return view::json(&page);
    }
    let mut view = View::default();
    let cut = if last.finished {
        ""
    } else {
        ", which was cut short"
    };
    let undoes = if mode.dry_run { "would undo" } else { "undoes" };
    view.line(format!(
        "{undoes} `{}` of process {}{cut}",
        last.command, last.pid
    ));
    super::steps(&mut view, root, &undone.steps);
    if undone.steps.is_empty() {
        view.line("  every value is as it was");
    }
    view.print()?;
    if !undone.complete && !mode.dry_run {
        tell("not all of it could be put back; `--undo` tries again");
        if let Some(shortage) = &shortage {
            change::tell_shortage(shortage);
        }
    }
    Ok(())
}
