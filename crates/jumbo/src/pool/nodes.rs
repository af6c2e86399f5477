//! Nodes of pages: [`NodeSet`] and [`Placement`].

use crate::units::NodeId;
use jumbo_sys::{self as sys, PolicyMode};

/// A set of nodes with numbers below [`NodeSet::CAPACITY`].
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet(u64);

impl NodeSet {
    /// Maximum number of nodes. The largest hosts sold have 32.
    pub const CAPACITY: u32 = u64::BITS;
    /// No node.
    pub const NONE: Self = Self(0);
    /// All nodes.
    pub const ALL: Self = Self(u64::MAX);

    /// Returns the set of one node; empty if its number is beyond the capacity.
    pub const fn of(node: NodeId) -> Self {
        if node.0 < Self::CAPACITY {
            Self(1 << node.0)
        } else {
            Self::NONE
        }
    }

    /// Reports whether it contains `node`.
    pub const fn contains(self, node: NodeId) -> bool {
        Self::of(node).0 & self.0 != 0
    }

    /// Returns the intersection.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the union.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the difference.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Reports whether it is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of nodes.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the number of nodes before `node`.
    pub(super) const fn rank(self, node: NodeId) -> u32 {
        (self.0 & (Self::of(node).0.wrapping_sub(1))).count_ones()
    }

    /// Returns the kernel's nodemask.
    pub(super) const fn mask(self) -> u64 {
        self.0
    }

    /// Returns its nodes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let node = (left != 0).then(|| left.trailing_zeros())?;
            left &= left - 1;
            Some(NodeId(node))
        })
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes
            .into_iter()
            .fold(Self::NONE, |set, node| set.or(Self::of(node)))
    }
}

impl std::fmt::Debug for NodeSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set()
            .entries(self.iter().map(|node| node.0))
            .finish()
    }
}

/// Nodes to try first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preferred {
    /// The node of the calling thread.
    Local,
    /// These nodes, the one with the most free pages first, so that pages spread over them.
    Nodes(NodeSet),
}

/// Allowed nodes of a page, and those to try first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    allowed: NodeSet,
    preferred: Preferred,
}

impl Placement {
    /// All nodes, the local one first.
    pub const ANYWHERE: Self = Self::on(NodeSet::ALL);

    /// Allows these nodes, the local one first.
    pub const fn on(allowed: NodeSet) -> Self {
        Self {
            allowed,
            preferred: Preferred::Local,
        }
    }

    /// Puts the nodes of `preferred` first.
    #[must_use]
    pub const fn preferring(self, preferred: NodeSet) -> Self {
        Self {
            allowed: self.allowed,
            preferred: Preferred::Nodes(preferred),
        }
    }

    /// Reads the cpuset and memory policy of the calling thread. Same as in the kernel, only
    /// MPOL_BIND excludes nodes of the cpuset; the other policies set the order.
    ///
    /// # Errors
    /// The errno of get_mempolicy(2), except ENOSYS of a kernel without NUMA: all nodes are allowed
    /// then.
    pub fn of_thread() -> std::io::Result<Self> {
        let cpuset = match sys::allowed_nodes() {
            Ok(mask) => NodeSet(mask),
            Err(rustix::io::Errno::NOSYS) => return Ok(Self::ANYWHERE),
            Err(errno) => return Err(errno.into()),
        };
        let (mode, nodes) = sys::memory_policy()?;
        let nodes = NodeSet(nodes);
        Ok(match mode {
            PolicyMode::Bind => Self::on(cpuset.and(nodes)).preferring(nodes),
            PolicyMode::Preferred | PolicyMode::Interleave if !nodes.is_empty() => {
                Self::on(cpuset).preferring(nodes)
            }
            _ => Self::on(cpuset),
        })
    }

    /// Returns the allowed nodes.
    pub const fn allowed(self) -> NodeSet {
        self.allowed
    }

    /// Returns the allowed part of `nodes`: the nodes to try first, and the rest.
    pub(super) fn tiers(self, nodes: NodeSet) -> [NodeSet; 2] {
        let allowed = self.allowed.and(nodes);
        // With one node there is no choice: no system call.
        if allowed.len() <= 1 {
            return [allowed, NodeSet::NONE];
        }
        let preferred = match self.preferred {
            Preferred::Nodes(preferred) => preferred,
            Preferred::Local => sys::local_node().map_or(NodeSet::NONE, NodeSet::of),
        };
        [allowed.and(preferred), allowed.without(preferred)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_counts_its_nodes() {
        let set: NodeSet = [0, 2, 63, 64].map(NodeId).into_iter().collect();
        assert_eq!(
            set.iter().map(|node| node.0).collect::<Vec<_>>(),
            [0, 2, 63]
        );
        assert_eq!(
            (set.len(), set.rank(NodeId(2)), set.rank(NodeId(63))),
            (3, 1, 2)
        );
        assert!(!set.contains(NodeId(64)) && !set.contains(NodeId(1)));
    }

    #[test]
    fn tiers_split_the_allowed_nodes() {
        let nodes: NodeSet = (0..4).map(NodeId).collect();
        let odd: NodeSet = [1, 3, 5].map(NodeId).into_iter().collect();
        let [first, rest] = Placement::on(nodes.without(NodeSet::of(NodeId(3))))
            .preferring(odd)
            .tiers(nodes);
        assert_eq!(first, NodeSet::of(NodeId(1)));
        assert_eq!(rest, [0, 2].map(NodeId).into_iter().collect());
    }

    #[test]
    fn this_thread_may_use_some_node() {
        assert!(!Placement::of_thread().unwrap().allowed().is_empty());
    }
}
