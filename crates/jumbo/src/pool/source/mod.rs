//! Sources of a pool's pages: [`Source`], one implementation per file.
//!
//! A source maps memory for a frame and frees it; the pool has the lists and counters. [`Hugetlb`]
//! has the kernel's huge pages, [`Thp`] makes transparent ones without privilege, [`Model`]
//! simulates any number of nodes and fails on demand.

mod hugetlb;
mod model;
mod thp;

pub use hugetlb::Hugetlb;
pub use model::{Model, Supply};
pub use thp::Thp;

use std::fmt::Debug;

use rustix::io::Errno;

use super::error::SourceError;
use super::frame::Frame;
use super::window::{OwnedRange, Window};
use crate::units::NodeId;

/// A source of pages. All implementations are in this module, because a pool lends references to
/// their memory.
pub trait Source: Debug + Send + Sync + sealed::Sealed {
    /// Returns the addresses of its pages.
    fn window(&self) -> &Window;

    /// Maps a zeroed huge page of the frame's node at its address. A shortage is an error, never a
    /// kill.
    ///
    /// # Errors
    /// [`SourceError`]; the address is empty then.
    fn populate(&self, frame: &Frame) -> Result<(), SourceError>;

    /// Releases the page of a frame.
    fn release(&self, frame: &Frame);

    /// Reports whether the pages belong to this process: false in a child of fork(2) of some
    /// sources.
    fn is_here(&self) -> bool {
        true
    }

    /// Moves a page to `offset` of a private region.
    #[doc(hidden)]
    fn place(&self, frame: &Frame, region: &OwnedRange, offset: usize) -> Result<(), SourceError> {
        let moved = self.window().relocate(frame, region, offset, true);
        moved.map_err(failed(
            frame.node(),
            "mremap",
            |_| "the page cannot be moved",
        ))
    }

    /// Moves a page back from a region. On an error the page is lost, and its address is empty.
    #[doc(hidden)]
    fn unplace(
        &self,
        frame: &Frame,
        region: &OwnedRange,
        offset: usize,
    ) -> Result<(), SourceError> {
        let moved = self.window().relocate(frame, region, offset, false);
        moved
            .map_err(failed(
                frame.node(),
                "mremap",
                |_| "the page cannot be moved back",
            ))
            .inspect_err(|_| self.release(frame))
    }
}

/// Returns a function that makes an error of an errno of `operation`.
fn failed(
    node: NodeId,
    operation: &'static str,
    why: fn(Errno) -> &'static str,
) -> impl FnOnce(Errno) -> SourceError {
    move |errno| SourceError {
        node,
        operation,
        errno,
        why: why(errno),
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Hugetlb {}
    impl Sealed for super::Thp {}
    impl Sealed for super::Model {}
}
