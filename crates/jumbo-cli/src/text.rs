//! `jumbo text`: program text on huge pages, without the library.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::anyhow;
use jumbo::units::Bytes;
use jumbo_host::kernel::{FileError, Root};
use jumbo_host::segments::align::{Aligned, Options, align};
use jumbo_host::segments::{Error, Sizes};

use crate::view::{self, View};

/// Prepare the text of programs for huge pages
///
/// Two conditions let all processes map a program's text by PMD. Its file offset equals its address
/// modulo the huge page size (`align` makes such a copy), and the page cache has it in huge folios
/// (`jumbo files prime` reads it so). The program itself then runs without jumbo. `jumbo files show`
/// tells what a file lacks.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo text align /usr/bin/python3 -o /opt/python3
  jumbo files prime /opt/python3")]
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
    Align(AlignArgs),
}

/// Write a copy of an executable or library whose text can be huge
///
/// Each text segment of at least a huge page gets an offset in the file that is its address modulo
/// the huge page size, and the alignment of a huge page. Addresses, symbols, build-id, notes and
/// debug links stay. If the text contains no whole huge page at its addresses, the adjacent
/// read-only segment joins it and becomes executable, as linkers did before `-z separate-code`.
///
/// The copy is read back and compared with the original before it has its name. It is not
/// set-user-ID.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo text align /usr/bin/python3 -o /opt/python3
  jumbo text align libbig.so -o aligned/libbig.so --force

Priming the copy (`jumbo files prime`) then brings it in huge folios. A position-independent program is loaded at \
multiples of the huge page size: its addresses are less random, by 9 bits where that is 2 MiB.")]
struct AlignArgs {
    /// The executable or shared library
    file: PathBuf,

    /// The copy
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Make read-only segments executable wherever the text gains huge pages by it
    #[arg(long)]
    join: bool,

    /// Replace an existing OUT
    #[arg(long)]
    force: bool,
}

pub(crate) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let (sizes, json) = (Sizes::read(&Root::at(&args.root))?, args.json);
    let Command::Align(args) = &args.command;
    let options = Options {
        join: args.join,
        replace: args.force,
    };
    let aligned =
        align(&args.file, &args.output, sizes, options).map_err(|error| refused(args, error))?;
    view::page(json, &aligned, |view, aligned| {
        show(view, args, sizes, aligned)
    })
}

fn refused(args: &AlignArgs, error: Error) -> anyhow::Error {
    let hint = match &error {
        Error::Itself => {
            "write it beside the original, try it, and move it over the original with mv(1)"
        }
        Error::File(FileError::Io { source, .. })
            if source.kind() == io::ErrorKind::AlreadyExists =>
        {
            "`--force` replaces it"
        }
        Error::Layout(_) => "link it anew: `jumbo files show` has the flags",
        _ => return anyhow!(error).context(format!("cannot align {}", args.file.display())),
    };
    anyhow!(
        "cannot align {}: {error}\nhint: {hint}",
        args.file.display()
    )
}

fn show(view: &mut View, args: &AlignArgs, sizes: Sizes, aligned: &Aligned) {
    let bytes = |pages: jumbo::units::Pages| pages.bytes(sizes.pmd);
    let note = match aligned.was_aligned {
        true => " is as the original, which is aligned already",
        false => "",
    };
    view.line(format!("{}{note}", args.output.display()));
    view.line(format!(
        "  {} of its text can be huge; {} of the original's",
        bytes(aligned.after),
        bytes(aligned.before)
    ));
    if aligned.padding > Bytes(0) {
        view.line(format!("  {} of holes in the file", aligned.padding));
    }
    let joined = aligned.joined.iter().map(|segment| {
        let (size, address) = (segment.memory_size, segment.address);
        format!("  {size} of read-only data at {address:#x} are executable in it")
    });
    view.lines(joined);
    view.lines(aligned.notes.iter().map(|note| format!("  {note}")))
}
