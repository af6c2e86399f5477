//! Random operations on a pool and on a model of a few numbers for each node.
//!
//! The pool may choose among several nodes. The model checks that the choice was allowed and that
//! all other effects are exact.

use crate::books;
use std::collections::HashSet;

use jumbo::pool::{Error, Model, NodeSet, Page, Placement, Pool, Reservation};
use jumbo::units::{NodeId, Pages};
use proptest::prelude::*;

const NODES: usize = 3;
const SUPPLY_PAGES: u32 = 12;

#[derive(Clone, Debug)]
enum Op {
    Take(u8),
    /// Frees one of the pages.
    Give(usize),
    Reserve(u64, u8),
    /// Takes a page from one of the reservations.
    Use(usize),
    /// Splits one of the reservations.
    Part(usize, u64),
    /// Ends one of the reservations.
    End(usize),
    Resize(u64),
    ResizeNode(usize, u64),
    Overcommit(u64),
}

fn operation() -> impl Strategy<Value = Op> {
    let nodes = prop_oneof![4 => Just(7u8), 1 => 1..8u8];
    prop_oneof![
        6 => nodes.clone().prop_map(Op::Take),
        6 => any::<usize>().prop_map(Op::Give),
        3 => (0..8u64, nodes).prop_map(|(pages, nodes)| Op::Reserve(pages, nodes)),
        4 => any::<usize>().prop_map(Op::Use),
        1 => (any::<usize>(), 0..5u64).prop_map(|(at, pages)| Op::Part(at, pages)),
        2 => any::<usize>().prop_map(Op::End),
        2 => (0..20u64).prop_map(Op::Resize),
        1 => (0..NODES, 0..8u64).prop_map(|(node, pages)| Op::ResizeNode(node, pages)),
        1 => (0..10u64).prop_map(Op::Overcommit),
    ]
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Node {
    total: u64,
    free: u64,
    reserved: u64,
    surplus: u64,
}

impl Node {
    fn available(&self) -> u64 {
        self.free - self.reserved
    }

    fn used(&self) -> u64 {
        self.total - self.free
    }

    fn persistent(&self) -> u64 {
        self.total - self.surplus
    }
}

type Nodes = [Node; NODES];

fn sum(nodes: &Nodes, of: impl Fn(&Node) -> u64) -> u64 {
    nodes.iter().map(of).sum()
}

/// Checks the pool's counters and returns them.
fn observe(pool: &Pool) -> Nodes {
    books::check(pool);
    let nodes: Nodes = std::array::from_fn(|at| {
        let counters = pool.node_counters(id(at));
        Node {
            total: counters.total.0,
            free: counters.free.0,
            reserved: counters.reserved.0,
            surplus: counters.surplus.0,
        }
    });
    for node in nodes {
        assert!(node.reserved <= node.free && node.free <= node.total);
        assert!(node.surplus <= node.total);
    }
    let counters = pool.counters();
    assert_eq!(counters.total.0, sum(&nodes, |node| node.total));
    assert_eq!(counters.free.0, sum(&nodes, |node| node.free));
    assert_eq!(counters.reserved.0, sum(&nodes, |node| node.reserved));
    assert_eq!(counters.surplus.0, sum(&nodes, |node| node.surplus));
    nodes
}

fn id(at: usize) -> NodeId {
    NodeId(u32::try_from(at).unwrap())
}

fn index(node: NodeId) -> usize {
    usize::try_from(node.0).unwrap()
}

fn placement(mask: u8) -> Placement {
    let allowed: NodeSet = allowed(mask).map(id).collect();
    Placement::on(allowed)
}

fn allowed(mask: u8) -> impl Iterator<Item = usize> {
    (0..NODES).filter(move |at| mask >> at & 1 == 1)
}

/// Returns the number of surplus pages for `wanted` pages on the nodes of `mask`, or the expected
/// error.
fn shortage(nodes: &Nodes, overcommit: u64, wanted: u64, mask: u8) -> Result<u64, &'static str> {
    let available: u64 = allowed(mask).map(|at| nodes[at].available()).sum();
    let shortage = wanted.saturating_sub(available);
    let supply: u64 = allowed(mask)
        .map(|at| u64::from(SUPPLY_PAGES) - nodes[at].total)
        .sum();
    if shortage > 0 && sum(nodes, |node| node.surplus) + shortage > overcommit {
        Err("exhausted")
    } else if shortage > supply {
        Err("source")
    } else {
        Ok(shortage)
    }
}

