//! `jumbo pool show`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use jumbo::units::{Bytes, NodeId, PageSize, Pages, counted};
use jumbo_host::host_pools::{HeldFile, Holder, Holders};
use jumbo_host::kernel::cgroup::{Limit, Limits};
use jumbo_host::kernel::hugetlb::{self, Mount, NodePool, Pool};
use jumbo_host::kernel::{Root, hvo};
use jumbo_host::knobs::Group;
use jumbo_host::status::Missing;
use serde::Serialize;

use crate::knobs::Kept;
use crate::view::{self, NONE, View};

/// Show the pools by size and node, and the holders of their pages
///
/// As a normal user it shows the readable part, and names the rest.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Show only the pool of this page size
    #[arg(value_name = "SIZE")]
    pub(super) size: Option<PageSize>,
}

/// Maximum number of processes in the list, and of files.
const MAX_LISTED: usize = 10;

/// All pools and their holders, for JSON.
#[derive(Serialize)]
struct PoolsPage {
    /// Page size of MAP_HUGETLB without a size.
    default_size: Option<PageSize>,
    /// State of HVO for new pages; `None`: not in this kernel.
    hvo: Option<bool>,
    pools: Vec<PoolRow>,
    mounts: Vec<Mount>,
    holders: Holders,
    /// Lower bound of the pages in use that no readable process maps: in files, System V segments,
    /// memfds.
    unmapped: Bytes,
    #[serde(flatten)]
    kept: Kept,
    limits: Limits,
    missing: Vec<Missing>,
}

/// A pool with the values derived from its counters.
#[derive(Serialize)]
pub(super) struct PoolRow {
    #[serde(flatten)]
    pub(super) pool: Pool,
    pub(super) persistent: Pages,
    /// Pages that are mapped, or in files.
    pub(super) used: Pages,
    /// Pages that are free and not reserved.
    unused: Pages,
}

impl From<Pool> for PoolRow {
    fn from(pool: Pool) -> Self {
        Self {
            persistent: pool.persistent(),
            used: pool.used(),
            unused: pool.unused(),
            pool,
        }
    }
}

pub(super) fn main(root: &Root, size: Option<PageSize>, json: bool) -> anyhow::Result<ExitCode> {
    let page = read(root, size)?;
    view::page(json, &page, |view, page| show(view, root, page))
}

fn read(root: &Root, size: Option<PageSize>) -> anyhow::Result<PoolsPage> {
    let mut missing = Vec::new();
    let m = &mut missing;
    let pools = pools(root, size, m)?;
    let groups = pools.iter().map(|pool| Group::pool(pool.size));
    let groups: Vec<_> = groups.collect();
    let kept = Kept::read(root, &groups, m);
    let sizes: Vec<_> = pools.iter().map(|pool| pool.size).collect();
    let holders = Holders::read(root, &pools);
    let mut holders = Missing::or_default(holders, "who has the pages", m);
    let is_shown = |size: Option<PageSize>| size.is_none_or(|size| sizes.contains(&size));
    holders.processes.retain(|holder| is_shown(holder.size));
    holders.files.retain(|file| is_shown(file.size));
    let mapped: Bytes = holders.processes.iter().map(Holder::resident).sum();
    let unmapped = Bytes(hugetlb::used(&pools).0.saturating_sub(mapped.0));
    holders.processes.truncate(MAX_LISTED);
    holders.files.truncate(MAX_LISTED);
    if holders.hidden > 0 {
        let processes = counted(holders.hidden as u64, "process");
        m.push(Missing {
            what: format!("the pages of {processes} of other users"),
            why: "it takes their user, or CAP_SYS_PTRACE".to_owned(),
        });
    }
    let hvo = hvo::is_on(root);
    Ok(PoolsPage {
        default_size: Missing::or_default(hugetlb::default_size(root), "the default size", m),
        hvo: Missing::or_default(hvo, "whether HVO is on", m),
        mounts: Missing::or_default(hugetlb::mounts(root), "hugetlbfs mounts", m),
        limits: Missing::or_default(Limits::read(root, &sizes), "control group limits", m),
        pools: pools.into_iter().map(PoolRow::from).collect(),
        holders,
        unmapped,
        kept,
        missing,
    })
}

