//! The token of a page: [`Frame`].
//!
//! A frame is a number that is neither copied nor cloned, so it has exactly one holder.

use crate::units::NodeId;

/// Bits of a page's number on its node.
const INDEX_BITS: u32 = 26;
/// The token of no page: the last index of the last node, which [`MAX_FRAMES`] excludes.
const NONE: u32 = u32::MAX;
/// Maximum number of pages on a node: 128 TiB of 2 MiB pages, less one.
pub(super) const MAX_FRAMES: u32 = (1 << INDEX_BITS) - 1;

/// A page of a pool, as its node and its number there. The holder owns the page.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame(u32);

impl Frame {
    /// Creates the token of a page; the caller ensures that it is the first.
    pub(super) fn new(node: NodeId, index: u32) -> Self {
        debug_assert!(index < MAX_FRAMES);
        Self(node.0 << INDEX_BITS | index)
    }

    /// Moves the token out of a value that is being dropped.
    pub(super) fn leave(&mut self) -> Self {
        std::mem::replace(self, Self(NONE))
    }

    /// Returns its node.
    pub fn node(&self) -> NodeId {
        NodeId(self.0 >> INDEX_BITS)
    }

    /// Returns its number on the node.
    pub fn index(&self) -> u32 {
        self.0 & MAX_FRAMES
    }
}
