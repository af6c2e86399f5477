//! `jumbo thp save` and `restore`: the controls in a file.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::anyhow;
use jumbo_host::kernel::Root;
use jumbo_host::knobs::thp::Table;
use jumbo_host::knobs::{Group, Plan, boot};
use jumbo_host::whole_file::{self, Existing};

use super::{SideArgs, in_command_line, set_values, table};
use crate::knobs::change::{Change, change};
use crate::knobs::{ChangeOptions, Mode};
use crate::trusted;
use crate::view;

/// Save the current controls: to a file, or for the next boot
///
/// The file is JSON: each knob by the name that `jumbo thp set` has for it.
#[derive(Debug, clap::Args)]
#[command(mut_arg("dry_run", |dry_run| dry_run.requires("persist")))]
#[command(mut_arg("json", |json| json.requires("persist")))]
#[command(after_help = "Examples:
  jumbo thp save before.json
  jumbo thp save --shmem                       # on standard output
  jumbo thp save --persist --dry-run           # what tmpfiles.d would get")]
pub(super) struct SaveArgs {
    /// The new file; default: standard output
    file: Option<PathBuf>,

    #[command(flatten)]
    options: TableOptions,
}

/// Restore the controls from a file, all or none
///
/// The change is recorded, read back, and undone by `jumbo thp --undo`, as any other.
#[derive(Debug, clap::Args)]
pub(super) struct RestoreArgs {
    /// A file that `jumbo thp save` wrote
    file: PathBuf,

    #[command(flatten)]
    options: TableOptions,
}

#[derive(Debug, clap::Args)]
#[command(mut_arg("force", |force| force.hide(true)))]
struct TableOptions {
    /// Set it up at the next boot too, in tmpfiles.d
    #[arg(long)]
    persist: bool,

    #[command(flatten)]
    side: SideArgs,

    #[command(flatten)]
    mode: Mode,
}

pub(super) fn save(root: &Root, args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let TableOptions { persist, mode, .. } = &args.options;
    let side = args.options.side.side();
    let now = table(root, side)?;
    match &args.file {
        Some(file) if !mode.dry_run => write(file, &now)?,
        None if !persist => view::json(&now)?,
        _ => {}
    }
    if !persist {
        return Ok(ExitCode::SUCCESS);
    }
    let group = Group::thp();
    change(root, mode, || {
        let table = table(root, side)?;
        let values = table.knobs(side)?.into_iter();
        let values: Vec<_> = values.map(|(knob, value)| (knob.file, value)).collect();
        let boot = boot::persist(root, &group, &values, &[])?;
        let notes = in_command_line(&table, root).into_iter().collect();
        Ok(Change::new(Plan::new(group.clone()), boot, notes))
    })
}

fn write(file: &Path, table: &Table) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(table)? + "\n";
    let name = file.display();
    let written = whole_file::write(file, text.as_bytes(), 0o644, Existing::Keep);
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            anyhow!("{name} is there already\nhint: another name; existing files are not replaced")
        }
        _ => anyhow!("cannot write {name}: {error}"),
    })
}

pub(super) fn restore(root: &Root, args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let name = args.file.display();
    let hint = "hint: `jumbo thp save` writes such a file";
    let text = trusted::read(&args.file)
        .map_err(|error| anyhow!("cannot read {name}: {error}\n{hint}"))?;
    let wrong = |error: String| anyhow!("{name} is no table of THP: {error}\n{hint}");
    let table: Table = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let values = table.knobs(args.options.side.side());
    let values = values.map_err(|error| wrong(error.to_string()))?;
    let options = ChangeOptions {
        persist: args.options.persist,
        forget: false,
        undo: false,
        mode: args.options.mode.clone(),
    };
    set_values(root, &options, &values)
}
