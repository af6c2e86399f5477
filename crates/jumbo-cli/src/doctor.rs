//! `jumbo doctor`.

use std::process::ExitCode;

use jumbo::kernel::Root;
use jumbo::status::Missing;
use jumbo::status::doctor::{Cost, Finding, Snapshot, examine};
use serde::Serialize;

use crate::value::whole;
use crate::view::{self, View, wrapped};

/// Find what keeps memory off huge pages on this host, and say how to mend it
///
/// Findings come in the order of what they cost: programs that fail, then the bytes concerned, then
/// what has no figure. Commands that change settings are to be run as root.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// End with 1 when there are findings; else findings are no failure
    #[arg(long)]
    exit_code: bool,

    /// How many of the largest processes to look into
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    top: usize,
}

#[derive(Serialize)]
struct Page<'a> {
    findings: &'a [Finding],
    missing: Vec<&'a Missing>,
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let snapshot = Snapshot::read(&Root::host(), args.top);
    let findings = examine(&snapshot);
    let page = Page {
        findings: &findings,
        missing: snapshot.missing().collect(),
    };
    view::page(args.json, &page, |view, page| {
        show(view, page, snapshot.host.sys_read_only)
    })?;
    Ok(ExitCode::from(u8::from(
        args.exit_code && !findings.is_empty(),
    )))
}

fn show(view: &mut View, page: &Page<'_>, sys_read_only: bool) -> std::io::Result<()> {
    let Page { findings, missing } = page;
    if findings.is_empty() {
        view.line(if missing.is_empty() {
            "nothing to mend"
        } else {
            "nothing to mend in what could be examined"
        })?;
    }
    for (index, finding) in findings.iter().enumerate() {
        let mut title = wrapped(&format!("{}. ", index + 1), &finding.title);
        let rest = title.find('\n').map(|at| title.split_off(at));
        view.heading(&title)?;
        let mut text = |first: &str, text: &str| -> std::io::Result<()> {
            let text = wrapped(first, text);
            text.lines().try_for_each(|line| view.line(line))
        };
        if let Some(rest) = rest {
            text("", rest.trim_start_matches('\n'))?;
        }
        text("   cost: ", &cost(finding.cost))?;
        for evidence in &finding.evidence {
            let value = evidence.value.to_string();
            text(&format!("   {}: ", evidence.source), &value)?;
        }
        text("   hint: ", &finding.hint)?;
    }
    if !findings.is_empty() && sys_read_only {
        view.line("")?;
        view.line("/sys is read-only here, as in a container: run the commands on the host")?;
    }
    view::missing(view, "Not examined", missing.iter().copied())
}

fn cost(cost: Cost) -> String {
    match cost {
        Cost::Fails => "programs fail or are killed".to_owned(),
        Cost::Wasted(bytes) => format!("{bytes} that no program can use"),
        Cost::Slow(bytes) => format!(
            "{bytes} are slower to use than they need be: {} base pages, each with a fault and a TLB entry of its own, \
             where {} huge pages would do",
            bytes.0 >> 12,
            (bytes.0 >> 21).max(1)
        ),
        Cost::Unknown => "no figure can be given".to_owned(),
    }
}
