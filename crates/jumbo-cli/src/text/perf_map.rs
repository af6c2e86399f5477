//! `jumbo text perf-map`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::kernel::Root;
use jumbo::segments::symbols::{self, Moved};

/// Tell perf the functions of text that is on a copy of a process's own
///
/// Such text (`jumbo run --text=private`) has no file that perf could look into. perf looks for /tmp/perf-PID.map then, where
/// this command writes the functions of the file that was copied. A map that is there already, as of a just-in-time
/// compiler, is added to. Text on a shared image needs none: see the manual of segments.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  perf record -p $(pidof server) -- sleep 10
  jumbo text perf-map $(pidof server)          # while it still runs
  perf report

Exit status: 0 written, 1 not, or no text of the process was moved so.")]
pub(crate) struct Args {
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,

    /// Write to FILE instead; -: to stdout
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn main(root: &Root, args: &Args) -> anyhow::Result<ExitCode> {
    let pid = args.pid;
    let moved = symbols::moved(root, pid)?;
    if moved.is_empty() {
        bail!("no text of process {pid} is on a copy of its own\nhint: jumbo text inspect {pid}");
    }
    for file in moved.iter().filter(|file| file.symbols.is_empty()) {
        let path = file.path.display();
        crate::view::tell(&format!(
            "{path} is stripped: it names no function in its text"
        ));
    }
    let text = lines(&moved);
    let place = args.output.clone();
    let place = place.unwrap_or_else(|| PathBuf::from(format!("/tmp/perf-{pid}.map")));
    if place.as_os_str() == "-" {
        std::io::stdout().write_all(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    // Others may write to /tmp: no link is followed.
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let file = std::os::unix::fs::OpenOptionsExt::custom_flags(
        std::fs::OpenOptions::new().append(true).create(true),
        flags,
    )
    .open(&place);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", place.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// As perf reads it: start and size in hexadecimal, and a name.
fn lines(moved: &[Moved]) -> String {
    let mut text = String::new();
    for symbol in moved.iter().flat_map(|file| &file.symbols) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:x} {:x} {}", symbol.start, symbol.size, symbol.name);
    }
    text
}
