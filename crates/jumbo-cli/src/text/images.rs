//! `jumbo text images`.

use std::io;
use std::process::ExitCode;

use jumbo_host::kernel::Root;
use jumbo_host::segments::images::{self, Check, TextImage};
use serde::Serialize;

use crate::knobs::EXIT_PARTIAL;
use crate::view::{self, NONE, View};

/// List the copies of text that processes share, check and withdraw them
///
/// `jumbo run` makes them (--text=shared, and --text=auto for long-running programs). The kernel
/// frees an image after its last process. The list has images of processes that you may examine:
/// your own, or all as root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo text images
  jumbo text images --check          # compare each with its file
  jumbo text images --remove         # the next programs make new ones

Exit status: 0 done; 1 none could be removed, or is as its file; 3 some could not, or are not.")]
pub(crate) struct Args {
    /// Compare each image with its file
    #[arg(long)]
    check: bool,

    /// Let no new process use them; running processes keep theirs
    #[arg(long)]
    remove: bool,
}

/// An image, and the result of its check or removal.
#[derive(Serialize)]
struct ImageRow {
    #[serde(flatten)]
    image: TextImage,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<Check>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let mut rows = Vec::new();
    for mut image in images::list(root)? {
        let check = args.check.then(|| image.check(root));
        let removed = (args.remove && !image.withdrawn).then(|| image.withdraw(root));
        image.withdrawn |= matches!(removed, Some(Ok(())));
        let failed = removed.and_then(Result::err).map(|error| error.to_string());
        rows.push(ImageRow {
            image,
            check,
            failed,
        });
    }
    view::page(json, &rows, |view, rows| show(view, rows))?;
    let same = |row: &ImageRow| row.check.as_ref().is_none_or(|check| *check == Check::Same);
    let failed = rows.iter().filter(|row| row.failed.is_some() || !same(row));
    Ok(match failed.count() {
        0 => ExitCode::SUCCESS,
        all if all == rows.len() => ExitCode::FAILURE,
        _ => ExitCode::from(EXIT_PARTIAL),
    })
}

fn show(view: &mut View, rows: &[ImageRow]) -> io::Result<()> {
    if rows.is_empty() {
        return view.line("No process that you may examine shares an image of text.");
    }
    let columns = "<FILE|>OFFSET|>SIZE|>USERS|>OWNER|<STATE";
    view.table(columns, rows.iter().map(row))
}

fn row(row: &ImageRow) -> [String; 6] {
    let image = &row.image;
    let path = image.path.as_ref().map(|path| path.display().to_string());
    let found = match (&row.failed, &row.check) {
        (Some(error), _) => Some(format!("not removed: {error}")),
        (None, Some(Check::Same)) => Some(String::from("as its file")),
        (None, Some(Check::Differs)) => Some(String::from("its file was changed")),
        (None, Some(Check::Unknown(why))) => Some(format!("not compared: {why}")),
        (None, _) => None,
    };
    let withdrawn = image.withdrawn.then(|| String::from("removed"));
    let state: Vec<_> = withdrawn.into_iter().chain(found).collect();
    let state = match state.is_empty() {
        true => NONE.to_owned(),
        false => state.join(", "),
    };
    [
        path.unwrap_or_else(|| image.name.clone()),
        format!("{:#x}", image.offset),
        image.length.to_string(),
        image.users.len().to_string(),
        image.owner.to_string(),
        state,
    ]
}
