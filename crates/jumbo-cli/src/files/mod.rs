//! `jumbo files`: program text and data files in huge folios of the page cache, without the library;
//! one file a subcommand.

mod prime;
mod show;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use jumbo::units::{Bytes, PageSize, Pages};
use jumbo_host::kernel::Root;
use serde::Serialize;

use crate::view;

/// Show and prepare files that programs map, for huge pages
///
/// A program that maps a file has it on huge pages if the page cache has it in huge folios: text of
/// executables and libraries, and data files such as model weights, search indexes and arrays. The
/// kernel reads some files so, and others in small folios. `show` tells which, and why; `prime`
/// reads a file anew. The program itself runs without jumbo.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo files show model.gguf
  jumbo files prime model.gguf         # before the program maps it
  jumbo files prime /var/lib/index     # all large files below a folder
  jumbo files show $(pidof postgres)   # what its processes have now")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    /// A folder that stands in for /
    #[arg(long, global = true, hide = true, default_value = "/")]
    root: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Show(show::Args),
    Prime(prime::Args),
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let (root, json) = (Root::at(&args.root), args.json);
    match &args.command {
        Command::Show(args) => show::main(&root, args, json),
        Command::Prime(args) => prime::main(&root, args, json),
    }
}

/// A path that cannot be looked at, with the reason.
#[derive(Serialize)]
struct Failed {
    #[serde(serialize_with = "jumbo_host::segments::in_text")]
    path: PathBuf,
    why: String,
}

/// Replaces a folder by the regular files of at least a huge page below it, on its file system. Other
/// paths stay. Symbolic links below it are not followed; folders that cannot be listed go to `failed`.
fn expanded(path: &Path, pmd: PageSize, failed: &mut Vec<Failed>) -> Vec<PathBuf> {
    let top = fs::metadata(path);
    let Some(top) = top.ok().filter(fs::Metadata::is_dir) else {
        return vec![path.to_owned()];
    };
    let (mut found, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) => {
                let why = format!("cannot list it: {error}");
                failed.push(Failed { path: folder, why });
                continue;
            }
        };
        for entry in entries.flatten() {
            // It may be gone by now.
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.dev() != top.dev() {
                continue;
            }
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.is_file() && Bytes(metadata.len()) >= Pages(1).bytes(pmd) {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

/// Makes a progress bar on stderr for bytes of a file, with their rate; hidden in a pipe.
fn bar() -> ProgressBar {
    let template = "{bar:30} {bytes} of {total_bytes} {wide_msg} {bytes_per_sec}, {eta} left";
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Begins a file on a bar; returns the function that moves it on.
fn begin<'a>(
    bar: &'a ProgressBar,
    file: &Path,
    pmd: PageSize,
) -> impl FnMut(Pages, Pages) + use<'a> {
    bar.set_message(view::clean(&file.display().to_string()).into_owned());
    bar.reset();
    move |done, all| {
        bar.set_length(all.bytes(pmd).0);
        bar.set_position(done.bytes(pmd).0);
    }
}
