//! `jumbo pool show`.

use std::io;
use std::process::ExitCode;

use jumbo::units::{Bytes, PageSize, Pages, counted};
use jumbo_host::host_pools::{Holder, Holders};
use jumbo_host::kernel::cgroup::Limits;
use jumbo_host::kernel::hugetlb::{self, Mount, Pool};
use jumbo_host::kernel::{Root, hvo};
use jumbo_host::knobs::Group;
use jumbo_host::status::Missing;
use serde::Serialize;

use super::table;
use crate::knobs::Kept;
use crate::value::whole;
use crate::view::{self, NONE, View};

/// Show the pools by size and node, and who has their pages
///
/// As a normal user it shows what it may, and says what it may not.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the pool of this page size
    #[arg(value_name = "SIZE")]
    size: Option<PageSize>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How many processes and files to list
    #[arg(long, value_name = "N", default_value_t = TOP, value_parser = whole::<usize>,
        allow_negative_numbers = true)]
    top: usize,
}

const TOP: usize = 10;

impl Args {
    pub(super) fn all(json: bool) -> Self {
        Self {
            size: None,
            json,
            top: TOP,
        }
    }
}

/// The JSON.
#[derive(Serialize)]
struct Page {
    /// What a MAP_HUGETLB without a size means.
    default_size: Option<PageSize>,
    /// Whether HVO is on for pages made from now on; `None`: not in this kernel.
    hvo: Option<bool>,
    pools: Vec<PoolPage>,
    mounts: Vec<Mount>,
    holders: Holders,
    /// What is in use at least that no process seen here maps: in files, System V segments, memfds.
    unmapped: Bytes,
    #[serde(flatten)]
    kept: Kept,
    /// What this process's control group may have.
    limits: Limits,
    missing: Vec<Missing>,
}

/// A pool, and what follows from its counters.
#[derive(Serialize)]
pub(super) struct PoolPage {
    #[serde(flatten)]
    pub(super) pool: Pool,
    pub(super) persistent: Pages,
    /// Mapped, or in files.
    pub(super) used: Pages,
    /// Free and promised to no program.
    unused: Pages,
}

impl From<Pool> for PoolPage {
    fn from(pool: Pool) -> Self {
        Self {
            persistent: pool.persistent(),
            used: pool.used(),
            unused: pool.unused(),
            pool,
        }
    }
}

pub(super) fn main(root: &Root, args: &Args) -> anyhow::Result<ExitCode> {
    let page = read(root, args)?;
    view::page(args.json, &page, |view, page| show(view, root, page))?;
    Ok(ExitCode::SUCCESS)
}

fn read(root: &Root, args: &Args) -> anyhow::Result<Page> {
    let mut missing = Vec::new();
    let m = &mut missing;
    let pools = pools(root, args.size, m)?;
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
    holders.processes.truncate(args.top);
    holders.files.truncate(args.top);
    if holders.hidden > 0 {
        let processes = counted(holders.hidden as u64, "process");
        m.push(Missing {
            what: format!("the pages of {processes} of other users"),
            why: "it takes their user, or CAP_SYS_PTRACE".to_owned(),
        });
    }
    let hvo = hvo::is_on(root);
    Ok(Page {
        default_size: Missing::or_default(hugetlb::default_size(root), "the default size", m),
        hvo: Missing::or_default(hvo, "whether HVO is on", m),
        mounts: Missing::or_default(hugetlb::mounts(root), "hugetlbfs mounts", m),
        limits: Missing::or_default(Limits::read(root, &sizes), "control group limits", m),
        pools: pools.into_iter().map(PoolPage::from).collect(),
        holders,
        unmapped,
        kept,
        missing,
    })
}

/// All pools, or that of one size. Where /sys is hidden, as in some containers, /proc still tells of the default size.
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

fn show(view: &mut View, root: &Root, page: &Page) -> io::Result<()> {
    view.fact("HVO", hvo::in_words(page.hvo))?;
    if let Some(size) = page.default_size {
        view.fact("Default size", size.to_string())?;
    }
    let pools: Vec<_> = page.pools.iter().map(|page| &page.pool).collect();
    table::show(view, &pools)?;
    show_limits(view, page)?;
    show_holders(view, root, page)?;
    page.kept.show(view, root)?;
    view::missing(view, "Not shown", &page.missing)
}

fn show_limits(view: &mut View, page: &Page) -> io::Result<()> {
    let kinds = [
        ("touch", &page.limits.hugetlb),
        ("reserve", &page.limits.reservations),
    ];
    for (what, limits) in kinds {
        for (size, limit) in limits {
            view.line(format!(
                "  this control group may {what} {} of {size} pages, {} more ({})",
                limit.limit,
                limit.room(),
                limit.file.display()
            ))?;
        }
    }
    Ok(())
}

fn show_holders(view: &mut View, root: &Root, page: &Page) -> io::Result<()> {
    view.heading("Who has pages")?;
    let (processes, files) = (&page.holders.processes, &page.holders.files);
    if processes.is_empty() && files.is_empty() && page.unmapped == Bytes(0) {
        return view.line("  no process, and no file");
    }
    if !processes.is_empty() {
        view.table(
            "<SIZE|>PID|<NAME|>PRIVATE|>SHARED|>UNTOUCHED",
            processes.iter().map(row),
        )?;
    }
    for file in files {
        view.line(format!(
            "  {} in the file {}",
            file.bytes,
            file.path.display()
        ))?;
    }
    for mount in &page.mounts {
        view.line(format!(
            "  hugetlbfs at {}",
            root.path(mount.path.trim_start_matches('/')).display()
        ))?;
    }
    Ok(())
}

fn row(holder: &Holder) -> [String; 6] {
    [
        holder.size.map_or(NONE.to_owned(), |size| size.to_string()),
        holder.pid.to_string(),
        holder.name.clone(),
        view::some(holder.private),
        view::some(holder.shared),
        view::some(holder.untouched),
    ]
}