fn kind(error: Error) -> &'static str {
    match error {
        Error::Exhausted(_) => "exhausted",
        // The model's window is as large as its supply.
        Error::Source(_) | Error::Window { .. } => "source",
        _ => "other",
    }
}

struct Run<'p> {
    pool: &'p Pool,
    pages: Vec<Page<'p>>,
    reservations: Vec<Reservation<'p>>,
    overcommit: u64,
    now: Nodes,
}

impl<'p> Run<'p> {
    /// Checks the pool against `expected`, the state before the next step.
    fn expect(&mut self, expected: Nodes) {
        let seen = observe(self.pool);
        assert_eq!(seen, expected);
        self.now = seen;
    }

    fn took(&mut self, page: Page<'p>, mask: u8) {
        let at = index(page.node());
        let mut expected = self.now;
        assert!(allowed(mask).any(|node| node == at), "not allowed there");
        if shortage(&self.now, self.overcommit, 1, mask) == Ok(0) {
            assert!(self.now[at].available() > 0, "a free page was elsewhere");
            expected[at].free -= 1;
        } else {
            expected[at].total += 1;
            expected[at].surplus += 1;
        }
        let addresses: HashSet<usize> = self
            .pages
            .iter()
            .map(|page| page.bytes().as_ptr().addr())
            .collect();
        assert!(!addresses.contains(&page.bytes().as_ptr().addr()));
        self.pages.push(page);
        self.expect(expected);
    }

    fn take(&mut self, mask: u8) {
        let allowed = shortage(&self.now, self.overcommit, 1, mask);
        match self.pool.take_placed(placement(mask)) {
            Ok(page) => {
                assert!(allowed.is_ok(), "taken, where the rules say {allowed:?}");
                self.took(page, mask);
            }
            Err(error) => {
                assert_eq!(Err(kind(error)), allowed);
                self.expect(self.now);
            }
        }
    }

    fn give(&mut self, at: usize) {
        if self.pages.is_empty() {
            return;
        }
        let page = self.pages.swap_remove(at % self.pages.len());
        let mut expected = self.now;
        let node = &mut expected[index(page.node())];
        if node.surplus > 0 {
            node.total -= 1;
            node.surplus -= 1;
        } else {
            node.free += 1;
        }
        drop(page);
        self.expect(expected);
    }

    fn reserve(&mut self, pages: u64, mask: u8) {
        let allowed_surplus = shortage(&self.now, self.overcommit, pages, mask);
        let reservation = match self.pool.reserve_placed(Pages(pages), placement(mask)) {
            Ok(reservation) => reservation,
            Err(error) => {
                assert_eq!(Err(kind(error)), allowed_surplus);
                self.expect(self.now);
                return;
            }
        };
        let made = allowed_surplus.expect("reserved, against the rules");
        assert_eq!(reservation.left(), Pages(pages));
        self.reservations.push(reservation);
        let (before, after) = (self.now, observe(self.pool));
        for at in 0..NODES {
            let (before, after) = (before[at], after[at]);
            let (made, promised) = (after.total - before.total, after.reserved - before.reserved);
            assert_eq!(after.surplus - before.surplus, made);
            assert_eq!(after.used(), before.used());
            assert!(promised <= before.available() + made);
            let there = allowed(mask).any(|node| node == at);
            assert!(there || promised == 0, "reserved where it is not allowed");
        }
        let grown = |of: fn(&Node) -> u64| sum(&after, of) - sum(&before, of);
        assert_eq!(grown(|node| node.total), made);
        assert_eq!(grown(|node| node.reserved), pages);
        self.now = after;
    }

    fn use_one(&mut self, at: usize) {
        if self.reservations.is_empty() {
            return;
        }
        let at = at % self.reservations.len();
        let reservation = &mut self.reservations[at];
        let left = reservation.left();
        let Some(page) = reservation.take() else {
            assert_eq!(left, Pages(0));
            return;
        };
        let mut expected = self.now;
        let node = &mut expected[index(page.node())];
        node.free -= 1;
        node.reserved -= 1;
        self.pages.push(page);
        self.expect(expected);
    }

