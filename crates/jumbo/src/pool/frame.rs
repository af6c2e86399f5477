//! A page that is in exactly one place: [`Frame`].
//!
//! A frame is a number, and the number is a token: it is neither copied nor cloned, so the holder of
//! it is the only one.

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
