//! Where pages may lie: [`NodeSet`] and [`Placement`].

use crate::kernel::sys::{self, PolicyMode};
use crate::units::NodeId;

/// A set of nodes, of the first [`NodeSet::CAPACITY`] of the host.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet(u64);

impl NodeSet {
    /// Nodes from this number on cannot be told apart here. The largest hosts sold have 32.
    pub const CAPACITY: u32 = u64::BITS;
    /// No node.
    pub const NONE: Self = Self(0);
    /// Every node there could be.
    pub const ALL: Self = Self(u64::MAX);

    /// That node alone; nothing where its number is beyond the capacity.
    pub const fn of(node: NodeId) -> Self {
        if node.0 < Self::CAPACITY {
            Self(1 << node.0)
        } else {
            Self::NONE
        }
    }

    /// Whether `node` belongs to it.
    pub const fn contains(self, node: NodeId) -> bool {
        Self::of(node).0 & self.0 != 0
    }

    /// The nodes in both.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The nodes in either.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The nodes that are not in `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True where no node belongs to it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many nodes belong to it.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// How many nodes of it come before `node`.
    pub(super) const fn rank(self, node: NodeId) -> u32 {
        (self.0 & (Self::of(node).0.wrapping_sub(1))).count_ones()
    }

    /// As the words of the kernel's nodemask.
    pub(super) const fn mask(self) -> u64 {
        self.0
    }

    /// Its nodes, by ascending number.
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

/// Which of the allowed nodes comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preferred {
    /// The one that the calling thread runs on.
    Local,
    /// These, the fullest first, so that pages spread over them.
    Nodes(NodeSet),
}

/// On which nodes a page may be, and which of them are tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    allowed: NodeSet,
    preferred: Preferred,
}

impl Placement {
    /// Any node, the local one first.
    pub const ANYWHERE: Self = Self::on(NodeSet::ALL);

    /// These nodes and no others, the local one first.
    pub const fn on(allowed: NodeSet) -> Self {
        Self {
            allowed,
            preferred: Preferred::Local,
        }
    }

    /// The same nodes, with those of `preferred` first.
    #[must_use]
    pub const fn preferring(self, preferred: NodeSet) -> Self {
        Self {
            allowed: self.allowed,
            preferred: Preferred::Nodes(preferred),
        }
    }

    /// What the calling thread's cpuset and memory policy allow now. As in the kernel only
    /// MPOL_BIND keeps pages from other nodes of the cpuset; the other policies say what is tried first.
    ///
    /// # Errors
    /// The errno of get_mempolicy(2); a kernel without NUMA answers ENOSYS, which means anywhere.
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

    /// The nodes that are allowed.
    pub const fn allowed(self) -> NodeSet {
        self.allowed
    }

    /// Of `nodes`, those that are allowed: the ones to try first, and the rest.
    pub(super) fn tiers(self, nodes: NodeSet) -> [NodeSet; 2] {
        let allowed = self.allowed.and(nodes);
        // One node: nothing to choose, so nothing to ask the kernel.
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
    fn tiers_part_what_is_allowed() {
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
