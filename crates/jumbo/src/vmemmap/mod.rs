//! Page descriptors that cost nothing for huge pages: [`Vmemmap`].
//!
//! Like the kernel's vmemmap, it has 64 bytes for each base page: order, counts of references and
//! pins, and an owner word. For 4 KiB base pages that is 16 GiB per TiB, and all descriptors of a
//! huge page but one hold only its head. So a huge page keeps none of them:
//!
//! ```text
//!   described                                      optimised
//!   section table   descriptors of 2 MiB           section table               descriptors
//!   ┌───────────┐   ┌──────┬──────┬─ ─┬──────┐     ┌────────────────────────┐  ┌ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
//!   │ described │   │ head │ tail │   │ tail │     │ order 9, counts, owner │    no memory, reads as 0
//!   └───────────┘   └──────┴──────┴─ ─┴──────┘     └────────────────────────┘  └ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘
//!     32 bytes          8 base pages                     32 bytes                   0 base pages
//! ```
//!
//! - [`Vmemmap::prepare`] makes a compound page of any order up to 1 GiB, optimised if its
//!   descriptors fill whole base pages ([`Saving`] has the saved memory, or the reason);
//!   [`Vmemmap::release`] ends it.
//! - [`Vmemmap::restore`] allocates the descriptors' memory, [`Vmemmap::optimise`] frees it;
//!   [`Vmemmap::split`] and [`Vmemmap::merge`] do so as the new order requires. A split into huge
//!   pages needs no memory.
//! - [`Vmemmap::head_of`] and [`Vmemmap::order_of`] return the head and order of any page, without
//!   a lock and without reading a tail; [`Vmemmap::get`] and [`Vmemmap::pin`] hold compound pages.
//!
//! ```
//! #![forbid(unsafe_code)]
//! use jumbo::units::{Order, Pages};
//! use jumbo::vmemmap::{Geometry, Vmemmap};
//!
//! // A TiB from 4 TiB on. The table takes addresses, and memory only for what is prepared.
//! let start = 4 << 40;
//! let vmemmap = Vmemmap::new(start..start + (1 << 40), Geometry::of_host()?)?;
//! let huge = Geometry::of_host()?.section();
//! let saved = vmemmap.prepare(start, huge)?;
//! assert_eq!((saved.pages, saved.of), (Pages(8), Pages(8)));
//!
//! let tail = start + 12345;
//! let page = vmemmap.get(tail)?;
//! page.set_owner(7);
//! assert_eq!(page.compound().head, start);
//! assert!(vmemmap.split(start, Order(0)).is_err(), "it is in use");
//! drop(page);
//! vmemmap.split(start, Order(0))?;
//! assert_eq!(vmemmap.order_of(tail), Some(Order(0)));
//! vmemmap.merge(start, huge)?;
//! vmemmap.release(start)?;
//! # Ok::<(), jumbo::vmemmap::Error>(())
//! ```
//!
//! `geometry` has the arithmetic, `words` the words, `table` the readers and the argument for them,
//! `change` the writers; `memory` is the leaf that maps.
//!
//! Invariant: no thread writes to a descriptor without memory, or reads one except as zeroes; a
//! failure leaves the page unchanged.

mod change;
mod error;
mod geometry;
mod handle;
mod memory;
#[cfg(test)]
mod model;
mod table;
mod words;

pub use error::Error;
pub use geometry::{Geometry, Saving, Unsaved};
pub use handle::{Pinned, Reference};

use std::ops::Range;

use crate::units::{Bytes, Order};
use jumbo_sys::files::{FileError, Root};
use jumbo_sys::smaps::Smaps;
use memory::Mapped;
use table::{Seen, Table};

/// Initial reserve, as a number of sections.
const DEFAULT_RESERVE_SECTIONS: u64 = 2;
/// Maximum reserve, as a number of sections.
const MAX_RESERVE_SECTIONS: u64 = 64;

