//! Errors of a table: [`Error`].

use rustix::io::Errno;

use crate::units::{Bytes, Order, PageSize};

/// Error of a table. The compound page is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No table is possible for these page sizes.
    #[error("no table of base pages of {base} and huge pages of {huge}")]
    Geometry {
        /// Requested base page size.
        base: PageSize,
        /// Requested huge page size.
        huge: PageSize,
    },
    /// The table cannot be mapped.
    #[error("cannot map a table of {bytes}: {operation}: {errno}")]
    Setup {
        /// Length of the mapping.
        bytes: Bytes,
        /// The failed system call.
        operation: &'static str,
        /// The errno.
        errno: Errno,
    },
    /// The address or a part of the page is outside the table's range.
    #[error("{address:#x}: not in the range of the table")]
    Outside {
        /// The address.
        address: u64,
    },
    /// No compound page of that order is possible there.
    #[error("{address:#x}: no compound page of order {} can begin there", order.0)]
    Order {
        /// The address.
        address: u64,
        /// Requested order.
        order: Order,
    },
    /// A part of the addresses has no compound page.
    #[error("{address:#x}: no page is prepared there")]
    Absent {
        /// First address without a page.
        address: u64,
    },
    /// A page is prepared there already.
    #[error("{address:#x}: a page is prepared there already")]
    Taken {
        /// First address with a page.
        address: u64,
    },
    /// The page is a tail.
    #[error("{address:#x}: a tail of the compound page at {head:#x}")]
    Tail {
        /// The address.
        address: u64,
        /// Address of its head.
        head: u64,
    },
    /// The page has users, or a concurrent `get`.
    #[error("{address:#x}: the page is in use: {references} references, {pins} of them pins")]
    Busy {
        /// Address of the page.
        address: u64,
        /// References except the owner's.
        references: u64,
        /// References that are pins.
        pins: u64,
    },
    /// The counter of references is full.
    #[error("{address:#x}: the page has too many references")]
    Overflow {
        /// Address of the page.
        address: u64,
    },
    /// No memory for the descriptors.
    #[error(
        "no memory for {bytes} of descriptors: {operation}: {errno}: the memory cgroup or the host is at its limit"
    )]
    Memory {
        /// Length of the descriptors.
        bytes: Bytes,
        /// The failed operation.
        operation: &'static str,
        /// The errno.
        errno: Errno,
    },
}
