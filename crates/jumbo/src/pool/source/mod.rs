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

use super::error::SourceError;
use super::frame::Frame;
use super::window::{OwnedRange, Window};

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

    /// Makes the page appear in a private region.
    #[doc(hidden)]
    fn place(&self, frame: &Frame, slot: &Slot<'_>) -> Result<(), SourceError>;

    /// Takes the page back out of it. On an error the page is lost, and its place is empty.
    #[doc(hidden)]
    fn unplace(&self, frame: &Frame, slot: &Slot<'_>) -> Result<(), SourceError>;
}

/// The place of a page in a region.
#[doc(hidden)]
#[derive(Debug)]
pub struct Slot<'a> {
    pub(super) mapping: &'a OwnedRange,
    pub(super) offset: usize,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Hugetlb {}
    impl Sealed for super::Thp {}
    impl Sealed for super::Model {}
}
