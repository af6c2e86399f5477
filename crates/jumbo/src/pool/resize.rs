//! Changes of the number of persistent pages: [`Pool::resize`].

use super::{Error, NodeSet, Pool, lock};
use crate::units::{NodeId, Pages};

/// Result of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resized {
    /// Persistent pages before.
    pub before: Pages,
    /// Requested persistent pages.
    pub asked: Pages,
    /// Persistent pages after.
    pub persistent: Pages,
    /// Surplus pages after: pages that a shrink could not free are released when returned.
    pub surplus: Pages,
    /// Reason for fewer pages than requested by a grow, which keeps the pages that it got.
    pub stopped: Option<Error>,
}

impl Pool {
    /// Sets the number of persistent pages.
    ///
    /// A grow makes surplus pages persistent first, and gets the rest from the source. A shrink
    /// releases free pages that are not reserved, and turns the rest of the difference into
    /// surplus.
    pub fn resize(&self, persistent: Pages) -> Resized {
        self.resize_in(self.nodes(), persistent)
    }

    /// Sets the number of persistent pages of one node.
    pub fn resize_node(&self, node: NodeId, persistent: Pages) -> Resized {
        self.resize_in(NodeSet::of(node).and(self.nodes()), persistent)
    }

    fn resize_in(&self, nodes: NodeSet, asked: Pages) -> Resized {
        let _alone = lock(&self.resizing);
        let before = lock(&self.inventory).persistent(nodes);
        let stopped = match self.check_here() {
            Err(error) => Some(error),
            Ok(()) if asked.0 >= before => self.grow(nodes, asked.0),
            Ok(()) => {
                self.shrink(nodes, asked.0);
                None
            }
        };
        let inventory = lock(&self.inventory);
        Resized {
            before: Pages(before),
            asked,
            persistent: Pages(inventory.persistent(nodes)),
            surplus: Pages(inventory.surplus(nodes)),
            stopped,
        }
    }

    fn grow(&self, nodes: NodeSet, asked: u64) -> Option<Error> {
        let mut left = nodes;
        let mut stopped = None;
        loop {
            let mut inventory = lock(&self.inventory);
            if inventory.persistent(nodes) >= asked {
                return None;
            }
            if inventory.keep_surplus(nodes) {
                continue;
            }
            let Some(node) = inventory.poorest(left) else {
                return stopped.or(Some(Error::Placement));
            };
            drop(inventory);
            match self.make_on(node) {
                Some(Ok(frame)) => lock(&self.inventory).join_persistent(frame),
                Some(Err(error)) => {
                    left = left.without(NodeSet::of(node));
                    stopped = Some(Error::Source(error));
                }
                None => {
                    left = left.without(NodeSet::of(node));
                    stopped = stopped.or(Some(Error::Window {
                        capacity: self.source.window().capacity(),
                    }));
                }
            }
        }
    }

    fn shrink(&self, nodes: NodeSet, asked: u64) {
        let mut freed = Vec::new();
        let mut inventory = lock(&self.inventory);
        let promised = inventory.held(nodes);
        let used = inventory.total(nodes) - inventory.listed(nodes) - promised;
        // Same as in the kernel: promised pages count as used.
        let floor = asked.max(promised + used);
        while inventory.persistent(nodes) > floor {
            match inventory.shed(nodes) {
                Some(frame) => freed.push(frame),
                None => break,
            }
        }
        while inventory.persistent(nodes) > asked && inventory.make_surplus(nodes) {}
        drop(inventory);
        self.return_made(freed);
    }
}
