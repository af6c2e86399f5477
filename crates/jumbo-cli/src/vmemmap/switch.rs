//! `jumbo vmemmap on` and `off`; `--convert`: [`convert`].

use std::process::ExitCode;

use anyhow::bail;
use jumbo::units::{NodeId, PageSize, Pages, counted};
use jumbo_host::host_pools::is_gigantic;
use jumbo_host::kernel::hugetlb::{self, Pool};
use jumbo_host::kernel::{Root, hvo};
use jumbo_host::knobs::{Group, Knob, Plan, Step};

use super::show::savings;
use crate::knobs::change::{self, Change};
use crate::knobs::{ChangeOptions, boot, failed, undo};

/// Free most of the metadata of new hugetlb pages
///
/// Of the metadata of each page the kernel then keeps one base page: 4 of 32 KiB for a 2 MiB page,
/// 4 KiB of 16 MiB for one of 1 GiB. Existing pages stay unchanged; --convert frees and reallocates
/// the unused ones. Before Linux 7.1 each surplus page waits milliseconds for HVO.
#[derive(Debug, clap::Args)]
#[command(mut_arg("force", |force| force.help("With --convert: free pages that may not come again; with --undo: restore \
    even what another program changed since")))]
pub(super) struct OnArgs {
    /// Free and reallocate the existing unused pages, of one size or of all
    #[arg(long, value_name = "SIZE", num_args = 0..=1, conflicts_with = "undo")]
    pub(super) convert: Option<Option<PageSize>>,

    #[command(flatten)]
    pub(super) options: ChangeOptions,
}

pub(super) fn switch(
    root: &Root,
    on: bool,
    converted: Option<Option<PageSize>>,
    options: &ChangeOptions,
) -> anyhow::Result<ExitCode> {
    let group = Group::hvo();
    if options.undo {
        return undo::main(root, &[group], &options.mode, false);
    }
    let values = [(Knob::hvo(), u64::from(on).into())];
    if options.print_boot {
        let argument = format!("hugetlb_free_vmemmap={}", if on { "on" } else { "off" });
        let why =
            "For pages that the kernel makes at boot, as those of 1 GiB mostly are.".to_owned();
        return boot::print(
            root,
            &group,
            &values,
            Some((argument, why)),
            options.mode.json,
        );
    }
    change::change(root, &options.mode, || {
        let mut plan = Plan::of(root, group.clone(), values.clone()).map_err(failed)?;
        let mut notes = Vec::new();
        let pools = hugetlb::pools(root)?.unwrap_or_default();
        let slow = on && hvo::waits_for_rcu(root);
        if slow && let Some(pool) = pools.iter().find(|pool| pool.overcommit.0 > 0) {
            let size = pool.size;
            notes.push(format!(
                "on this kernel each surplus page waits milliseconds for HVO, and the pool of {size} pages lends them: \
                 `jumbo pool set {size} --overcommit 0`"
            ));
        }
        let mut needs_force = None;
        match converted {
            Some(size) => {
                let is_meant = |pool: &&Pool| size.is_none_or(|size| pool.size == size);
                let meant: Vec<_> = pools.iter().filter(is_meant).collect();
                if let Some(size) = size.filter(|_| meant.is_empty()) {
                    bail!("this kernel has no pool of {size} pages");
                }
                needs_force = convert(root, &meant, &mut plan, &mut notes);
            }
            None if !plan.steps.is_empty() && pools.iter().any(|pool| pool.total.0 > 0) => {
                notes.push(existing_pages_note(on).to_owned());
            }
            None => {}
        }
        let mut change = Change::new(plan, notes);
        change.needs_force = needs_force;
        Ok(change)
    })
}

fn existing_pages_note(on: bool) -> &'static str {
    match on {
        true => {
            "existing pages stay as they are: `jumbo vmemmap on --convert` reallocates the unused ones"
        }
        false => {
            "existing pages stay as they are, and to free one the kernel needs memory for its metadata: \
             without it the page stays in the pool as surplus"
        }
    }
}

/// Plans to free the unused pages of `pools` and to allocate as many with HVO. Returns the reason
/// if that needs --force.
fn convert(
    root: &Root,
    pools: &[&Pool],
    plan: &mut Plan,
    notes: &mut Vec<String>,
) -> Option<String> {
    let (_, savings) = savings(root, &mut Vec::new());
    let mut risky = None;
    for pool in pools {
        let size = pool.size;
        let known = savings.pools.iter().find(|of| of.size == size);
        let predate = known.and_then(|of| of.predate());
        if predate.is_some_and(|(_, most)| most == Pages(0)) {
            let total = pool.total.0;
            if total > 0 {
                let pages = counted(total, &format!("{size} page"));
                notes.push(format!("{pages} left as they are: all have HVO already"));
            }
            continue;
        }
        let before = plan.steps.len();
        for (node, has, keep) in parts(pool) {
            let knob = Knob::persistent(size, node);
            plan.add(knob.clone(), has, keep);
            if keep < has {
                plan.steps.push(Step::new(knob, keep, has));
            }
        }
        let remade = plan.steps.len() > before;
        let held = Pages(pool.used().0 + pool.reserved.0);
        if held > Pages(0) {
            notes.push(format!(
                "{} in use or reserved stay as they are, until their programs end",
                counted(held.0, &format!("{size} page"))
            ));
        }
        if remade && is_gigantic(root, size) {
            risky = Some(format!(
                "{size} pages that are given back may not come again: their memory can be split, or become metadata. To have them with \
                 HVO for sure, make them at boot: `hugetlb_free_vmemmap=on` on the kernel command line"
            ));
        }
    }
    risky
}

/// Persistent pages of a pool by node, and the number of them that cannot be freed now.
/// Reservations belong to no node, so each node keeps enough pages for all of them.
fn parts(pool: &Pool) -> Vec<(Option<NodeId>, Pages, Pages)> {
    let part = |node, persistent: Pages, used: Pages| {
        let keep = used.0.saturating_add(pool.reserved.0);
        (node, persistent, Pages(keep.min(persistent.0)))
    };
    if pool.nodes.len() < 2 {
        return vec![part(None, pool.persistent(), pool.used())];
    }
    let nodes = pool.nodes.iter();
    nodes
        .map(|(node, pages)| part(Some(*node), pages.persistent(), pages.used()))
        .collect()
}
