//! Why a pool could not do as asked: [`Error`], [`SourceError`].

use rustix::io::Errno;

use crate::units::{Bytes, NodeId, Order, Pages};
use crate::vmemmap;

/// Why a page, a reservation or a region could not be had. Nothing changed hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No free page, and no surplus page may be made any more.
    #[error("pool exhausted: {0}")]
    Exhausted(Exhausted),
    /// A page could be made by the pool's rules, but the source had none.
    #[error("the pool's source has no page: {0}")]
    Source(#[from] SourceError),
    /// The placement allows none of the pool's nodes.
    #[error("the cpuset and memory policy allow none of the pool's nodes")]
    Placement,
    /// The address window of the pool is full.
    #[error("the pool's address window is full: {capacity} pages on each node")]
    Window {
        /// The pages for which each node has addresses.
        capacity: Pages,
    },
    /// Pages of the pool have no folios of that order.
    #[error("the pool's pages have no folios of order {}", order.0)]
    Order {
        /// The order asked for.
        order: Order,
    },
    /// The pool has whole pages only: [`Pool::without_folios`](super::Pool::without_folios) made it.
    #[error("the pool was made without folios")]
    WithoutFolios,
    /// The pool has whole pages only: there is no table to describe their parts in.
    #[error("the pool has no folios: {0}")]
    Undescribed(vmemmap::Error),
    /// A page that was to be split stays whole.
    #[error("a page cannot be split: {0}")]
    Split(#[from] vmemmap::Error),
    /// This process is a fork of the one that made the pool, and the pages are still that one's.
    #[error("the pool belongs to the process that this one was forked from")]
    Forked,
}

/// The counters of an exhausted pool, as they were when it said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exhausted {
    /// What was asked for.
    pub wanted: Pages,
    /// Pages that stay when demand is gone.
    pub persistent: Pages,
    /// How many surplus pages there may be.
    pub overcommit: Pages,
    /// Surplus pages there are, or that other threads are just making.
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

/// Why a source had no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node {node}: {operation}: {errno}: {why}")]
#[non_exhaustive]
pub struct SourceError {
    /// Where a page was wanted.
    pub node: NodeId,
    /// What the source tried: `MADV_POPULATE_WRITE`, `MADV_COLLAPSE`, `memory cgroup`.
    pub operation: &'static str,
    /// What the kernel answered.
    pub errno: Errno,
    /// What that means there.
    pub why: &'static str,
}

/// Why a source could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// A system call failed.
    #[error("{operation}: {errno}")]
    Call {
        /// Which one, and on what.
        operation: &'static str,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A kernel file could not be used.
    #[error(transparent)]
    File(#[from] crate::kernel::FileError),
    /// Addresses for that much memory cannot be had.
    #[error("no address window of {0}")]
    Window(Bytes),
    /// The size is none that this source has.
    #[error("{0}")]
    Size(String),
}

impl SetupError {
    pub(super) fn call(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Call { operation, errno }
    }
}
