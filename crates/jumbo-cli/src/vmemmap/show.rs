//! `jumbo vmemmap show`.

use std::process::ExitCode;

use jumbo::units::Pages;
use jumbo_host::kernel::hugetlb;
use jumbo_host::kernel::hvo::{self, PoolSavings, Savings};
use jumbo_host::kernel::memory::{Events, Memory, Metadata};
use jumbo_host::kernel::{self, Root};
use jumbo_host::knobs::Group;
use jumbo_host::status::Missing;
use serde::Serialize;

use crate::knobs::Kept;
use crate::view::{self, NONE, View};

/// HVO and its savings, for JSON.
#[derive(Serialize)]
struct VmemmapPage {
    /// State of HVO for new pages; `None`: not in this kernel.
    hvo: Option<bool>,
    memmap_on_memory: Option<bool>,
    metadata: Option<Metadata>,
    savings: Savings,
    #[serde(flatten)]
    kept: Kept,
    missing: Vec<Missing>,
}

pub(super) fn main(root: &Root, json: bool) -> anyhow::Result<ExitCode> {
    view::page(json, &read(root), show)
}

/// Reads page metadata and the memory that HVO saves, or could save.
pub(super) fn savings(root: &Root, missing: &mut Vec<Missing>) -> (Option<Metadata>, Savings) {
    let base = kernel::base_page(root);
    let pools = Missing::or_default(hugetlb::pools(root), "the pools", missing);
    let read =
        || Ok::<_, kernel::FileError>(Events::read(root)?.metadata(&Memory::read(root)?, base));
    let metadata = Missing::or_default(read().map(Some), "page metadata", missing);
    let pools = pools.unwrap_or_default();
    (metadata, Savings::read(root, &pools, metadata, base))
}

fn read(root: &Root) -> VmemmapPage {
    let mut missing = Vec::new();
    let m = &mut missing;
    let (metadata, savings) = savings(root, m);
    VmemmapPage {
        hvo: Missing::or_default(hvo::is_on(root), "whether HVO is on", m),
        memmap_on_memory: Missing::or_default(hvo::memmap_on_memory(root), "memmap_on_memory", m),
        metadata,
        savings,
        kept: Kept::read(root, &[Group::hvo()], m),
        missing,
    }
}

fn show(view: &mut View, page: &VmemmapPage) {
    let savings = &page.savings;
    view.fact("HVO", hvo::in_words(page.hvo));
    if let Some(metadata) = page.metadata {
        view.fact("Page metadata", metadata.bytes.to_string());
    }
    let now = match (savings.now, &savings.unknown) {
        (Some(now), _) => now.to_string(),
        (None, why) => format!("not known: {}", why.as_deref().unwrap_or(NONE)),
    };
    view.fact("Saved now", now);
    view.fact(
        "Could be",
        format!("{}, if every page in a pool had it", savings.most),
    );
    let on_memory = match page.memmap_on_memory {
        Some(true) => "yes: HVO leaves hotplugged memory alone, which holds its own",
        Some(false) => "no",
        None => "not in this kernel",
    };
    view.fact("On memory", format!("memmap_on_memory {on_memory}"));
    view.heading("By page size");
    match savings.pools.as_slice() {
        [] => view.line("  no pool"),
        pools => view.table(
            ">SIZE|>PAGES|>FREED OF EACH|>SAVED NOW|>COULD BE|>MADE WITHOUT",
            pools.iter().map(row),
        ),
    }
    page.kept.show(view);
    view.missing("Not shown", &page.missing)
}

fn row(pool: &PoolSavings) -> [String; 6] {
    let range = |range: Option<(Pages, Pages)>, one: &dyn Fn(Pages) -> String| match range {
        None => "not known".to_owned(),
        Some((least, most)) if least == most => one(least),
        Some((least, most)) => format!("{} to {}", one(least), one(most)),
    };
    let freed = |pages: Pages| jumbo::units::Bytes(pages.0.saturating_mul(pool.each.0)).to_string();
    [
        pool.size.to_string(),
        pool.pages.to_string(),
        pool.each.to_string(),
        range(pool.optimised, &freed),
        pool.most.to_string(),
        range(pool.predate(), &|pages| pages.to_string()),
    ]
}
