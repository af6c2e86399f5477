//! Errors of a region: [`Error`].

use std::ops::Range;

use rustix::io::Errno;

use super::ladder::no_pages;
use crate::units::{Bytes, PageSize};
use jumbo_sys::files::FileError;

/// Error of a region, which is unchanged, except after [`Error::Call`] of
/// [`Region::shrink`](super::Region::shrink) or [`Region::punch`](super::Region::punch): a part of
/// the range may be zeroes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{operation} of {bytes} of shared memory: {errno}")]
    Call {
        /// The system call.
        operation: &'static str,
        /// Length of the range.
        bytes: Bytes,
        /// The errno.
        errno: Errno,
    },
    /// The kernel's pool has too few pages.
    #[error("no {size} pages of the kernel's pool for {bytes}: {}; hint: `jumbo pool set {size} --overcommit SIZE`", no_pages(*errno))]
    NoPages {
        /// The page size.
        size: PageSize,
        /// The requested bytes.
        bytes: Bytes,
        /// The errno.
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
    /// The size exceeds the addresses of the region.
    #[error("{to} in a region with addresses for {capacity}; hint: `Builder::capacity`")]
    Capacity {
        /// The requested size.
        to: Bytes,
        /// The maximum size.
        capacity: Bytes,
    },
    /// The size is 0.
    #[error("a region has a byte at least")]
    Empty,
    /// The region is sealed.
    #[error("the region is sealed, and keeps its size")]
    Sealed,
    /// A kernel file cannot be read.
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
