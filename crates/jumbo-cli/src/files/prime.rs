//! `jumbo files prime`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use jumbo::units::{Pages, counted};
use jumbo_host::kernel::Root;
use jumbo_host::segments::Sizes;
use jumbo_host::segments::prime::{Primed, prime};
use jumbo_host::segments::running::Running;
use serde::Serialize;

use super::show::content;
use super::{bar, begin, expanded};
use crate::knobs::all_or_part;
use crate::view::{self, View};

/// Read files into the page cache in huge folios
///
/// Of an executable or a library its text, of another file all of it. What is cached in small folios,
/// and what no process maps, is dropped and read again. Programs started afterwards, by any user, map
/// it by PMD while the page cache keeps it. What running processes map stays unchanged: stop them,
/// prime, and start them again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo files prime model.gguf
  jumbo files prime /usr/bin/node /var/lib/index
  jumbo files prime --dry-run /usr/bin/node   # show the state only
  systemctl enable jumbo-files-prime@usr-bin-node   # at each boot

Exit status: 0 all of it is huge; 3 a part; 1 nothing; 2 wrong usage.")]
pub(crate) struct Args {
    /// Files, and folders with files of at least a huge page
    #[arg(value_name = "FILE|FOLDER", required = true)]
    files: Vec<PathBuf>,

    /// Show the state and change nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Default, Serialize)]
struct PrimePage {
    dry_run: bool,
    files: Vec<Primed>,
    /// Number of processes that this user may not examine.
    hidden_processes: usize,
}

pub(super) fn main(root: &Root, args: &Args, json: bool) -> anyhow::Result<ExitCode> {
    let mut page = PrimePage {
        dry_run: args.dry_run,
        ..PrimePage::default()
    };
    let sizes = Sizes::read(root)?;
    let running = Running::read(root)?;
    let mut files = Vec::new();
    for file in &args.files {
        let file = std::path::absolute(file).context("cannot tell where this is")?;
        let mut failed = Vec::new();
        files.extend(expanded(&file, sizes.pmd, &mut failed));
        let failed = failed.into_iter();
        page.files
            .extend(failed.map(|it| Primed::failed(&it.path, it.why)));
    }
    page.hidden_processes = running.hidden;
    files.sort();
    files.dedup();
    let bar = bar();
    for file in &files {
        let mut progress = begin(&bar, file, sizes.pmd);
        let primed = prime(root, file, &running, args.dry_run, &mut progress);
        page.files
            .push(primed.unwrap_or_else(|error| Primed::failed(file, error.to_string())));
    }
    bar.finish_and_clear();
    view::page(json, &page, |view, page| show(view, page, sizes))?;
    Ok(match page.files.iter().any(|file| file.huge > Pages(0)) {
        _ if args.dry_run => ExitCode::SUCCESS,
        some => match page.files.iter().all(Primed::is_whole) {
            false if !some => ExitCode::FAILURE,
            all => all_or_part(all),
        },
    })
}

fn show(view: &mut View, page: &PrimePage, sizes: Sizes) {
    if page.files.is_empty() {
        return view.line("no file there has a huge page or more");
    }
    let now = if page.dry_run {
        ">HUGE"
    } else {
        ">WAS HUGE|>HUGE"
    };
    let rows = page.files.iter().map(|file| {
        let bytes = |pages: Pages| view::nonzero_bytes(pages.bytes(sizes.pmd));
        let mut row = vec![
            file.path.display().to_string(),
            content(file.content).to_owned(),
            bytes(file.whole),
            bytes(file.before),
        ];
        if !page.dry_run {
            row.push(bytes(file.huge));
        }
        row
    });
    view.table(&format!("<FILE|<KIND|>SIZE|{now}"), rows);
    for file in &page.files {
        if let Some(why_not) = &file.why_not {
            view.line(format!("{}: {why_not}", file.path.display()));
        }
    }
    let short = page.files.iter().any(|file| !file.is_whole());
    if page.hidden_processes > 0 && short {
        let processes = counted(page.hidden_processes as u64, "process");
        view.line(format!(
            "{processes} of other users not examined: it takes CAP_SYS_PTRACE"
        ));
    }
}
