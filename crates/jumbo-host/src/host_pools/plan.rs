//! A requested change of a pool, [`PoolChange`], and its writes and effect, [`PoolPlan`].

use serde::Serialize;

use crate::kernel::Root;
use crate::kernel::hugetlb::{NodePool, Pool};
use crate::knobs::apply::ApplyError;
use crate::knobs::{self, Group, Knob, Locked, Saved, Steering};
use crate::units::{NodeId, PageSize, Pages, counted};

/// Requested change of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolChange {
    /// Persistent pages.
    pub persistent: Option<Amount>,
    /// Maximum number of surplus pages.
    pub overcommit: Option<Pages>,
    /// Node of the `persistent` pages; `None`: the kernel spreads them over all.
    pub node: Option<NodeId>,
}

/// Number of pages, absolute or relative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// New number.
    To(Pages),
    /// Pages to add.
    More(Pages),
    /// Pages to remove.
    Less(Pages),
}

/// Effect of a new number of persistent pages (`set_max_huge_pages` in mm/hugetlb.c).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Effect {
    /// Surplus pages that become persistent, without new memory.
    pub adopted: Pages,
    /// Pages made of free memory.
    pub made: Pages,
    /// Free pages returned to the host.
    pub freed: Pages,
    /// Used or reserved pages that become surplus; the kernel frees them after use.
    pub turned_surplus: Pages,
}

impl Effect {
    /// Returns the number of pages that were to be freed but became surplus. Before the kernel
    /// frees a page that HVO optimised, it allocates its descriptors again. Where memory for them
    /// is short, it keeps the page as surplus (5.14, mm/hugetlb.c).
    pub fn kept(&self, before: &Pool, after: &Pool) -> Pages {
        let to = before.total.0.saturating_sub(self.freed.0);
        let surplus = before.surplus.0 + self.turned_surplus.0;
        let beyond = |is: Pages, should: u64| is.0.saturating_sub(should);
        let kept = beyond(after.total, to).min(beyond(after.surplus, surplus));
        Pages(kept.min(self.freed.0))
    }
}

/// Plan for a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPlan {
    /// The writes.
    pub writes: knobs::Plan,
    /// Effect on the persistent pages.
    pub effect: Effect,
}

/// Reason why a change is impossible, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(String);

impl PoolPlan {
    /// Plans a change of the pool.
    ///
    /// # Errors
    /// [`PlanError`]: no such node, fewer pages than are to be removed, or an overflow.
    pub fn new(pool: &Pool, change: &PoolChange) -> Result<Self, PlanError> {
        let size = pool.size;
        let mut writes = knobs::Plan::new(Group::pool(size));
        let mut effect = Effect::default();
        if let Some(to) = change.overcommit {
            writes.add(Knob::overcommit(size), pool.overcommit, to);
        }
        if let Some(amount) = change.persistent {
            let part = part(pool, change.node)?;
            let has = part.persistent();
            let to = amount.from(has, size, change.node)?;
            if to != has {
                let knob = Knob::persistent(size, change.node);
                writes.steps.push(knobs::Step::new(knob, has, to));
                writes.saved.extend(saved(pool));
                effect = Effect::of(pool, part, to);
            }
        }
        Ok(Self { writes, effect })
    }
}

/// Plans to split `by` free pages of `pool` into pages of `smaller`, its `demote_size`. `--undo`
/// frees the smaller pages and makes as many large ones again.
///
/// # Errors
/// [`PlanError`]: no such node, or fewer free pages than are to be split.
pub fn demote(
    pool: &Pool,
    smaller: &Pool,
    by: Pages,
    node: Option<NodeId>,
) -> Result<knobs::Plan, PlanError> {
    let part = part(pool, node)?;
    let has = Pages(pool.unused().0.min(part.free.0).min(part.persistent().0));
    if by > has {
        let (size, place) = (pool.size, on_node(node));
        return Err(PlanError(format!(
            "cannot split {by} pages of {size}: {has} free{place}, neither in use nor reserved"
        )));
    }
    let mut writes = knobs::Plan::new(Group::pool(pool.size));
    if by > Pages(0) {
        let (has, to) = (part.persistent(), Pages(part.persistent().0 - by.0));
        let knob = Knob::demote(pool.size, node);
        writes.steps.push(knobs::Step::new(knob, has, to));
        writes.saved = saved(smaller);
        writes.saved.extend(saved(pool));
    }
    Ok(writes)
}

