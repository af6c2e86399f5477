//! `--undo`.

use std::process::ExitCode;

use jumbo::kernel::Root;
use jumbo::pool::host::carry::{stands, undo_steps};
use jumbo::pool::host::{Record, Undone, undo};
use jumbo::units::PageSize;
use serde::Serialize;

use super::attend::Terminal;
use super::{PART, command_line, failure, journal, outcome, refused, unrecorded};
use crate::view::{self, View, tell};

/// How a change is made, and put back.
#[derive(Debug, clap::Args)]
pub(super) struct Manner {
    /// Print the plan and write nothing
    #[arg(long)]
    pub(super) dry_run: bool,

    /// Have the kernel move memory together first, so that more huge pages can be made
    #[arg(long)]
    pub(super) compact: bool,

    /// Ask for more memory than is available; with --undo: put back even where somebody else has changed the
    /// pool since
    #[arg(long)]
    pub(super) force: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// What --force does where nothing can be asked for.
pub(super) const FORCE: &str =
    "With --undo: put back even where somebody else has changed the pool since";

/// The JSON.
#[derive(Serialize)]
struct Page<'a> {
    size: PageSize,
    /// The command that is undone.
    command: &'a str,
    /// False where that was cut short.
    finished: bool,
    dry_run: bool,
    #[serde(flatten)]
    undone: &'a Undone,
}

pub(super) fn main(root: &Root, size: Option<PageSize>, how: &Manner) -> anyhow::Result<ExitCode> {
    let journal = journal(root)?;
    let none = || {
        let of = size.map_or(String::new(), |size| {
            format!(" of the pool of {size} pages")
        });
        tell(&format!("no change{of} is recorded: nothing to undo"));
        Ok(ExitCode::SUCCESS)
    };
    let Some(last) = journal.last(size).map_err(unrecorded)? else {
        return none();
    };
    if how.dry_run {
        let undone = Undone {
            steps: undo_steps(root, &last).map_err(refused)?,
            files: last.files.iter().map(|file| file.file.clone()).collect(),
            ..Default::default()
        };
        if let Err(error) = stands(root, &last) {
            tell(&format!("it would be refused without --force: {error}"));
        }
        return print(root, &last, &undone, how).map(|()| ExitCode::SUCCESS);
    }
    let locked = journal
        .lock(last.size, &command_line())
        .map_err(unrecorded)?;
    // Somebody else may have undone it meanwhile.
    let Some(last) = locked.last().map_err(unrecorded)? else {
        return none();
    };
    let mut terminal = Terminal::new()?;
    match undo(root, &locked, &last, how.compact, how.force, &mut terminal) {
        Err(error) => {
            terminal.done();
            failure(error)
        }
        Ok(undone) => {
            let code = if undone.complete {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(PART)
            };
            outcome::tell_unshown(print(root, &last, &undone, how));
            Ok(terminal.end(code))
        }
    }
}

fn print(root: &Root, last: &Record, undone: &Undone, how: &Manner) -> anyhow::Result<()> {
    if how.json {
        view::json(&Page {
            size: last.size,
            command: &last.command,
            finished: last.finished,
            dry_run: how.dry_run,
            undone,
        })?;
        return Ok(());
    }
    let mut view = View::stdout();
    let cut = if last.finished {
        ""
    } else {
        ", which was cut short"
    };
    let undoes = if how.dry_run { "would undo" } else { "undoes" };
    view.line(format!(
        "{undoes} `{}` of process {}{cut}",
        last.command, last.pid
    ))?;
    outcome::steps(&mut view, root, &undone.steps)?;
    for file in &undone.files {
        view.line(format!("  {} as it was", root.path(file).display()))?;
    }
    if undone.steps.is_empty() && undone.files.is_empty() {
        view.line("  every value is as it was")?;
    }
    view.finish()?;
    if !undone.complete && !how.dry_run {
        tell("not all of it could be put back; `jumbo pool --undo` tries again");
        if let Some(shortage) = &undone.shortage {
            outcome::tell_shortage(shortage);
        }
    }
    Ok(())
}
