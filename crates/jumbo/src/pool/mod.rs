//! A pool of huge pages that grows on demand and shrinks when idle: [`Pool`].
//!
//! It keeps pages of one size, with the terms and the rules of the kernel's own hugetlb pools:
//!
//! - *persistent* pages stay; *surplus* pages are made on demand, up to the *overcommit* limit, and
//!   are released when they are returned; *free* pages are not taken; *reserved* ones are the
//!   promised part of the free pages;
//! - [`Pool::take`] returns a [`Page`], an owned handle, which drop returns to the pool;
//!   [`Pool::take_owned`] an [`OwnedPage`], which keeps the pool alive, for a pool in an `Arc`;
//! - [`Pool::reserve`] promises pages, all or none ([`Reservation`]);
//! - a [`Quota`] limits the share of each user of a pool;
//! - [`Pool::resize`] sets the number of persistent pages;
//! - [`Pool::take_folio`] returns a part of a page, of any order ([`Folio`]): pages are split for
//!   it, and merged again;
//! - [`Pool::region`] maps pages side by side ([`Region`]). [`shmem`](crate::shmem) has memory that
//!   processes share.
//!
//! ```
//! use jumbo::pool::{Placement, Pool, Thp};
//! use jumbo::units::Pages;
//!
//! let pool = Pool::new(Thp::new()?, Placement::of_thread()?);
//! pool.resize(Pages(8));
//! pool.set_overcommit(Pages(4));
//!
//! let mut page = pool.take()?;
//! page.bytes_mut()[0] = 1;
//! let mut promised = pool.reserve(Pages(11))?;
//! assert!(pool.take().is_err());
//! assert!(promised.take().is_some());
//! drop((page, promised));
//! assert_eq!(pool.counters().total, Pages(8));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `jumbo_host::host_pools` resizes the kernel's own pools.
//!
//! Pages come from a [`Source`] (`source`). `inventory` has the pages of each node, `collect` the
//! calls of the source; a `frame` is the token of a page, `folio` has the parts of split pages,
//! `window` is the leaf that accesses memory. See `docs/design/pool.md`.
//!
//! Invariant, whenever no thread is inside: `reserved <= free <= total`, `surplus <= total` on each
//! node and in all, and the counters equal the lists. Taking a free page and returning one allocate
//! nothing. No lock is held during calls of the source, except the one that serializes resizes. A
//! shortage is an error of a call, never a SIGBUS.

mod collect;
mod error;
mod folio;
mod frame;
mod inventory;
mod nodes;
mod page;
mod region;
mod reservation;
mod resize;
mod source;
mod window;

pub use jumbo_inside::pool::Quota;

pub use error::{Error, Exhausted, SetupError, SourceError};
pub use folio::{Folio, Split};
pub use nodes::{NodeSet, Placement};
pub use page::{OwnedPage, Page, Taken};
pub use region::{Populate, Region};
pub use reservation::Reservation;
pub use resize::Resized;
pub use source::{Hugetlb, Source, Thp};
#[doc(hidden)]
pub use source::{Model, Supply};

use std::sync::Mutex;

use crate::mutex::lock;
use crate::units::{NodeId, PageSize, Pages};
use folio::{Buddies, Folios};
use frame::Frame;
use inventory::Inventory;

/// Pages of one size.
///
/// All methods may be called from any thread, but not from a signal handler, which could interrupt
/// its own thread inside.
#[derive(Debug)]
pub struct Pool {
    inventory: Mutex<Inventory>,
    /// Serializes resizes.
    resizing: Mutex<()>,
    placement: Placement,
    source: Box<dyn Source>,
    /// Descriptors of its pages, or the reason why they have no smaller folios.
    folios: Result<Folios, Error>,
    buddies: Mutex<Buddies>,
}

/// Counters of a pool, by the kernel's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Counters {
    /// All pages of the pool.
    pub total: Pages,
    /// Pages that are not taken.
    pub free: Pages,
    /// Free pages that are promised.
    pub reserved: Pages,
    /// Pages that are released when idle.
    pub surplus: Pages,
    /// Maximum number of surplus pages.
    pub overcommit: Pages,
}

impl Counters {
    /// Returns the number of pages that stay when idle.
    pub fn persistent(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.surplus.0))
    }

    /// Returns the number of pages that are taken.
    pub fn used(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.free.0))
    }
}

impl Pool {
    /// Creates an empty pool, without pages until [`Pool::resize`] or [`Pool::set_overcommit`].
    ///
    /// `placement` has the allowed nodes; [`Placement::of_thread`] is the kernel's choice.
    pub fn new(source: impl Source + 'static, placement: Placement) -> Self {
        let window = source.window();
        let folios = Folios::new(window.mapping().address, window.length(), window.size());
        let mut pool = Self::without_folios(source, placement);
        pool.folios = folios;
        pool
    }

    /// Creates a pool without descriptors of its pages, and so without folios.
    pub fn without_folios(source: impl Source + 'static, placement: Placement) -> Self {
        let window = source.window();
        let capacity = u32::try_from(window.capacity().0).unwrap_or(frame::MAX_FRAMES);
        Self {
            inventory: Mutex::new(Inventory::new(window.nodes(), capacity)),
            resizing: Mutex::new(()),
            placement,
            folios: Err(Error::WithoutFolios),
            buddies: Mutex::default(),
            source: Box::new(source),
        }
    }

    /// Returns the page size.
    pub fn page_size(&self) -> PageSize {
        self.source.window().size()
    }

    /// Returns the nodes with addresses for pages.
    pub fn nodes(&self) -> NodeSet {
        self.source.window().nodes()
    }

    /// Returns the number of pages of all nodes for which it has addresses.
    pub fn capacity(&self) -> Pages {
        let window = self.source.window();
        Pages(window.capacity().0 * u64::from(window.nodes().len()))
    }

    /// Returns the default placement.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Sets the maximum number of surplus pages. Pages beyond a lowered limit stay until returned.
    pub fn set_overcommit(&self, pages: Pages) {
        lock(&self.inventory).overcommit.max = pages.0;
    }

    /// Returns a snapshot of the counters of all nodes.
    pub fn counters(&self) -> Counters {
        lock(&self.inventory).counters(NodeSet::ALL)
    }

    /// Returns the counters of one node, with the overcommit limit of the pool.
    pub fn node_counters(&self, node: NodeId) -> Counters {
        lock(&self.inventory).counters(NodeSet::of(node))
    }

    /// Makes a page in the source, and describes it.
    fn populate(&self, frame: &Frame) -> Result<(), SourceError> {
        self.source.populate(frame)?;
        if let Ok(folios) = &self.folios {
            folios.prepare(self.source.window().offset(frame));
        }
        Ok(())
    }

    /// Returns a page to the source.
    fn let_go(&self, frame: &Frame) {
        if let Ok(folios) = &self.folios {
            folios.release(self.source.window().offset(frame));
        }
        self.source.release(frame);
    }
}

impl Drop for Pool {
    /// Returns all pages to the source. None is taken: a page borrows its pool, or keeps it alive.
    fn drop(&mut self) {
        let mut inventory = lock(&self.inventory);
        while let Some(frame) = inventory.pop_free(NodeSet::ALL) {
            self.let_go(&frame);
        }
    }
}