    fn part(&mut self, at: usize, pages: u64) {
        if self.reservations.is_empty() {
            return;
        }
        let at = at % self.reservations.len();
        let reservation = &mut self.reservations[at];
        let before = reservation.left().0;
        let part = reservation.split_off(Pages(pages));
        assert_eq!(part.left().0, pages.min(before));
        assert_eq!(part.left().0 + reservation.left().0, before);
        self.reservations.push(part);
        self.expect(self.now);
    }

    fn end(&mut self, at: usize) {
        if self.reservations.is_empty() {
            return;
        }
        let reservation = self.reservations.swap_remove(at % self.reservations.len());
        let left = reservation.left().0;
        drop(reservation);
        let (before, after) = (self.now, observe(self.pool));
        let mut freed = 0;
        for at in 0..NODES {
            let (before, after) = (before[at], after[at]);
            let unreserved = before.reserved - after.reserved;
            let surplus = unreserved.min(before.surplus);
            assert_eq!(after.surplus, before.surplus - surplus);
            assert_eq!(after.total, before.total - surplus);
            assert_eq!(after.free, before.free - surplus);
            freed += unreserved;
        }
        assert_eq!(freed, left);
        self.now = after;
    }

    fn resize(&mut self, only: Option<usize>, asked: u64) {
        let mask: u8 = only.map_or(7, |at| 1 << at);
        let before = self.now;
        let within = |nodes: &Nodes, of: fn(&Node) -> u64| -> u64 {
            allowed(mask).map(|at| of(&nodes[at])).sum()
        };
        let persistent = within(&before, Node::persistent);
        let promised = within(&before, |node| node.reserved) + within(&before, Node::used);
        let resized = match only {
            Some(at) => self.pool.resize_node(id(at), Pages(asked)),
            None => self.pool.resize(Pages(asked)),
        };
        let after = observe(self.pool);
        let (expected, total) = if asked >= persistent {
            let surplus = within(&before, |node| node.surplus);
            let room: u64 = allowed(mask)
                .map(|at| u64::from(SUPPLY_PAGES) - before[at].total)
                .sum();
            let reached = asked.min(persistent + surplus + room);
            let made = (reached - persistent).saturating_sub(surplus);
            (reached, within(&before, |node| node.total) + made)
        } else {
            let freed = persistent.saturating_sub(asked.max(promised));
            (asked, within(&before, |node| node.total) - freed)
        };
        assert_eq!(within(&after, Node::persistent), expected);
        assert_eq!(within(&after, |node| node.total), total);
        assert_eq!(resized.persistent.0, expected);
        assert_eq!(resized.stopped.is_some(), expected < asked);
        for at in 0..NODES {
            assert_eq!(after[at].used(), before[at].used());
            assert_eq!(after[at].reserved, before[at].reserved);
            let there = allowed(mask).any(|node| node == at);
            assert!(there || after[at] == before[at]);
        }
        self.now = after;
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Take(nodes) => self.take(nodes),
            Op::Give(at) => self.give(at),
            Op::Reserve(pages, nodes) => self.reserve(pages, nodes),
            Op::Use(at) => self.use_one(at),
            Op::Part(at, pages) => self.part(at, pages),
            Op::End(at) => self.end(at),
            Op::Resize(pages) => self.resize(None, pages),
            Op::ResizeNode(at, pages) => self.resize(Some(at), pages),
            Op::Overcommit(pages) => {
                self.pool.set_overcommit(Pages(pages));
                self.overcommit = pages;
                self.expect(self.now);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_is_what_the_model_says(
        persistent in 0..16u64,
        ops in prop::collection::vec(operation(), 0..120),
    ) {
        let model = Model::new(&[SUPPLY_PAGES; NODES]).unwrap();
        let supply = model.supply();
        let pool = Pool::new(model, Placement::ANYWHERE);
        pool.resize(Pages(persistent));
        let mut run = Run {
            pool: &pool,
            pages: Vec::new(),
            reservations: Vec::new(),
            overcommit: 0,
            now: observe(&pool),
        };
        for op in &ops {
            run.step(op);
            for at in 0..NODES {
                prop_assert_eq!(supply.out(id(at)), run.now[at].total);
            }
        }
        drop(run);
        let end = pool.counters();
        prop_assert_eq!((end.reserved, end.used()), (Pages(0), Pages(0)));
        drop(pool);
        for at in 0..NODES {
            prop_assert_eq!(supply.out(id(at)), 0);
        }
    }
}
