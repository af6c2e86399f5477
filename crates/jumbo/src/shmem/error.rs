//! Why something could not be done with a region: [`Error`].

use std::ops::Range;

use rustix::io::Errno;

use super::ladder::no_pages;
use crate::kernel::FileError;
use crate::units::{Bytes, PageSize};

/// Why something could not be done with a region. It is as it was; but for [`Error::Call`] of [`Region::shrink`](super::Region::shrink) and
/// [`Region::punch`](super::Region::punch), after which a part of the range may be zeroes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation} of {bytes} of shared memory: {errno}")]
    Call {
        /// Which.
        operation: &'static str,
        /// On how much.
        bytes: Bytes,
        /// The kernel's answer.
        errno: Errno,
    },
    /// Pages of the kernel's pool are not to be had for all of it.
    #[error("no {size} pages of the kernel's pool for {bytes}: {}; hint: `jumbo pool set {size} --overcommit SIZE`", no_pages(*errno))]
    NoPages {
        /// Their size.
        size: PageSize,
        /// For how much they were wanted.
        bytes: Bytes,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The range is not in the region.
    #[error("bytes {} to {} of a region of {size}", range.start, range.end)]
    Beyond {
        /// The range.
        range: Range<usize>,
        /// The size of the region.
        size: Bytes,
    },
    /// More than the region has addresses for.
    #[error("{to} in a region with addresses for {capacity}; hint: `Builder::capacity`")]
    Capacity {
        /// What was asked for.
        to: Bytes,
        /// For how much there are addresses.
        capacity: Bytes,
    },
    /// A region of no bytes.
    #[error("a region has a byte at least")]
    Empty,
    /// The region was sealed: it keeps its size.
    #[error("the region is sealed, and keeps its size")]
    Sealed,
    /// What the host has cannot be read.
    #[error(transparent)]
    Host(#[from] FileError),
}

pub(super) fn call(operation: &'static str, bytes: u64) -> impl Fn(Errno) -> Error {
    move |errno| Error::Call {
        operation,
        bytes: Bytes(bytes),
        errno,
    }
}