/// Reads all pools, or one. Where /sys is hidden, as in some containers, /proc still has the pool
/// of the default size.
fn pools(
    root: &Root,
    size: Option<PageSize>,
    missing: &mut Vec<Missing>,
) -> anyhow::Result<Vec<Pool>> {
    let all = match hugetlb::pools(root) {
        Err(error) => {
            let pool = hugetlb::default_pool(root)?;
            missing.push(Missing {
                what: "pools of other sizes, and pages by node".to_owned(),
                why: error.to_string(),
            });
            Ok(pool.into_iter().collect())
        }
        Ok(_) => super::pools(root),
    };
    let mut all = all?;
    if let Some(size) = size {
        if all.iter().all(|pool| pool.size != size) {
            return super::pool(root, size).map(|pool| vec![pool]);
        }
        all.retain(|pool| pool.size == size);
    }
    Ok(all)
}

fn show(view: &mut View, root: &Root, page: &PoolsPage) {
    view.fact("HVO", hvo::in_words(page.hvo));
    if let Some(size) = page.default_size {
        view.fact("Default size", size.to_string());
    }
    let pools: Vec<_> = page.pools.iter().map(|page| &page.pool).collect();
    show_pools(view, &pools);
    show_limits(view, page);
    show_holders(view, root, page);
    page.kept.show(view);
    view.missing("Not shown", &page.missing)
}

fn show_limits(view: &mut View, page: &PoolsPage) {
    let of = |what, limits: &BTreeMap<PageSize, Limit>| {
        let line = |(size, limit): (&PageSize, &Limit)| {
            let (all, more, file) = (limit.limit, limit.room(), limit.file.display());
            format!("  this control group may {what} {all} of {size} pages, {more} more ({file})")
        };
        limits.iter().map(line).collect::<Vec<_>>()
    };
    view.lines(of("touch", &page.limits.hugetlb));
    view.lines(of("reserve", &page.limits.reservations))
}

fn show_holders(view: &mut View, root: &Root, page: &PoolsPage) {
    view.heading("Who has pages");
    let (processes, files) = (&page.holders.processes, &page.holders.files);
    if processes.is_empty() && files.is_empty() && page.unmapped == Bytes(0) {
        return view.line("  no process, and no file");
    }
    if !processes.is_empty() {
        view.table(
            "<SIZE|>PID|<NAME|>PRIVATE|>SHARED|>UNTOUCHED",
            processes.iter().map(row),
        );
    }
    let file = |file: &HeldFile| format!("  {} in the file {}", file.bytes, file.path.display());
    view.lines(files.iter().map(file));
    let place = |mount: &Mount| root.path(mount.path.trim_start_matches('/'));
    let mounts = page.mounts.iter();
    view.lines(mounts.map(|mount| format!("  hugetlbfs at {}", place(mount).display())))
}

fn row(holder: &Holder) -> [String; 6] {
    [
        view::or_none(holder.size),
        holder.pid.to_string(),
        holder.name.clone(),
        view::nonzero_bytes(holder.private),
        view::nonzero_bytes(holder.shared),
        view::nonzero_bytes(holder.untouched),
    ]
}

/// Shows a row for each pool, and below it one for each of its nodes.
pub(crate) fn show_pools(view: &mut View, pools: &[&Pool]) {
    let rows = |pool: &&Pool| {
        let nodes = pool.nodes.iter().map(|(node, pages)| (Some(*node), *pages));
        let parts = std::iter::once((None, pool.pages())).chain(nodes);
        let rows = parts.map(|(node, pages)| pages_row(pool, node, pages));
        rows.collect::<Vec<_>>()
    };
    view.heading("hugetlb pools");
    view.table(
        "<SIZE|>NODE|>TOTAL|>PERSISTENT|>SURPLUS|>OVERCOMMIT|>USED|>FREE|>RESERVED|>MEMORY",
        pools.iter().flat_map(rows),
    )
}

/// Row of a pool, or of its part on a node. Overcommit and reservations belong to no node.
fn pages_row(pool: &Pool, node: Option<NodeId>, pages: NodePool) -> [String; 10] {
    let of_pool = |pages: Pages| node.map_or(pages.to_string(), |_| NONE.to_owned());
    [
        node.map_or(pool.size.to_string(), |_| String::new()),
        node.map_or("all".to_owned(), |node| node.to_string()),
        pages.total.to_string(),
        pages.persistent().to_string(),
        pages.surplus.to_string(),
        of_pool(pool.overcommit),
        pages.used().to_string(),
        pages.free.to_string(),
        of_pool(pool.reserved),
        pages.total.bytes(pool.size).to_string(),
    ]
}
