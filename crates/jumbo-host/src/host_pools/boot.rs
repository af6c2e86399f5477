//! Settings of a pool for the next boot: [`values`], [`command_line`].
//!
//! A boot script may be too late for pages beyond the page allocator's largest block. They need the
//! kernel command line.

use super::plan::{PoolChange, PoolPlan};
use crate::kernel::hugetlb::{NodePool, Pool};
use crate::knobs::{Knob, Value};
use crate::units::{NodeId, PageSize, Pages};

/// Returns the values of the knobs after `plan`, or the current ones where `change` is empty, and
/// the persistent pages among them.
pub fn values(
    pool: &Pool,
    change: &PoolChange,
    plan: &PoolPlan,
) -> (Vec<(Knob, Value)>, Option<Pages>) {
    let value = |knob: Knob, now: Pages| {
        let mut steps = plan.writes.steps.iter();
        let to = steps
            .find(|step| step.knob == knob)
            .and_then(|step| step.to.number());
        (knob, to.map_or(now, Pages))
    };
    let is_empty = change.persistent.is_none() && change.overcommit.is_none();
    let mut values = Vec::new();
    if change.persistent.is_some() || is_empty {
        let here = change.node.and_then(|node| pool.nodes.get(&node));
        let now = here.map_or(pool.persistent(), NodePool::persistent);
        values.push(value(Knob::persistent(pool.size, change.node), now));
    }
    let pages = values.first().map(|(_, pages)| *pages);
    let both = is_empty && change.node.is_none() && pool.overcommit > Pages(0);
    if change.overcommit.is_some() || both {
        values.push(value(Knob::overcommit(pool.size), pool.overcommit));
    }
    let values = values.into_iter().map(|(knob, to)| (knob, to.into()));
    (values.collect(), pages)
}

/// Returns kernel arguments, as in `hugepagesz=1G hugepages=4`: the kernel makes these pages before
/// memory is fragmented. Linux 5.16 is the first that takes nodes.
pub fn command_line(size: PageSize, parts: &[(Option<NodeId>, Pages)]) -> String {
    let part = |(node, pages): &(Option<NodeId>, Pages)| match node {
        Some(node) => format!("{node}:{pages}"),
        None => pages.to_string(),
    };
    let parts: Vec<_> = parts.iter().map(part).collect();
    format!("hugepagesz={size} hugepages={}", parts.join(","))
}

#[cfg(test)]
mod tests {
    use super::super::plan::Amount;
    use super::*;
    use crate::kernel::fake;

    #[test]
    fn planned_values_precede_current_ones() {
        let pool = Pool {
            nodes: [0, 1]
                .map(|node| (NodeId(node), NodePool::default()))
                .into(),
            ..fake::pool(0, 0, 0, 0)
        };
        let of = |persistent: Option<u64>, node: Option<u32>| {
            let change = PoolChange {
                persistent: persistent.map(|pages| Amount::To(Pages(pages))),
                overcommit: None,
                node: node.map(NodeId),
            };
            let plan = PoolPlan::new(&pool, &change).unwrap();
            values(&pool, &change, &plan)
        };
        let knob = |node: Option<u32>| Knob::persistent(pool.size, node.map(NodeId));
        let is = |node, pages: u64| (vec![(knob(node), pages.into())], Some(Pages(pages)));
        assert_eq!(of(Some(512), None), is(None, 512));
        assert_eq!(of(Some(7), Some(1)), is(Some(1), 7));
        assert_eq!(of(None, None), is(None, 0));
    }

    #[test]
    fn gigantic_pages_are_made_by_the_command_line() {
        let parts = [(Some(NodeId(0)), Pages(2)), (Some(NodeId(1)), Pages(4))];
        let arguments = command_line(PageSize::SIZE_1G, &parts);
        assert_eq!(arguments, "hugepagesz=1G hugepages=0:2,1:4");
    }
}