/// Begins any number of writes to a pool's overcommit and persistent pages, under one record.
///
/// # Errors
/// Errors of [`Steering::begin`].
pub fn steer<'a>(
    root: &'a Root,
    locked: &'a Locked,
    pool: &Pool,
    command: &str,
) -> Result<Steering<'a>, ApplyError> {
    let overcommit = Saved {
        knob: Knob::overcommit(pool.size),
        value: pool.overcommit.into(),
    };
    let knobs = vec![overcommit.knob.clone(), Knob::persistent(pool.size, None)];
    let saved = std::iter::once(overcommit).chain(saved(pool)).collect();
    Steering::begin(root, locked, knobs, saved, command)
}

impl Amount {
    fn from(self, has: Pages, size: PageSize, node: Option<NodeId>) -> Result<Pages, PlanError> {
        let (to, error) = match self {
            Self::To(to) => return Ok(to),
            Self::More(by) => (
                has.0.checked_add(by.0),
                format!("{by} pages more than {has} are more than a kernel can count"),
            ),
            Self::Less(by) => (
                has.0.checked_sub(by.0),
                format!(
                    "the pool of {size} pages cannot shrink by {by}: it has {}{}",
                    counted(has.0, "persistent page"),
                    on_node(node)
                ),
            ),
        };
        to.map(Pages).ok_or(PlanError(error))
    }
}

fn on_node(node: Option<NodeId>) -> String {
    node.map_or(String::new(), |node| format!(" on node {node}"))
}

/// Returns the pages of a pool, or of its part on one node.
fn part(pool: &Pool, node: Option<NodeId>) -> Result<NodePool, PlanError> {
    let Some(node) = node else {
        return Ok(pool.pages());
    };
    let here = pool.nodes.get(&node).copied();
    here.ok_or_else(|| {
        let (size, nodes) = (pool.size, nodes_in_words(pool));
        PlanError(format!(
            "there is no node {node}: the pool of {size} pages has {nodes}"
        ))
    })
}

fn nodes_in_words(pool: &Pool) -> String {
    let nodes: Vec<_> = pool.nodes.keys().map(ToString::to_string).collect();
    match nodes.as_slice() {
        [] => "no nodes".to_owned(),
        [only] => format!("node {only}"),
        several => format!("nodes {}", several.join(", ")),
    }
}

impl Effect {
    /// Predicts the effect of `to` persistent pages. The kernel frees pages that are neither mapped
    /// nor reserved in the whole pool, and turns the rest of the difference into surplus.
    fn of(pool: &Pool, part: NodePool, to: Pages) -> Self {
        let (has, to) = (part.persistent().0, to.0);
        if to >= has {
            let adopted = part.surplus.0.min(to - has);
            return Self {
                adopted: Pages(adopted),
                made: Pages(to - has - adopted),
                ..Self::default()
            };
        }
        // Mapped and reserved pages cannot be freed now.
        let pinned = pool.used().0 + pool.reserved.0;
        let spare = (pool.persistent().0.saturating_sub(pinned)).min(part.free.0);
        let freed = spare.min(has - to);
        Self {
            freed: Pages(freed),
            turned_surplus: Pages(has - to - freed),
            ..Self::default()
        }
    }
}

