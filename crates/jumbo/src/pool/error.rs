//! Errors of a pool: [`Error`], [`SourceError`], [`SetupError`].

use rustix::io::Errno;

use crate::units::{Bytes, NodeId, Order, Pages};
use crate::vmemmap;

/// Error for a page, a reservation or a region. The pool is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No free page, and the overcommit limit is reached.
    #[error("pool exhausted: {0}")]
    Exhausted(Exhausted),
    /// The source had no page.
    #[error("the pool's source has no page: {0}")]
    Source(#[from] SourceError),
    /// The placement allows none of the pool's nodes.
    #[error("the cpuset and memory policy allow none of the pool's nodes")]
    Placement,
    /// The address window of the pool is full.
    #[error("the pool's address window is full: {capacity} pages on each node")]
    Window {
        /// Maximum number of pages on each node.
        capacity: Pages,
    },
    /// The order is not less than that of a page.
    #[error("the pool's pages have no folios of order {}", order.0)]
    Order {
        /// The requested order.
        order: Order,
    },
    /// [`Pool::without_folios`](super::Pool::without_folios) made the pool.
    #[error("the pool was made without folios")]
    WithoutFolios,
    /// The pool has no table to describe parts of pages.
    #[error("the pool has no folios: {0}")]
    Undescribed(vmemmap::Error),
    /// A page could not be split, and stays whole.
    #[error("a page cannot be split: {0}")]
    Split(#[from] vmemmap::Error),
    /// The pages belong to the parent of this forked process.
    #[error("the pool belongs to the process that this one was forked from")]
    Forked,
}

/// Counters of an exhausted pool at the time of the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exhausted {
    /// Requested pages.
    pub wanted: Pages,
    /// Pages that stay when idle.
    pub persistent: Pages,
    /// Maximum number of surplus pages.
    pub overcommit: Pages,
    /// Surplus pages, including those that other threads are making.
    pub surplus: Pages,
    /// Pages taken.
    pub used: Pages,
    /// Pages promised.
    pub reserved: Pages,
    /// Free pages on nodes that the placement does not allow.
    pub elsewhere: Pages,
}

impl std::fmt::Display for Exhausted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            wanted,
            persistent,
            overcommit,
            used,
            reserved,
            ..
        } = self;
        write!(
            f,
            "{persistent} pages, overcommit {overcommit}: {used} taken"
        )?;
        if reserved.0 > 0 {
            write!(f, ", {reserved} reserved")?;
        }
        if self.elsewhere.0 > 0 {
            write!(f, ", {} free on nodes not allowed", self.elsewhere)?;
        }
        write!(f, "; {wanted} wanted")
    }
}

/// Error of a source without a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node}: {operation}: {errno}: {why}")]
#[non_exhaustive]
pub struct SourceError {
    /// Node of the requested page.
    pub node: NodeId,
    /// Failed operation: `MADV_POPULATE_WRITE`, `MADV_COLLAPSE`, `memory cgroup`.
    pub operation: &'static str,
    /// The errno.
    pub errno: Errno,
    /// Meaning of the errno.
    pub why: &'static str,
}

/// Error of a source's setup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// A system call failed.
    #[error("{operation}: {errno}")]
    Call {
        /// The call and its object.
        operation: &'static str,
        /// The errno.
        errno: Errno,
    },
    /// A kernel file could not be used.
    #[error(transparent)]
    File(#[from] jumbo_sys::files::FileError),
    /// No addresses for that much memory.
    #[error("no address window of {0}")]
    Window(Bytes),
    /// The source does not have this size.
    #[error("{0}")]
    Size(String),
}

impl SetupError {
    pub(super) fn call(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Call { operation, errno }
    }
}
