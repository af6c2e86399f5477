//! `jumbo files show`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use jumbo::units::Bytes;
use jumbo_host::kernel::{Root, task};
use jumbo_host::segments::data::{DataReport, look};
use jumbo_host::segments::inspect::{Inspection, SegmentReport, inspect};
use jumbo_host::segments::mapped::{MappedFile, mapped};
use jumbo_host::segments::prime::{CachedPages, Content};
use jumbo_host::segments::running::Running;
use jumbo_host::segments::{Error, Sizes};
use serde::Serialize;

use super::{Failed, bar, begin, expanded};
use crate::view::{self, NONE, View, percent};

/// Show what keeps a file, or the files of a process, off huge pages
///
/// For an executable or a library: its segments, the available methods, the obstacles to the others,
/// and linker flags with which priming suffices. For another file: its folios in the page cache, who
/// maps it, and what `prime` costs. For a process: the text and the large files that it maps now.
///
/// The methods for text are `file`, the page cache, which all processes share, and `shared`, one copy in
/// shared memory for all processes of the file.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo files show /usr/bin/node
  jumbo files show /var/lib/index    # its files of at least a huge page
  jumbo files show $$ --json
  jumbo files show ./1234            # a file whose name is a number

Exit status: 0 done; 1 something could not be looked at; 2 wrong usage.")]
pub(crate) struct Args {
    /// A file, a folder, or a PID
    #[arg(value_name = "FILE|FOLDER|PID", required = true)]
    targets: Vec<PathBuf>,
}

/// Files and processes, for JSON.
#[derive(Default, Serialize)]
struct ShowPage {
    files: Vec<Inspection>,
    data: Vec<DataReport>,
    processes: Vec<ProcessFiles>,
    /// Files and folders that cannot be looked at.
    failed: Vec<Failed>,
}

#[derive(Serialize)]
struct ProcessFiles {
    pid: u32,
    name: String,
    files: Vec<MappedFile>,
}

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let mut page = ShowPage::default();
    let sizes = Sizes::read(root)?;
    let (bar, mut running) = (bar(), None);
    for target in &args.targets {
        if let Some(Ok(pid)) = target.to_str().map(str::parse) {
            page.processes.push(process(root, pid)?);
            continue;
        }
        let cannot = |path: &Path| format!("cannot look at {}", path.display());
        for file in expanded(target, sizes.pmd, &mut page.failed) {
            let error = match inspect(root, &file) {
                Ok(report) => {
                    page.files.push(report);
                    continue;
                }
                Err(Error::NotElf(_) | Error::Foreign(_) | Error::NotLoaded(_)) => {
                    let running = match &mut running {
                        Some(running) => running,
                        none => none.insert(Running::read(root)?),
                    };
                    match look(root, &file, running, &mut begin(&bar, &file, sizes.pmd)) {
                        Ok(report) => {
                            page.data.push(report);
                            continue;
                        }
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            if args.targets.len() == 1 && file == *target {
                return Err(error).with_context(|| cannot(&file));
            }
            let why = error.to_string();
            page.failed.push(Failed { path: file, why });
        }
    }
    bar.finish_and_clear();
    view::page(json, &page, |view, page| show(view, page, sizes))?;
    Ok(match page.failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn process(root: &Root, pid: u32) -> anyhow::Result<ProcessFiles> {
    let name = task::name(root, pid);
    if name.as_ref().is_err_and(|error| error.is_missing()) {
        bail!("no process has the number {pid}\nhint: `./{pid}` is the file of that name");
    }
    Ok(ProcessFiles {
        pid,
        name: name?,
        files: mapped(root, pid)?,
    })
}

fn show(view: &mut View, page: &ShowPage, sizes: Sizes) {
    let is_empty = page.files.is_empty() && page.data.is_empty() && page.failed.is_empty();
    if is_empty && page.processes.is_empty() {
        return view.line("no file there has a huge page or more");
    }
    for file in &page.files {
        show_file(view, file);
    }
    show_data(view, &page.data, sizes);
    for Failed { path, why } in &page.failed {
        view.line(format!("{}: {why}", path.display()));
    }
    for process in &page.processes {
        show_process(view, process);
    }
}

fn show_file(view: &mut View, file: &Inspection) {
    view.heading(&file.path.display().to_string());
    let kind = format!("{:?}, linked by {:?}", file.kind, file.linker);
    view.fact("Kind", kind.to_lowercase());
    view.fact("Build-id", file.build_id.as_deref().unwrap_or(NONE));
    view.fact("Huge page", file.huge_page.to_string());
    let columns = ">OFFSET|>ADDRESS|>SIZE|<FLAGS|>ALIGN|>HUGE PAGES|<CONGRUENT|<PAGE CACHE";
    view.table(columns, file.segments.iter().map(row));
    for method in &file.methods {
        match method.why_not.split_first() {
            None => view.fact(method.name, "to be had"),
            Some((first, more)) => {
                view.fact(method.name, format!("not to be had: {first}"));
                for why in more {
                    view.fact("", format!("and: {why}"));
                }
            }
        }
    }
    if let Some(flags) = &file.flags {
        view.fact("Linked with", flags);
    }
}

fn show_data(view: &mut View, files: &[DataReport], sizes: Sizes) {
    if files.is_empty() {
        return;
    }
    view.heading("Data files in the page cache");
    view.table(
        "<FILE|>SIZE|>HUGE|>SMALL|>NOT CACHED",
        files.iter().map(|file| {
            let whole = file.whole.bytes(sizes.pmd).0;
            let parts = file.cached.map(|cached| {
                let huge = cached.huge.bytes(sizes.pmd);
                [
                    huge,
                    file.small,
                    Bytes(whole.saturating_sub(huge.0 + file.small.0)),
                ]
            });
            let parts = parts.map(|parts| parts.map(view::nonzero_bytes));
            let [huge, small, absent] = parts.unwrap_or([NONE; 3].map(str::to_owned));
            [
                file.path.display().to_string(),
                file.size.to_string(),
                huge,
                small,
                absent,
            ]
        }),
    );
    for file in files {
        let path = file.path.display();
        if let Some(folios) = file.folios.as_ref().filter(|folios| !folios.is_empty()) {
            let folios = folios
                .iter()
                .map(|(size, bytes)| format!("{bytes} of {size}"));
            view.line(format!(
                "{path}: in folios: {}",
                folios.collect::<Vec<_>>().join(", ")
            ));
        }
        if !file.mapped_by.is_empty() {
            let by = file
                .mapped_by
                .iter()
                .map(|it| format!("{} ({})", it.name, it.pid));
            view.line(format!(
                "{path}: mapped by {}",
                by.collect::<Vec<_>>().join(", ")
            ));
        }
        for why in &file.why_not {
            view.line(format!("{path}: {why}"));
        }
    }
}

/// Returns the name of a part of a file, for a table.
pub(super) const fn content(content: Content) -> &'static str {
    match content {
        Content::Text => "text",
        Content::Data => "data",
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
        view::or_none(report.cached.map(cached)),
    ]
}

fn cached(text: CachedPages) -> String {
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

fn show_process(view: &mut View, process: &ProcessFiles) {
    view.heading(&format!("{} ({})", process.name, process.pid));
    let columns = "<FILE|<KIND|>SIZE|>RESIDENT|>HUGE|>SHARE|<CONGRUENT";
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
                content(file.content).to_owned(),
                file.size.to_string(),
                file.rss.to_string(),
                view::nonzero_bytes(file.huge),
                percent(file.huge, file.rss),
                congruent.to_owned(),
            ]
        }),
    )
}
