//! [`Error`]: why a table could not do as asked.

use rustix::io::Errno;

use crate::units::{Bytes, Order, PageSize};

/// Why a table could not do as asked. The compound page is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The table cannot have such pages.
    #[error("no table of base pages of {base} and huge pages of {huge}")]
    Geometry {
        /// The base page asked for.
        base: PageSize,
        /// The huge page asked for.
        huge: PageSize,
    },
    /// A table of that range cannot be mapped.
    #[error("cannot map a table of {bytes}: {operation}: {errno}")]
    Setup {
        /// The addresses that it takes.
        bytes: Bytes,
        /// What failed.
        operation: &'static str,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The address, or a part of the page there, is not in the range of the table.
    #[error("{address:#x}: not in the range of the table")]
    Outside {
        /// The address.
        address: u64,
    },
    /// A compound page of that order cannot be there.
    #[error("{address:#x}: no compound page of order {} can begin there", order.0)]
    Order {
        /// The address.
        address: u64,
        /// The order asked for.
        order: Order,
    },
    /// There is no compound page, or not at all of the addresses.
    #[error("{address:#x}: no page is prepared there")]
    Absent {
        /// The first address without one.
        address: u64,
    },
    /// A page is prepared there already.
    #[error("{address:#x}: a page is prepared there already")]
    Taken {
        /// The first address of one.
        address: u64,
    },
    /// The page is a tail of another.
    #[error("{address:#x}: a tail of the compound page at {head:#x}")]
    Tail {
        /// The address.
        address: u64,
        /// Its head's.
        head: u64,
    },
    /// The page has users, or a `get` is looking whether it is still there.
    #[error("{address:#x}: the page is in use: {references} references, {pins} of them pins")]
    Busy {
        /// Its address.
        address: u64,
        /// References beside the owner's.
        references: u64,
        /// Those of them that are pins.
        pins: u64,
    },
    /// The page has as many references as can be counted.
    #[error("{address:#x}: the page has too many references")]
    Overflow {
        /// Its address.
        address: u64,
    },
    /// There is no memory for the descriptors.
    #[error(
        "no memory for {bytes} of descriptors: {operation}: {errno}: the memory cgroup or the host is at its limit"
    )]
    Memory {
        /// What they fill.
        bytes: Bytes,
        /// What was tried.
        operation: &'static str,
        /// The answer.
        errno: Errno,
    },
}
