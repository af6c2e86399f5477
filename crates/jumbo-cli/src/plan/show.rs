//! Text output of a plan and its files.

use anyhow::bail;
use clap::ValueEnum as _;
use jumbo::units::{Bytes, Pages, counted};

use super::HugePagePlan;
use super::sizing::{PageKind, PlannedMapping};
use crate::planned::{ConfigReader, FileLine};
use crate::view::{View, or_none};

/// Maximum number of listed mappings.
const MAX_MAPPINGS: usize = 8;

pub(super) fn show(view: &mut View, plan: &HugePagePlan) {
    let page = plan.page_size;
    let pages = counted(plan.memory.whole_pages(page).0, "page");
    let pool = match plan.kind {
        PageKind::Thp => "THPs, no pool",
        PageKind::Mapped | PageKind::Sysv => "hugetlb",
    };
    let of = match plan.count {
        1 => String::new(),
        count => format!(", {} each", counted(count.into(), "instance")),
    };
    view.line(format!(
        "{}: {} in {pages} of {page} ({pool}){of}",
        plan.workload, plan.memory
    ));
    view.fact("Sizes from", &plan.source);
    if plan.vmemmap_saved > Bytes(0) {
        view.fact(
            "Saved by HVO",
            format!("{} of page descriptors", plan.vmemmap_saved),
        );
    }
    view.fact(
        "Beside them",
        format!("{} for each instance (--private)", plan.private),
    );
    let rest = match &plan.short {
        Some(why) => why.clone(),
        None => format!("{} of {}", plan.rest, plan.host_memory),
    };
    view.fact("Left", rest);
    view.heading("Mappings of an instance");
    let region = |region: &PlannedMapping| {
        let pages = region.pages(page);
        [
            region.name.clone(),
            region.size.to_string(),
            pages.to_string(),
        ]
    };
    let (first, more) = plan.regions.split_at(plan.regions.len().min(MAX_MAPPINGS));
    view.table("<MAPPING|>SIZE|>PAGES", first.iter().map(region));
    if !more.is_empty() {
        let pages: u64 = more.iter().map(|region| region.pages(page).0).sum();
        view.line(format!("  and {} more, {} pages", more.len(), Pages(pages)));
    }
    if !plan.pools.is_empty() {
        view.heading("Pools");
        let row = |pool: &super::PlannedPool| {
            [
                or_none(pool.node),
                pool.size.to_string(),
                pool.pages.to_string(),
                pool.memory.to_string(),
            ]
        };
        view.table(">NODE|>PAGE|>PAGES|>MEMORY", plan.pools.iter().map(row));
    }
    view.list("Notes", plan.notes.iter().cloned());
    view.heading("Commands, once the files below are there");
    for FileLine { line, why } in &plan.steps {
        view.line(format!("  {line}"));
        view.line(format!("      {why}"));
    }
    view.line("")
}

/// Prints the files for `readers`, ready to be copied.
pub(super) fn files(plan: &HugePagePlan, readers: &[ConfigReader]) -> anyhow::Result<()> {
    let of_readers = plan
        .files
        .iter()
        .filter(|file| readers.contains(&file.reader));
    let of_readers: Vec<_> = of_readers.collect();
    if of_readers.is_empty() {
        let name = |reader: &ConfigReader| {
            reader
                .to_possible_value()
                .map(|value| value.get_name().to_owned())
        };
        let mut has: Vec<_> = plan
            .files
            .iter()
            .filter_map(|file| name(&file.reader))
            .collect();
        has.dedup();
        bail!(
            "this plan has no such file\nhint: it has files for {}",
            has.join(", ")
        );
    }
    Ok(crate::planned::print(of_readers)?)
}