/// A table of descriptors for a range of addresses, which need not be mapped: of a guest, a device
/// or a file.
///
/// All methods may be called from any thread, but not from a signal handler. A child of fork(2) has
/// its own copy, which is consistent if no other thread was changing a page.
#[derive(Debug)]
pub struct Vmemmap {
    table: Table<Mapped>,
    range: Range<u64>,
}

/// A compound page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compound {
    /// Address of its head.
    pub head: u64,
    /// Order of the page.
    pub order: Order,
}

/// References to a compound page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Users {
    /// References except the owner's.
    pub references: u64,
    /// References that are pins.
    pub pins: u64,
}

/// Resident memory of a table, without page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resident {
    /// The section table.
    pub sections: Bytes,
    /// The descriptors.
    pub descriptors: Bytes,
    /// The reserve for descriptors.
    pub reserve: Bytes,
}

impl Resident {
    /// Returns the sum.
    pub fn total(&self) -> Bytes {
        self.sections + self.descriptors + self.reserve
    }
}

impl Vmemmap {
    /// Creates a table for `range`, without pages. It reserves addresses, and uses memory only for
    /// prepared pages and a small reserve ([`Vmemmap::hold`]).
    ///
    /// # Errors
    /// [`Error::Setup`] without that many addresses (`ulimit -v`, or strict overcommit, which
    /// charges addresses); [`Error::Outside`] for an empty range; [`Error::Geometry`] if the base
    /// pages are smaller than this host's.
    pub fn new(range: Range<u64>, geometry: Geometry) -> Result<Self, Error> {
        let base = geometry.base();
        if base.bytes() < rustix::param::page_size() as u64 {
            let huge = geometry.section().size(base);
            return Err(Error::Geometry { base, huge });
        }
        let address = range.start;
        let outside = || Error::Outside { address };
        // Compound pages are aligned by address: page 0 has the alignment of the largest one.
        let origin = geometry.largest().size(base).align_down(range.start);
        let bytes = range.end.checked_sub(origin).filter(|_| !range.is_empty());
        let section = geometry.section().size(base).bytes();
        let sections = bytes.ok_or_else(outside)?.div_ceil(section);
        let sections = usize::try_from(sections).map_err(|_| outside())?;
        let store = Mapped::new(geometry, sections)?;
        store.hold(DEFAULT_RESERVE_SECTIONS);
        let table = Table {
            store,
            geometry,
            origin,
        };
        Ok(Self { table, range })
    }

    /// Returns the geometry.
    pub fn geometry(&self) -> Geometry {
        self.table.geometry
    }

    /// Returns the described addresses.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Reserves memory to restore that many sections, at most 64, and returns its size: less
    /// without room for it. The reserve is released when descriptors need memory and none is
    /// available, as at the limit of a memory cgroup, and filled again when descriptors are freed.
    pub fn hold(&self, sections: u64) -> Bytes {
        self.table.store.hold(sections)
    }

    /// Makes a compound page of `order` at `address`, with the owner's reference and the owner word
    /// 0. Returns the saved memory of its descriptors.
    ///
    /// # Errors
    /// [`Error::Taken`], [`Error::Order`], [`Error::Outside`]; [`Error::Memory`] for the first page
    /// of a section that is smaller than it.
    pub fn prepare(&self, address: u64, order: Order) -> Result<Saving, Error> {
        self.table.prepare(self.block(address, order)?, order.0)
    }

    /// Ends the compound page with its head at `address`.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Absent`], [`Error::Tail`], [`Error::Outside`].
    pub fn release(&self, address: u64) -> Result<(), Error> {
        self.table.release(self.page(address)?)
    }

    /// Frees the descriptors of the compound page with its head at `address`. Returns the saved
    /// memory: none if the page is smaller than a section.
    ///
    /// # Errors
    /// Same as [`Vmemmap::release`].
    pub fn optimise(&self, address: u64) -> Result<Saving, Error> {
        self.table.optimise(self.page(address)?)
    }

