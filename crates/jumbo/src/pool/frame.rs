//! A page that is in exactly one place: [`Frame`], and the places that hold many: [`List`].
//!
//! A frame is a number, and the number is a token: it is neither copied nor cloned, so the holder of
//! it is the only one. A list threads its frames through a table ([`Links`]) that is mapped once,
//! so that moving pages about allocates nothing.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::units::NodeId;

/// The number of a page within its node.
const INDEX_BITS: u32 = 26;
/// No page: the last index of the last node, which [`MAX_FRAMES`] leaves out.
const NONE: u32 = u32::MAX;
/// How many pages there can be on a node: 128 TiB of 2 MiB pages, less one.
pub(super) const MAX_FRAMES: u32 = (1 << INDEX_BITS) - 1;

/// A page of a pool: its node and its number there. The holder owns the page.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame(u32);

impl Frame {
    /// A page that was never held before; the caller sees to that.
    pub(super) fn new(node: NodeId, index: u32) -> Self {
        debug_assert!(index < MAX_FRAMES);
        Self(node.0 << INDEX_BITS | index)
    }

    /// The page, out of a value that ends and uses it no more.
    pub(super) fn leave(&mut self) -> Self {
        std::mem::replace(self, Self(NONE))
    }

    /// The node it belongs to.
    pub fn node(&self) -> NodeId {
        NodeId(self.0 >> INDEX_BITS)
    }

    /// Its number on its node.
    pub fn index(&self) -> u32 {
        self.0 & MAX_FRAMES
    }
}

/// Where the frame behind each frame is noted.
///
/// An entry is written when its frame goes onto a list and read when it leaves it, under whatever
/// guards that list; the atomics only spare the compiler from having to believe it.
#[derive(Debug)]
pub(super) struct Links {
    /// An entry for each frame of each node, node after node.
    pub(super) table: &'static [AtomicU32],
    /// How many entries a node has.
    pub(super) per_node: u32,
    /// Which nodes have entries.
    pub(super) nodes: super::NodeSet,
}

impl Links {
    fn entry(&self, frame: u32) -> Option<&AtomicU32> {
        let (node, index) = (NodeId(frame >> INDEX_BITS), frame & MAX_FRAMES);
        let row = self.nodes.rank(node) as usize * self.per_node as usize;
        self.table.get(row + index as usize)
    }
}

/// Some pages, last in first out.
#[derive(Debug)]
pub(super) struct List {
    head: u32,
    length: u64,
}

impl List {
    pub(super) const fn new() -> Self {
        Self {
            head: NONE,
            length: 0,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.length
    }

    pub(super) fn push(&mut self, links: &Links, frame: Frame) {
        if let Some(entry) = links.entry(frame.0) {
            entry.store(self.head, Ordering::Relaxed);
            self.head = frame.0;
            self.length += 1;
        }
    }

    pub(super) fn pop(&mut self, links: &Links) -> Option<Frame> {
        if self.head == NONE {
            return None;
        }
        let entry = links.entry(self.head)?;
        let frame = Frame(self.head);
        self.head = entry.load(Ordering::Relaxed);
        self.length -= 1;
        Some(frame)
    }

    /// Moves up to `count` frames to the top of `other`.
    pub(super) fn move_to(&mut self, other: &mut Self, count: u64, links: &Links) {
        for _ in 0..count {
            match self.pop(links) {
                Some(frame) => other.push(links, frame),
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::NodeSet;

    #[test]
    fn a_list_keeps_frames_of_several_nodes() {
        let nodes: NodeSet = [1, 3].map(NodeId).into_iter().collect();
        let table: Vec<AtomicU32> = (0..20).map(|_| AtomicU32::new(0)).collect();
        let links = Links {
            table: Box::leak(table.into_boxed_slice()),
            per_node: 10,
            nodes,
        };
        let mut list = List::new();
        for index in 0..10 {
            list.push(&links, Frame::new(NodeId(1), index));
            list.push(&links, Frame::new(NodeId(3), index));
        }
        assert_eq!(list.len(), 20);
        let mut other = List::new();
        list.move_to(&mut other, 16, &links);
        assert_eq!((list.len(), other.len()), (4, 16));
        let left: Vec<_> = std::iter::from_fn(|| list.pop(&links))
            .map(|frame| (frame.node().0, frame.index()))
            .collect();
        assert_eq!(left, [(3, 1), (1, 1), (3, 0), (1, 0)].as_slice());
        assert!(list.pop(&links).is_none() && list.len() == 0);
    }
}
