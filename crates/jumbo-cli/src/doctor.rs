//! `jumbo doctor`.

use std::process::ExitCode;
use std::time::Duration;

use jumbo::units::{PageSize, counted};
use jumbo_bench::memory::touch_after_a_while;
use jumbo_host::kernel::Root;
use jumbo_host::status::Missing;
use jumbo_host::status::doctor::{Cost, Evidence, Finding, Snapshot, Touch, examine};
use serde::Serialize;

use crate::bench::bar;
use crate::status::host::summary;
use crate::value::whole;
use crate::view::{self, View, duration};

/// Find what keeps memory off huge pages on this host, and how to fix it
///
/// Findings are in the order of their cost: programs that fail, then the bytes concerned, then
/// waits for the host of a virtual machine, then unknown costs. Run commands that change settings
/// as root.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  jumbo doctor
  jumbo doctor --measure             # and the time of a first touch
  jumbo doctor --exit-code --json

Exit status: 0 done; 1 failed, nothing could be examined, or there are findings and --exit-code was given; 2 wrong usage.")]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// End with 1 when there are findings; else findings are no failure
    #[arg(long)]
    exit_code: bool,

    /// Measure the first touch of memory: 256 MiB in huge pages, in some ten seconds
    ///
    /// The host of a virtual machine may reclaim memory that has been free for two seconds; the
    /// next touch then waits for the host. The measurement compares memory that was free for three
    /// seconds with memory freed just before.
    #[arg(long)]
    measure: bool,

    /// Number of processes to examine, the largest first
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    top: usize,
}

#[derive(Serialize)]
struct DoctorPage<'a> {
    findings: &'a [Finding],
    /// Time of a first touch, with --measure.
    touch: Option<Touch>,
    missing: Vec<&'a Missing>,
}

pub(crate) fn main(args: Args) -> anyhow::Result<ExitCode> {
    let root = Root::host();
    let mut snapshot = Snapshot::read(&root, args.top);
    if args.measure {
        let what = "what the first touch of memory takes";
        snapshot.touch = Missing::or_default(measure(), what, &mut snapshot.host.missing);
    }
    let findings = examine(&snapshot);
    let page = DoctorPage {
        findings: &findings,
        touch: snapshot.touch,
        missing: snapshot.missing().collect(),
    };
    view::page(args.json, &page, |view, page| show(view, page, &snapshot))?;
    // No finding because nothing was examined is a failure, not a healthy host.
    let is_blind = findings.is_empty() && snapshot.is_blind();
    let is_failure = args.exit_code && !findings.is_empty();
    Ok(ExitCode::from(u8::from(is_blind || is_failure)))
}

fn measure() -> Result<Option<Touch>, jumbo_bench::Error> {
    let bar = bar();
    let progress = |round, rounds| {
        bar.set_length(rounds as u64);
        bar.set_position(round as u64);
        bar.set_message("touching memory");
    };
    let touch = touch_after_a_while(progress);
    bar.finish_and_clear();
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    touch.map(|touch| {
        Some(Touch {
            size: touch.size,
            first_us: us(touch.first),
            again_us: us(touch.again),
        })
    })
}

fn show(view: &mut View, page: &DoctorPage<'_>, snapshot: &Snapshot) {
    let host = &snapshot.host;
    let DoctorPage {
        findings,
        touch,
        missing,
    } = page;
    if let Some(first) = findings.first() {
        let count = counted(findings.len() as u64, "finding");
        let title = first.title.split(": ").next().unwrap_or_default();
        view.line(format!("{count}; the first: {title}"));
        if let Some(command) = first.hint.split('`').nth(1) {
            view.line(format!("to mend it: {command}"));
        }
        if !missing.is_empty() {
            let parts = counted(missing.len() as u64, "part");
            view.line(format!("{parts} could not be examined: see the end"));
        }
    } else {
        view.line(match missing.is_empty() {
            _ if snapshot.is_blind() => "nothing could be examined",
            true => "nothing to mend",
            false => "no finding in what could be examined",
        });
        view.lines(summary(host, "").iter().take(2));
    }
    for (index, finding) in findings.iter().enumerate() {
        view.heading(&format!("{}. {}", index + 1, finding.title));
        let cost = cost(finding.id, finding.cost, host.base_page, host.pmd_size);
        view.item("   cost: ", &cost);
        for Evidence { source, value } in &finding.evidence {
            view.item(&format!("   {source}: "), value);
        }
        view.item("   hint: ", &finding.hint);
    }
    let waits = |finding: &&Finding| matches!(finding.cost, Cost::Waits(_));
    if let Some(touch) = touch
        && !findings.iter().any(|finding| waits(&finding))
    {
        view.line("");
        view.item("", &format!("{}: no wait for a host", touched(*touch)));
    }
    if !findings.is_empty() && host.sys_read_only {
        view.line("");
        view.line("/sys is read-only here, as in a container: run the commands on the host");
    }
    view.missing("Not examined", missing.iter().copied())
}

fn touched(touch: Touch) -> String {
    let ms = |us| duration(Duration::from_micros(us));
    format!(
        "the first touch of {} takes {}, and {} right after it was given back",
        touch.size,
        ms(touch.first_us),
        ms(touch.again_us)
    )
}

/// IDs of findings about resident memory, whose pages can be counted.
const RESIDENT_FINDINGS: [&str; 3] = ["small-heap", "small-shared", "thp-disabled"];

fn cost(id: &str, cost: Cost, base: PageSize, pmd: PageSize) -> String {
    match cost {
        Cost::Fails => "programs fail or are killed".to_owned(),
        Cost::Wasted(bytes) => format!("{bytes} that no program can use"),
        Cost::Slow(bytes) if RESIDENT_FINDINGS.contains(&id) => format!(
            "{bytes} are slower than necessary: as much as {} base pages, where {} huge pages would do",
            bytes.whole_pages(base),
            bytes.whole_pages(pmd).0.max(1)
        ),
        Cost::Slow(bytes) => format!("{bytes} are slower than necessary"),
        Cost::Waits(touch) => format!("{}: {:.1} times as long", touched(touch), touch.ratio()),
        Cost::Unknown => "no figure can be given".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use jumbo::units::Bytes;

    use super::*;

    #[test]
    fn resident_pages_are_counted_in_the_page_sizes_of_the_host() {
        let text = |id, base: u64, pmd| {
            let [base, pmd] = [base, pmd].map(|kib| PageSize::new(kib << 10).unwrap());
            cost(id, Cost::Slow(Bytes(1 << 30)), base, pmd)
        };
        let small = text("small-heap", 4, 2048);
        assert!(
            small.contains("262144 base pages, where 512 huge"),
            "{small}"
        );
        let large = text("small-shared", 64, 512 << 10);
        assert!(large.contains("16384 base pages, where 2 huge"), "{large}");
        // Faults since boot, and free memory, are in no page table.
        for id in ["thp-fallback", "fragmented"] {
            assert!(!text(id, 4, 2048).contains("base pages"));
        }
    }
}
