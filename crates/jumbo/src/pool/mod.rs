//! Provision: huge pages that grow on demand and shrink when idle.
//!
//! A [`Pool`] keeps pages of one size, with the words and the rules of the kernel's own hugetlb pools:
//!
//! - *persistent* pages stay, *surplus* pages come on demand, up to the *overcommit* limit, and go as soon
//!   as they are given back; *free* pages are not taken, *reserved* ones are those of the free pages that
//!   are promised;
//! - [`Pool::take`] gives a [`Page`], an owned handle that goes back when it is dropped; [`Pool::take_owned`] an [`OwnedPage`],
//!   which keeps the pool, for a program that has it in an `Arc`;
//! - [`Pool::reserve`] promises pages, all or none ([`Reservation`]);
//! - a [`Quota`] bounds what several users of a pool may have of it;
//! - [`Pool::resize`] changes how many pages are persistent;
//! - [`Pool::take_folio`] gives a part of a page, of any order ([`Folio`]); pages are split for that and merged again;
//! - [`Pool::region`] puts pages side by side ([`Region`]). Memory that processes share is [`shmem`](crate::shmem)'s.
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
//! The kernel's own pools are steered by `jumbo_host::host_pools`.
//!
//! Pages come from a [`Source`] (`source`). What there is on each node is in `inventory`, the way to the source in
//! `collect`; `frame` is the token that a page is in exactly one place, `folio` the parts of pages that are split, `window` the one leaf that touches memory. See `docs/design/pool.md`.
//!
//! Invariant, whenever no thread is inside: `reserved <= free <= total`, `surplus <= total` on each node and
//! altogether, and the counters equal the lists that they count. A take of a free page and a give allocate nothing; no
//! lock is held while the source is asked but the one that keeps two resizes apart; and a shortage is an
//! error at the call, never a SIGBUS.

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

use crate::kernel::lock;
use crate::units::{NodeId, PageSize, Pages};
use folio::{Buddies, Folios};
use frame::Frame;
use inventory::Inventory;

/// Pages of one size.
///
/// All methods take `&self` and may be called from any thread; not from a signal handler, which could
/// find its own thread inside.
#[derive(Debug)]
pub struct Pool {
    inventory: Mutex<Inventory>,
    /// Held by the one that resizes the pool.
    resizing: Mutex<()>,
    placement: Placement,
    source: Box<dyn Source>,
    /// What describes its pages, or why they have no smaller folios.
    folios: Result<Folios, Error>,
    buddies: Mutex<Buddies>,
}

/// A pool's counters, by the kernel's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Counters {
    /// Every page of the pool.
    pub total: Pages,
    /// Those that are not taken.
    pub free: Pages,
    /// Those of the free ones that are promised.
    pub reserved: Pages,
    /// Those that go when demand is gone.
    pub surplus: Pages,
    /// How many surplus pages there may be.
    pub overcommit: Pages,
}

impl Counters {
    /// Pages that stay when demand is gone.
    pub fn persistent(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.surplus.0))
    }

    /// Pages that are taken.
    pub fn used(&self) -> Pages {
        Pages(self.total.0.saturating_sub(self.free.0))
    }
}

impl Pool {
    /// An empty pool: no page, and none to be had until [`Pool::resize`] or [`Pool::set_overcommit`].
    ///
    /// `placement` is where its pages may be; [`Placement::of_thread`] is what the kernel would do.
    pub fn new(source: impl Source + 'static, placement: Placement) -> Self {
        let window = source.window();
        let folios = Folios::new(window.first_address(), window.length(), window.size());
        let mut pool = Self::without_folios(source, placement);
        pool.folios = folios;
        pool
    }

    /// The same, but that its pages are not described: it takes no addresses for their descriptors, and has no folios.
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

    /// The size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.source.window().size()
    }

    /// The nodes that it can have pages on.
    pub fn nodes(&self) -> NodeSet {
        self.source.window().nodes()
    }

    /// Where its pages may be unless a call says otherwise.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Sets how many surplus pages there may be. Those beyond a lowered limit stay until they are given back.
    pub fn set_overcommit(&self, pages: Pages) {
        lock(&self.inventory).overcommit.max = pages.0;
    }

    /// The counters of all nodes, as of one moment.
    pub fn counters(&self) -> Counters {
        lock(&self.inventory).counters(NodeSet::ALL)
    }

    /// The counters of one node. The overcommit limit is the pool's.
    pub fn node_counters(&self, node: NodeId) -> Counters {
        lock(&self.inventory).counters(NodeSet::of(node))
    }

    /// Has the source make a page, and describes it.
    fn populate(&self, frame: &Frame) -> Result<(), SourceError> {
        self.source.populate(frame)?;
        if let Ok(folios) = &self.folios {
            folios.prepare(self.source.window().offset(frame));
        }
        Ok(())
    }

    /// Gives a page back to the source.
    fn let_go(&self, frame: &Frame) {
        if let Ok(folios) = &self.folios {
            folios.release(self.source.window().offset(frame));
        }
        self.source.release(frame);
    }
}

impl Drop for Pool {
    /// Every page goes back to the source. None is out: a page borrows its pool, or keeps it.
    fn drop(&mut self) {
        let mut inventory = lock(&self.inventory);
        while let Some(frame) = inventory.pop_free(NodeSet::ALL) {
            self.let_go(&frame);
        }
    }
}
