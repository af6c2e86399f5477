//! What a pool has on each node, and what it owes: [`Inventory`].
//!
//! Plain code without threads in it: the holder of the lock calls it. It decides; making and unmaking pages
//! is left to the caller, who must not hold the lock meanwhile.

use jumbo_inside::pool::{Overcommit, PageCounts};

use super::error::Exhausted;
use super::frame::Frame;
use super::{Counters, NodeSet, Placement};
use crate::units::{NodeId, Pages};

/// How many nodes there can be, as an array's length.
pub(super) const NODES: usize = NodeSet::CAPACITY as usize;

/// One node's pages.
#[derive(Debug)]
pub(super) struct Node {
    /// How many pages the pool has there.
    pub(super) books: PageCounts,
    /// Pages that reservations hold.
    held: u64,
    /// Free pages that are not promised.
    pub(super) free: Vec<Frame>,
    /// Places whose page went back to the source.
    holes: Vec<Frame>,
    /// Places from this one on were never used.
    fresh: u32,
}

/// What there is, and what is owed.
#[derive(Debug)]
pub(super) struct Inventory {
    nodes: [Node; NODES],
    present: NodeSet,
    capacity: u32,
    /// How many surplus pages there may be, on all nodes together.
    pub(super) overcommit: Overcommit,
}

impl Node {
    const fn new() -> Self {
        Self {
            books: PageCounts::new(),
            held: 0,
            free: Vec::new(),
            holes: Vec::new(),
            fresh: 0,
        }
    }

    fn listed(&self) -> u64 {
        self.free.len() as u64
    }

    /// Has room for all its pages, so that a give allocates nothing.
    fn make_room(&mut self) {
        let all = usize::try_from(self.books.total()).unwrap_or(0);
        self.free.reserve(all.saturating_sub(self.free.len()));
    }
}

fn slot(node: NodeId) -> usize {
    node.0 as usize % NODES
}

impl Inventory {
    pub(super) fn new(present: NodeSet, capacity: u32) -> Self {
        Self {
            nodes: [const { Node::new() }; NODES],
            present,
            capacity,
            overcommit: Overcommit::default(),
        }
    }