    /// Allocates a descriptor for each base page of the compound page with its head at `address`.
    ///
    /// # Errors
    /// Same as [`Vmemmap::release`]; [`Error::Memory`]. The page stays usable.
    pub fn restore(&self, address: u64) -> Result<(), Error> {
        self.table.restore(self.page(address)?)
    }

    /// Splits the compound page with its head at `address` into pages of `order`, each with the
    /// owner's reference and the owner word. Pages of at least a section stay optimised or
    /// described; smaller ones are described.
    ///
    /// # Errors
    /// Same as [`Vmemmap::restore`]; [`Error::Order`] if the page is not larger than `order`.
    pub fn split(&self, address: u64, order: Order) -> Result<(), Error> {
        self.table.split(self.page(address)?, order.0)
    }

    /// Merges the compound pages from `address` on into one of `order`, optimised if it is at least
    /// a section. Returns the saved memory.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Absent`] if a part is in use or missing; [`Error::Order`] if a
    /// part is not smaller; [`Error::Tail`], [`Error::Outside`].
    pub fn merge(&self, address: u64, order: Order) -> Result<Saving, Error> {
        self.table.merge(self.block(address, order)?, order.0)
    }

    /// Returns the compound page at an address; `None` without one. Lock-free.
    #[inline]
    pub fn head_of(&self, address: u64) -> Option<Compound> {
        let seen = self.table.look(self.page(address).ok()?)?;
        Some(self.compound(&seen))
    }

    /// Returns the order of the compound page at an address; `None` without one. Lock-free.
    #[inline]
    pub fn order_of(&self, address: u64) -> Option<Order> {
        self.head_of(address).map(|compound| compound.order)
    }

    /// Returns the references to the compound page at an address. Lock-free.
    pub fn users(&self, address: u64) -> Option<Users> {
        let (_, counts, _) = self.table.read(self.page(address).ok()?)?;
        Some(Users {
            references: counts.references().saturating_sub(1),
            pins: counts.pins(),
        })
    }

    /// Returns the owner word of the compound page at an address. Lock-free.
    /// [`Reference::set_owner`] sets it.
    pub fn owner(&self, address: u64) -> Option<u64> {
        let (_, _, owner) = self.table.read(self.page(address).ok()?)?;
        Some(owner)
    }

    /// Returns its resident memory, from smaps.
    ///
    /// # Errors
    /// [`FileError`] if /proc/self/smaps cannot be read.
    pub fn resident(&self, root: &Root) -> Result<Resident, FileError> {
        let smaps = Smaps::read(root, std::process::id())?;
        let [sections, descriptors, reserve] = self.table.store.addresses().map(|range| {
            let mappings = smaps.mappings();
            let ours = mappings.filter(|it| it.start < range.end && range.start < it.end);
            ours.map(|mapping| mapping.rss).sum()
        });
        Ok(Resident {
            sections,
            descriptors,
            reserve,
        })
    }

    /// Returns the number of the page at an address.
    #[inline]
    fn page(&self, address: u64) -> Result<usize, Error> {
        let outside = Error::Outside { address };
        if !self.range.contains(&address) {
            return Err(outside);
        }
        let page = (address - self.table.origin) >> self.geometry().base().bytes().trailing_zeros();
        usize::try_from(page).map_err(|_| outside)
    }

    /// Returns the number of the first page of a possible compound page.
    fn block(&self, address: u64, order: Order) -> Result<usize, Error> {
        let page = self.page(address)?;
        if order > self.geometry().largest() {
            return Err(Error::Order { address, order });
        }
        let size = order.size(self.geometry().base());
        if size.align_down(address) != address {
            return Err(Error::Order { address, order });
        }
        let end = address.checked_add(size.bytes());
        match end.is_some_and(|end| end <= self.range.end) {
            true => Ok(page),
            false => Err(Error::Outside {
                address: self.range.end,
            }),
        }
    }

    fn compound(&self, seen: &Seen) -> Compound {
        Compound {
            head: self.table.address(seen.head),
            order: Order(seen.order),
        }
    }
}
