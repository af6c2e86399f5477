//! `jumbo text inspect`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::units::Bytes;
use jumbo_host::kernel::{Root, task};
use jumbo_host::segments::inspect::{Inspection, SegmentReport, inspect};
use jumbo_host::segments::mapped::{MappedFile, mapped};
use jumbo_host::segments::prime::CachedText;
use serde::Serialize;

use crate::view::{self, NONE, View, percent};

/// Show what keeps the text of a file or process off huge pages
///
/// For a file: its segments, the available methods, the obstacles to the others, and linker flags
/// with which priming suffices. For a process: the text that it maps now, file by file.
///
/// The methods are `file`, the page cache, which all processes share, and `shared`, one copy in
/// shared memory for all processes of the file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo text inspect /usr/bin/node
  jumbo text inspect $$ --json
  jumbo text inspect ./1234          # a file whose name is a number")]
pub(crate) struct Args {
    /// An executable or shared library, or a PID
    #[arg(value_name = "FILE|PID", required = true)]
    targets: Vec<PathBuf>,
}

/// Files and processes, for JSON.
#[derive(Default, Serialize)]
struct InspectPage {
    files: Vec<Inspection>,
    processes: Vec<ProcessText>,
}

#[derive(Serialize)]
struct ProcessText {
    pid: u32,
    name: String,
    files: Vec<MappedFile>,
}

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let mut page = InspectPage::default();
    for target in &args.targets {
        match target.to_str().map(str::parse) {
            Some(Ok(pid)) => page.processes.push(process(root, pid)?),
            _ => page.files.push(file(root, target)?),
        }
    }
    view::page(json, &page, show)
}

fn file(root: &Root, path: &Path) -> anyhow::Result<Inspection> {
    inspect(root, path).with_context(|| format!("cannot inspect {}", path.display()))
}

fn process(root: &Root, pid: u32) -> anyhow::Result<ProcessText> {
    let name = task::name(root, pid);
    if name.as_ref().is_err_and(|error| error.is_missing()) {
        bail!("no process has the number {pid}\nhint: `./{pid}` is the file of that name");
    }
    Ok(ProcessText {
        pid,
        name: name?,
        files: mapped(root, pid)?,
    })
}

fn show(view: &mut View, page: &InspectPage) -> io::Result<()> {
    for file in &page.files {
        show_file(view, file)?;
    }
    for process in &page.processes {
        show_process(view, process)?;
    }
    Ok(())
}

fn show_file(view: &mut View, file: &Inspection) -> io::Result<()> {
    view.heading(&file.path.display().to_string())?;
    let kind = format!("{:?}, linked by {:?}", file.kind, file.linker);
    view.fact("Kind", kind.to_lowercase())?;
    view.fact("Build-id", file.build_id.as_deref().unwrap_or(NONE))?;
    view.fact("Huge page", file.huge_page.to_string())?;
    let columns = ">OFFSET|>ADDRESS|>SIZE|<FLAGS|>ALIGN|>HUGE PAGES|<CONGRUENT|<PAGE CACHE";
    view.table(columns, file.segments.iter().map(row))?;
    for method in &file.methods {
        match method.why_not.split_first() {
            None => view.fact(method.name, "to be had")?,
            Some((first, more)) => {
                view.fact(method.name, format!("not to be had: {first}"))?;
                for why in more {
                    view.fact("", format!("and: {why}"))?;
                }
            }
        }
    }
    match &file.flags {
        Some(flags) => view.fact("Linked with", flags),
        None => Ok(()),
    }
}

fn row(report: &SegmentReport) -> [String; 8] {
    let segment = &report.segment;
    let flags = [
        (segment.read, 'r'),
        (segment.write, 'w'),
        (segment.execute, 'x'),
    ];
    [
        format!("{:#x}", segment.offset),
        format!("{:#x}", segment.address),
        segment.memory_size.to_string(),
        flags
            .map(|(set, letter)| if set { letter } else { '-' })
            .iter()
            .collect(),
        Bytes(segment.align).to_string(),
        report.whole.0.to_string(),
        if report.congruent { "yes" } else { "no" }.to_owned(),
        report.cached.map_or_else(|| NONE.to_owned(), cached),
    ]
}

fn cached(text: CachedText) -> String {
    let parts = [
        (text.huge, "huge"),
        (text.small, "small"),
        (text.absent, "absent"),
    ];
    let parts = parts.iter().filter(|(pages, _)| pages.0 > 0);
    let parts: Vec<_> = parts
        .map(|(pages, what)| format!("{} {what}", pages.0))
        .collect();
    if parts.is_empty() {
        NONE.to_owned()
    } else {
        parts.join(", ")
    }
}

fn show_process(view: &mut View, process: &ProcessText) -> io::Result<()> {
    view.heading(&format!("{} ({})", process.name, process.pid))?;
    let columns = "<FILE|>TEXT|>RESIDENT|>HUGE|>SHARE|<CONGRUENT";
    view.table(
        columns,
        process.files.iter().map(|file| {
            let mut congruent = file.mappings.iter().map(|mapping| mapping.congruent);
            let congruent = match (congruent.clone().all(|is| is), congruent.any(|is| is)) {
                (true, _) => "yes",
                (_, true) => "in part",
                _ => "no",
            };
            let path = if file.path.is_empty() {
                "(anonymous memory)"
            } else {
                &file.path
            };
            [
                path.to_owned(),
                file.size.to_string(),
                file.rss.to_string(),
                view::nonzero_bytes(file.huge),
                percent(file.huge, file.rss),
                congruent.to_owned(),
            ]
        }),
    )
}