    pub(super) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[slot(node)]
    }

    pub(super) fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[slot(node)]
    }

    fn sum(&self, nodes: NodeSet, of: impl Fn(&Node) -> u64) -> u64 {
        let nodes = nodes.and(self.present).iter();
        nodes.map(|node| of(self.node(node))).sum()
    }

    pub(super) fn total(&self, nodes: NodeSet) -> u64 {
        self.sum(nodes, |node| node.books.total())
    }

    pub(super) fn surplus(&self, nodes: NodeSet) -> u64 {
        self.sum(nodes, |node| node.books.surplus())
    }

    pub(super) fn persistent(&self, nodes: NodeSet) -> u64 {
        self.sum(nodes, |node| node.books.persistent())
    }

    /// Free pages that are not promised.
    pub(super) fn listed(&self, nodes: NodeSet) -> u64 {
        self.sum(nodes, Node::listed)
    }

    /// The pages of `nodes` that reservations hold.
    pub(super) fn held(&self, nodes: NodeSet) -> u64 {
        self.sum(nodes, |node| node.held)
    }

    /// A page that is on no list is promised.
    pub(super) fn hold(&mut self, node: NodeId) {
        self.node_mut(node).held += 1;
    }

    /// A page is promised no more.
    pub(super) fn unhold(&mut self, node: NodeId) {
        self.node_mut(node).held -= 1;
    }

    /// The counters of `nodes`, by the kernel's names.
    pub(super) fn counters(&self, nodes: NodeSet) -> Counters {
        for node in nodes.and(self.present).iter().map(|node| self.node(node)) {
            let (free, total) = (node.listed() + node.held, node.books.total());
            let places = u64::from(node.fresh) - node.holes.len() as u64;
            debug_assert!(
                free <= total && total <= places && node.books.surplus() <= total,
                "{node:?}"
            );
        }
        let held = self.held(nodes);
        Counters {
            total: Pages(self.total(nodes)),
            free: Pages(self.listed(nodes) + held),
            reserved: Pages(held),
            surplus: Pages(self.surplus(nodes)),
            overcommit: Pages(self.overcommit.max),
        }
    }

    /// Of `nodes` the one with the most of something, if any has some.
    fn richest(&self, nodes: NodeSet, of: impl Fn(&Node) -> u64) -> Option<NodeId> {
        let nodes = nodes.and(self.present).iter();
        let counted = nodes.map(|node| (of(self.node(node)), node));
        let most = counted.max_by_key(|(count, node)| (*count, std::cmp::Reverse(*node)));
        most.and_then(|(count, node)| (count > 0).then_some(node))
    }

    /// A free page, from the node that has most of them.
    pub(super) fn pop_free(&mut self, nodes: NodeSet) -> Option<Frame> {
        let node = self.richest(nodes, Node::listed)?;
        self.node_mut(node).free.pop()
    }

    /// A free page where the placement would have it.
    pub(super) fn pop_placed(&mut self, placement: Placement) -> Option<Frame> {
        let [first, rest] = placement.tiers(self.present);
        self.pop_free(first).or_else(|| self.pop_free(rest))
    }

    /// A page is given back: `Some` where it is surplus of its node, leaves the pool and goes on to the
    /// source; else it is free now.
    pub(super) fn give(&mut self, frame: Frame) -> Option<Frame> {
        let node = self.node_mut(frame.node());
        if node.books.release_one() {
            return Some(frame);
        }
        node.free.push(frame);
        None
    }

    /// A page of the pool is lost; its place is empty.
    pub(super) fn lose(&mut self, frame: Frame) {
        let node = self.node_mut(frame.node());
        node.books.remove(1);
        node.holes.push(frame);
    }

    /// A page that the source made joins the pool as surplus, in use.
    pub(super) fn join_surplus(&mut self, node: NodeId) {
        let node = self.node_mut(node);
        node.books.add_surplus(1);
        node.make_room();
    }

    /// A page that the source made joins the pool for good, free.
    pub(super) fn join_persistent(&mut self, frame: Frame) {
        let node = self.node_mut(frame.node());
        node.books.add_persistent(1);
        node.make_room();
        node.free.push(frame);
    }

    /// An empty place on a node, for the source to put a page there.
    pub(super) fn pop_hole(&mut self, node: NodeId) -> Option<Frame> {
        if !self.present.contains(node) {
            return None;
        }
        let capacity = self.capacity;
        let slot = self.node_mut(node);
        slot.holes.pop().or_else(|| {
            let index = (slot.fresh < capacity).then_some(slot.fresh)?;
            slot.fresh += 1;
            Some(Frame::new(node, index))
        })
    }

    pub(super) fn push_hole(&mut self, frame: Frame) {
        self.node_mut(frame.node()).holes.push(frame);
    }

    /// The nodes in the order in which persistent pages are added: the one with the fewest first.
    pub(super) fn poorest(&self, nodes: NodeSet) -> Option<NodeId> {
        let nodes = nodes.and(self.present).iter();
        nodes.min_by_key(|node| (self.node(*node).books.persistent(), *node))
    }

    /// Makes a surplus page persistent; false where there is none.
    pub(super) fn keep_surplus(&mut self, nodes: NodeSet) -> bool {
        let node = self.richest(nodes, |node| node.books.surplus());
        node.inspect(|node| self.node_mut(*node).books.make_persistent())
            .is_some()
    }

    /// Makes a persistent page surplus; false where there is none.
    pub(super) fn make_surplus(&mut self, nodes: NodeSet) -> bool {
        let node = self.richest(nodes, |node| node.books.persistent());
        node.inspect(|node| self.node_mut(*node).books.make_surplus())
            .is_some()
    }

    /// A free page leaves the pool, and with it a persistent one: of a node that has both, if there is
    /// one; else of any, and the surplus that it was is left to another node.
    pub(super) fn shed(&mut self, nodes: NodeSet) -> Option<Frame> {
        let both = |node: &Node| node.listed().min(node.books.persistent());
        if let Some(node) = self.richest(nodes, both) {
            let node = self.node_mut(node);
            let frame = node.free.pop()?;
            node.books.remove_persistent();
            return Some(frame);
        }
        let node = self.richest(nodes, Node::listed)?;
        if !self.make_surplus(nodes) {
            return None;
        }
        let node = self.node_mut(node);
        let frame = node.free.pop()?;
        node.books.remove(1);
        Some(frame)
    }

    /// The counters for an error.
    pub(super) fn exhausted(&self, wanted: u64, allowed: NodeSet) -> Exhausted {
        let all = self.present;
        let (free, held) = (self.listed(all), self.held(all));
        Exhausted {
            wanted: Pages(wanted),
            persistent: Pages(self.persistent(all)),
            overcommit: Pages(self.overcommit.max),
            surplus: Pages(self.surplus(all) + self.overcommit.pending),
            used: Pages(self.total(all).saturating_sub(free + held)),
            reserved: Pages(held),
            elsewhere: Pages(free - self.listed(allowed)),
        }
    }
}
