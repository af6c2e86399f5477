//! Where a pool's pages come from: [`Source`], one implementation a file.
//!
//! A source puts memory at a frame's place and takes it away again; it keeps no lists and counts nothing,
//! which is the pool's part. [`Hugetlb`] has the kernel's huge pages, [`Thp`] makes transparent ones without any
//! privilege, [`Model`] plays any number of nodes and fails on demand.

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

/// What makes pages. The implementations are in this module: a pool hands out references to the memory
/// that they promise.
pub trait Source: Debug + Send + Sync + sealed::Sealed {
    /// The places of its pages.
    fn window(&self) -> &Window;

    /// Puts a zeroed huge page of the frame's node at the frame's place. Never kills: a shortage is an error.
    ///
    /// # Errors
    /// [`SourceError`]; the place is empty then.
    fn populate(&self, frame: &Frame) -> Result<(), SourceError>;

    /// Gives the page at the frame's place back.
    fn release(&self, frame: &Frame);

    /// False in a child of fork(2) where the pages are still the parent's.
    fn is_here(&self) -> bool {
        true
    }

    /// Makes the page appear at `offset` of a private region: moves it there.
    #[doc(hidden)]
    fn place(&self, frame: &Frame, region: &OwnedRange, offset: usize) -> Result<(), SourceError> {
        let moved = self.window().relocate(frame, region, offset, true);
        moved.map_err(failed(
            frame.node(),
            "mremap",
            |_| "the page cannot be moved",
        ))
    }

    /// Takes the page back out of it. On an error the page is lost, and its place is empty.
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

/// The error that an errno of the `operation` is, with its meaning there.
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
