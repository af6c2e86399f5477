//! `jumbo thp`: the tables of transparent huge pages.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo::kernel::{Root, thp};
use jumbo::knobs::{Form, Group, Knob, Value};
use jumbo::status::Missing;
use jumbo::units::PageSize;
use serde::Serialize;

use crate::knobs::{How, Kept, Manner, change, undo, usage};
use crate::status::host::show_thp;
use crate::view;

/// Show and set which folio sizes the kernel uses for anonymous and shared memory
///
/// A change is a plan: --dry-run prints it and writes nothing. What was before is recorded first, each
/// write is read back, and --undo puts back the last change, however it ended; once more, all changes
/// before it. Ctrl-C puts back at once.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(mut_arg("dry_run", |dry_run| dry_run.requires("undo")))]
#[command(mut_arg("force", |force| force.requires("undo")))]
#[command(after_help = "Examples:
  jumbo thp                                    # the tables, and what came of them
  jumbo thp set enabled=madvise defrag=defer+madvise --dry-run
  jumbo thp set 64K=madvise 64K.shmem=advise --persist
  jumbo thp --undo

Exit status: 0 done; 3 a part of it; 1 failed, nothing changed; 2 wrong usage; 128+N signal N
ended it, and what was changed was put back.")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Put back what the last change of these tables recorded
    #[arg(long)]
    undo: bool,

    #[command(flatten)]
    manner: Manner,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(ShowArgs),
    Set(SetArgs),
}

/// Show the tables, and what came of them
#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Set any number of knobs, all or none
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("wish").required(true).multiple(true).args(["values", "forget", "undo"]))]
#[command(mut_arg("persist", |persist| persist.requires("values")))]
#[command(mut_arg("force", |force| force.requires("undo")))]
#[command(
    after_help = "Knobs, with the words that they take (those of this kernel: jumbo thp show --json):
  enabled=      anonymous memory: always, madvise (where a program asks), never
  shmem=        shared memory: always, within_size (of the file), advise, never
  SIZE=         anonymous memory in folios of SIZE; inherit: as `enabled` says
  SIZE.shmem=   shared memory in folios of SIZE; inherit: as `shmem` says
  defrag=       what a fault does when no huge page is free:
                always, defer, defer+madvise, madvise, never
  max_ptes_none=     untouched base pages that khugepaged fills for one huge page
  use_zero_page=     1: a read of untouched memory maps the huge page of zeroes
  shrink_underused=  1: huge pages of mostly zeroes are split when memory is short

Examples:
  jumbo thp set enabled=madvise
  jumbo thp set 64K=always 64K.shmem=within_size --dry-run
  jumbo thp set --undo"
)]
struct SetArgs {
    /// Which knob gets which value; any number of them
    #[arg(value_name = "KNOB=VALUE", value_parser = assignment, conflicts_with = "undo")]
    values: Vec<(Knob, Value)>,

    #[command(flatten)]
    how: How,
}

/// The JSON.
#[derive(Serialize)]
struct Page {
    thp: thp::Thp,
    #[serde(flatten)]
    kept: Kept,
    missing: Vec<Missing>,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let root = Root::at(&args.root);
    match &args.command {
        None if args.undo => undo::main(&root, &[Group::thp()], &args.manner, false),
        None => show(&root, args.manner.json),
        Some(Command::Show(args)) => show(&root, args.json),
        Some(Command::Set(args)) => set(&root, args),
    }
}

fn set(root: &Root, args: &SetArgs) -> anyhow::Result<ExitCode> {
    for (index, (knob, _)) in args.values.iter().enumerate() {
        if args.values[..index].iter().any(|(other, _)| other == knob) {
            usage(&format!("{knob} is given twice"));
        }
    }
    change::set(root, &Group::thp(), &args.how, &args.values, |_, _| None)
}

fn show(root: &Root, json: bool) -> anyhow::Result<ExitCode> {
    let mut missing = Vec::new();
    let page = Page {
        thp: thp::Thp::read(root)?
            .context("this kernel has no THP (CONFIG_TRANSPARENT_HUGEPAGE)")?,
        kept: Kept::read(root, &[Group::thp()], &mut missing),
        missing,
    };
    view::page(json, &page, |view, page| {
        show_thp(view, &page.thp)?;
        page.kept.show(view, root)?;
        view::missing(view, "Not shown", &page.missing)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// `enabled=madvise`, `64K.shmem=advise`.
fn assignment(text: &str) -> Result<(Knob, Value), String> {
    let wrong =
        || format!("`{text}` is not KNOB=VALUE, such as enabled=madvise or 64K.shmem=advise");
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let (size, file) = match name {
        "enabled" | "defrag" | "use_zero_page" | "shrink_underused" => (None, name),
        "shmem" => (None, "shmem_enabled"),
        "max_ptes_none" => (None, "khugepaged/max_ptes_none"),
        _ => match name.strip_suffix(".shmem") {
            Some(size) => (Some(size), "shmem_enabled"),
            None => (Some(name), "enabled"),
        },
    };
    let size = size.map(str::parse::<PageSize>).transpose();
    let knob = Knob::thp(size.map_err(|_| wrong())?, file);
    let value = match knob.form {
        Form::Word => value.into(),
        Form::Number | Form::Pages => {
            let number: Result<u64, _> = value.parse();
            number
                .map_err(|_| format!("{name} takes a whole number"))?
                .into()
        }
    };
    Ok((knob, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_are_named_shortly() {
        let file = |text| assignment(text).unwrap().0.file;
        let folder = thp::FOLDER;
        assert_eq!(file("enabled=always"), format!("{folder}/enabled"));
        assert_eq!(file("shmem=never"), format!("{folder}/shmem_enabled"));
        let size = format!("{folder}/hugepages-64kB");
        assert_eq!(file("64K=never"), format!("{size}/enabled"));
        assert_eq!(file("64K.shmem=never"), format!("{size}/shmem_enabled"));
        for bad in [
            "",
            "64K",
            "63K=never",
            "64K.shm=never",
            "use_zero_page=yes",
            "=1",
        ] {
            assert!(assignment(bad).is_err(), "{bad}");
        }
    }
}