/// Returns the persistent pages of each node: a restored total would be spread over all nodes.
fn saved(pool: &Pool) -> Vec<Saved> {
    let saved = |node, pages: Pages| Saved {
        knob: Knob::persistent(pool.size, node),
        value: pages.into(),
    };
    if pool.nodes.len() < 2 {
        return vec![saved(None, pool.persistent())];
    }
    let on_node = |(node, pages): (&NodeId, &NodePool)| saved(Some(*node), pages.persistent());
    pool.nodes.iter().map(on_node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{fake, hugetlb};

    fn pool(total: u64, free: u64, reserved: u64, surplus: u64) -> Pool {
        Pool {
            overcommit: Pages(4),
            nodes: [(NodeId(0), part(total, free, surplus))].into(),
            ..fake::pool(total, free, reserved, surplus)
        }
    }

    fn part(total: u64, free: u64, surplus: u64) -> NodePool {
        NodePool {
            total: Pages(total),
            free: Pages(free),
            surplus: Pages(surplus),
        }
    }

    fn change(persistent: Amount) -> PoolChange {
        PoolChange {
            persistent: Some(persistent),
            overcommit: None,
            node: None,
        }
    }

    fn effect(pool: &Pool, to: u64) -> [u64; 4] {
        let Effect {
            adopted,
            made,
            freed,
            turned_surplus,
        } = PoolPlan::new(pool, &change(Amount::To(Pages(to))))
            .unwrap()
            .effect;
        [adopted.0, made.0, freed.0, turned_surplus.0]
    }

    #[test]
    fn kept_pages_exclude_later_growth() {
        let before = pool(100, 90, 0, 0);
        let effect = PoolPlan::new(&before, &change(Amount::To(Pages(70))))
            .unwrap()
            .effect;
        assert_eq!(effect.kept(&before, &pool(70, 60, 0, 0)), Pages(0));
        // The pool grew meanwhile: these pages are persistent.
        assert_eq!(effect.kept(&before, &pool(75, 65, 0, 0)), Pages(0));
        assert_eq!(effect.kept(&before, &pool(82, 72, 0, 12)), Pages(12));
    }

    #[test]
    fn growth_adopts_surplus_first() {
        assert_eq!(effect(&pool(12, 0, 0, 4), 20), [4, 8, 0, 0]);
        assert_eq!(effect(&pool(12, 0, 0, 4), 10), [2, 0, 0, 0]);
    }

    #[test]
    fn shrinking_keeps_used_and_reserved_pages() {
        // 10 persistent: 6 free, 2 of them reserved, so 4 can go.
        assert_eq!(effect(&pool(10, 6, 2, 0), 8), [0, 0, 2, 0]);
        assert_eq!(effect(&pool(10, 6, 2, 0), 0), [0, 0, 4, 6]);
        assert_eq!(effect(&pool(10, 0, 0, 0), 3), [0, 0, 0, 7]);
    }

    #[test]
    fn unchanged_pool_has_no_step() {
        let plan = PoolPlan::new(&pool(10, 10, 0, 0), &change(Amount::To(Pages(10)))).unwrap();
        assert!(plan.writes.is_empty() && plan.writes.saved.is_empty());
    }

    #[test]
    fn amounts_beyond_the_pool_are_refused() {
        let ten = pool(10, 10, 0, 0);
        let less = PoolPlan::new(&ten, &change(Amount::Less(Pages(11)))).unwrap_err();
        assert!(less.to_string().contains("has 10 persistent"), "{less}");
        let more = PoolPlan::new(&ten, &change(Amount::More(Pages(u64::MAX)))).unwrap_err();
        assert!(more.to_string().contains("a kernel can count"), "{more}");
        let elsewhere = PoolChange {
            node: Some(NodeId(7)),
            ..change(Amount::To(Pages(1)))
        };
        let error = PoolPlan::new(&ten, &elsewhere).unwrap_err();
        assert!(error.to_string().contains("has node 0"), "{error}");
    }

    #[test]
    fn with_several_nodes_each_is_saved() {
        let mut pool = pool(10, 10, 0, 0);
        pool.nodes.insert(NodeId(2), part(3, 3, 1));
        let plan = PoolPlan::new(&pool, &change(Amount::More(Pages(5)))).unwrap();
        let saved: Vec<_> = plan
            .writes
            .saved
            .iter()
            .map(|saved| (hugetlb::of_file(&saved.knob.file).unwrap().1, &saved.value))
            .collect();
        assert_eq!(
            saved,
            [(Some(NodeId(0)), &10.into()), (Some(NodeId(2)), &2.into())]
        );
        assert_eq!(
            plan.writes.steps[0].knob,
            Knob::persistent(PageSize::SIZE_2M, None)
        );
    }
}
