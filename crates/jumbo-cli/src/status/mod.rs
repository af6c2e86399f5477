//! `jumbo status`.

pub(crate) mod host;
pub(crate) mod process;

use std::process::ExitCode;

use jumbo_host::kernel::{self, Probe, Root};
use jumbo_host::status::{self, Detail, Host, Inspector, Missing, Tasks, Usage};
use serde::Serialize;

use crate::value::{no_process, whole};
use crate::view::{self, View};

/// Show what is huge on this host or in a process, what is not, and why
///
/// As a normal user it shows what it may, and says what it may not.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo status
  jumbo status -p postgres
  jumbo status -p 4711 --mappings

Exit status: 0 done; 1 failed, or there is no such process; 2 wrong usage.")]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Show this process instead of the host; a name can match several. May be repeated
    ///
    /// More than three processes have a line each, and the total below.
    #[arg(short, long = "process", value_name = "PID|NAME")]
    process: Vec<String>,

    /// Show every mapping of the process
    #[arg(long, requires = "process")]
    mappings: bool,

    /// Number of processes to list on the host's page
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    top: usize,
}

/// Page of the host.
#[derive(Serialize)]
pub(crate) struct HostPage {
    host: Host,
    probe: Probe,
    tasks: Tasks,
}

impl HostPage {
    /// Reads the host; lists the largest `top` processes.
    pub(crate) fn read(root: &Root, top: usize) -> Self {
        Self {
            host: Host::read(root),
            probe: kernel::probe(root),
            tasks: Tasks::read(root, top),
        }
    }

    pub(crate) fn show(&self, view: &mut View) {
        host::show(view, self);
    }
}

/// Page of processes, for JSON.
#[derive(Serialize)]
struct ProcessPage {
    processes: Vec<Detail>,
    /// Sum of all processes. Shared memory counts for each; the memory of a reaper does not count
    /// beside its program.
    total: Usage,
    missing: Vec<Missing>,
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    if args.process.is_empty() {
        let page = HostPage::read(&root, args.top);
        return view::page(args.json, &page, host::show);
    }
    let page = read_processes(&root, &args)?;
    view::page(args.json, &page, process::show)
}

fn read_processes(root: &Root, args: &Args) -> anyhow::Result<ProcessPage> {
    let mut pids = Vec::new();
    for text in &args.process {
        let found = status::find(root, text)?;
        if found.is_empty() {
            return Err(no_process(text));
        }
        pids.extend(found);
    }
    pids.sort_unstable();
    pids.dedup();
    let mut inspector = Inspector::new(root)?;
    inspector.mappings = args.mappings;
    let alone = pids.len() == 1;
    let mut processes = Vec::new();
    for pid in pids {
        match inspector.inspect(pid) {
            Ok(detail) => processes.push(detail),
            // One of several processes may end meanwhile.
            Err(error) if error.is_missing() && !alone => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut total = Usage::default();
    for usage in processes
        .iter()
        .filter(|process| !is_counted_twice(process, &processes))
        .filter_map(|process| process.usage.as_ref())
    {
        total.add(usage);
    }
    Ok(ProcessPage {
        processes,
        total,
        missing: inspector.missing,
    })
}

/// Reports whether `process` is the reaper of another shown process.
fn is_counted_twice(process: &Detail, shown: &[Detail]) -> bool {
    let program = process.reaper_of;
    program.is_some_and(|program| shown.iter().any(|other| other.pid == program))
}
