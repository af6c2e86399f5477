//! Describe: a descriptor for each base page, of which huge pages need none.
//!
//! [`Vmemmap`] describes a range of addresses by 64 bytes for each base page, as the kernel's vmemmap does: flags and order, counts of references
//! and pins, and an owner word. For 4 KiB base pages that is 16 GiB for each TiB, and of a huge page all but one descriptor say
//! the same: who the head is. So a huge page keeps none of them:
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
//! - [`Vmemmap::prepare`] makes a compound page of any order up to 1 GiB, optimised where its descriptors fill base pages of their own
//!   ([`Saving`] says what that saves, and why not more); [`Vmemmap::release`] ends it.
//! - [`Vmemmap::restore`] puts the descriptors' memory back, [`Vmemmap::optimise`] gives it away again; [`Vmemmap::split`] and [`Vmemmap::merge`] do so as
//!   the new order asks. A huge page that is split into huge pages needs no memory.
//! - [`Vmemmap::head_of`] and [`Vmemmap::order_of`] answer for any page, without a lock and without a look at a tail that has no memory;
//!   [`Vmemmap::get`] and [`Vmemmap::pin`] hold compound pages by their heads.
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
//! The arithmetic is in `geometry`, the words in `words`, what readers do in `table` (with the reasons why that is right) and writers in `change`;
//! `memory` is the one leaf that maps. Invariant: no thread writes to a descriptor that has no memory, nor reads one but as
//! zeroes; and what fails leaves the page as it was.

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

use crate::kernel::smaps::Smaps;
use crate::kernel::{FileError, Root};
use crate::units::{Bytes, Order};
use memory::Mapped;
use table::{Seen, Table};

/// For the descriptors of how many sections memory is held from the start.
const RESERVE: u64 = 2;
/// For how many it can be held.
const RESERVE_MOST: u64 = 64;

/// A table of descriptors for a range of addresses. These need not be mapped: a guest's, a device's or a file's do as well.
///
/// All methods take `&self` and may be called from any thread, but not in a signal handler. A child of fork(2) has a copy of
/// its own, which is whole if no other thread was changing a page.
#[derive(Debug)]
pub struct Vmemmap {
    table: Table<Mapped>,
    range: Range<u64>,
}

/// A compound page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compound {
    /// The address of its head.
    pub head: u64,
    /// Its order.
    pub order: Order,
}

/// What holds a compound page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Users {
    /// References beside the owner's.
    pub references: u64,
    /// Those of them that are pins.
    pub pins: u64,
}

/// What a table takes of memory, as the kernel counts it, without page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resident {
    /// The section table.
    pub sections: Bytes,
    /// The descriptors.
    pub descriptors: Bytes,
    /// Memory held for descriptors.
    pub reserve: Bytes,
}

impl Resident {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.sections + self.descriptors + self.reserve
    }
}

impl Vmemmap {
    /// A table for `range`, without any page. It takes addresses, and memory only for pages that are prepared, beside a small
    /// reserve ([`Vmemmap::hold`]).
    ///
    /// # Errors
    /// [`Error::Setup`] where there are not that many addresses (`ulimit -v`, or strict overcommit, where addresses count as memory);
    /// [`Error::Outside`] for an empty range; [`Error::Geometry`] where the base pages are smaller than this host's.
    pub fn new(range: Range<u64>, geometry: Geometry) -> Result<Self, Error> {
        let base = geometry.base();
        if base.bytes() < rustix::param::page_size() as u64 {
            let huge = geometry.section().size(base);
            return Err(Error::Geometry { base, huge });
        }
        let address = range.start;
        let outside = || Error::Outside { address };
        // Compound pages are aligned by their addresses, so their numbers begin where the largest could.
        let origin = geometry.largest().size(base).align_down(range.start);
        let bytes = range.end.checked_sub(origin).filter(|_| !range.is_empty());
        let section = geometry.section().size(base).bytes();
        let sections = bytes.ok_or_else(outside)?.div_ceil(section);
        let sections = usize::try_from(sections).map_err(|_| outside())?;
        let store = Mapped::new(geometry, sections)?;
        store.hold(RESERVE);
        let table = Table {
            store,
            geometry,
            origin,
        };
        Ok(Self { table, range })
    }

    /// Its arithmetic.
    pub fn geometry(&self) -> Geometry {
        self.table.geometry
    }

    /// The addresses that it describes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Holds memory for restoring so many sections, up to 64: it is let go when descriptors need as much and nothing else is to be had, as
    /// at the limit of a memory cgroup, and filled up again when descriptors are given back. Gives what is held now: less where
    /// there is no room for it.
    pub fn hold(&self, sections: u64) -> Bytes {
        self.table.store.hold(sections)
    }

    /// Makes a compound page of `order` at `address`, with the owner's reference, and 0 as its owner word. Says what of its descriptors needs
    /// no memory.
    ///
    /// # Errors
    /// [`Error::Taken`], [`Error::Order`], [`Error::Outside`]; [`Error::Memory`] where it is smaller than a section, and the first there.
    pub fn prepare(&self, address: u64, order: Order) -> Result<Saving, Error> {
        self.table.prepare(self.block(address, order)?, order.0)
    }

    /// Ends the compound page whose head is at `address`.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Absent`], [`Error::Tail`], [`Error::Outside`].
    pub fn release(&self, address: u64) -> Result<(), Error> {
        self.table.release(self.page(address)?)
    }

    /// Gives back the descriptors' memory of the compound page whose head is at `address`. Says what that saves; nothing, where the page
    /// is smaller than a section.
    ///
    /// # Errors
    /// As [`Vmemmap::release`].
    pub fn optimise(&self, address: u64) -> Result<Saving, Error> {
        self.table.optimise(self.page(address)?)
    }

    /// Describes each base page of the compound page whose head is at `address` by a descriptor of its own.
    ///
    /// # Errors
    /// As [`Vmemmap::release`]; [`Error::Memory`]. The page is whole and usable then.
    pub fn restore(&self, address: u64) -> Result<(), Error> {
        self.table.restore(self.page(address)?)
    }

    /// Makes compound pages of `order` of the one whose head is at `address`. Each has the owner's reference, and the owner word. Those that
    /// are no smaller than a section stay as they were, optimised or not; smaller ones are described.
    ///
    /// # Errors
    /// As [`Vmemmap::restore`]; [`Error::Order`] where the page is no larger than that.
    pub fn split(&self, address: u64, order: Order) -> Result<(), Error> {
        self.table.split(self.page(address)?, order.0)
    }

    /// Makes one compound page of `order` of those that fill its place from `address` on; optimised, if it is no smaller than a section. Says
    /// what that saves.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Absent`] where a part is in use or missing; [`Error::Order`] where a part is no smaller; [`Error::Tail`],
    /// [`Error::Outside`].
    pub fn merge(&self, address: u64, order: Order) -> Result<Saving, Error> {
        self.table.merge(self.block(address, order)?, order.0)
    }

    /// The compound page that the address is in; `None` where there is none. Lock-free.
    #[inline]
    pub fn head_of(&self, address: u64) -> Option<Compound> {
        let seen = self.table.look(self.page(address).ok()?)?;
        Some(self.compound(&seen))
    }

    /// The order of the compound page that the address is in; `None` where there is none. Lock-free.
    #[inline]
    pub fn order_of(&self, address: u64) -> Option<Order> {
        self.head_of(address).map(|compound| compound.order)
    }

    /// What holds the compound page that the address is in. Lock-free.
    pub fn users(&self, address: u64) -> Option<Users> {
        let (_, counts, _) = self.table.read(self.page(address).ok()?)?;
        Some(Users {
            references: counts.references().saturating_sub(1),
            pins: counts.pins(),
        })
    }

    /// The owner word of the compound page that the address is in. Lock-free. [`Reference::set_owner`] sets it.
    pub fn owner(&self, address: u64) -> Option<u64> {
        let (_, _, owner) = self.table.read(self.page(address).ok()?)?;
        Some(owner)
    }

    /// What it takes of memory, as smaps has it.
    ///
    /// # Errors
    /// [`FileError`] where /proc/self/smaps cannot be read.
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

    /// The number of the page that an address is in.
    #[inline]
    fn page(&self, address: u64) -> Result<usize, Error> {
        let outside = Error::Outside { address };
        if !self.range.contains(&address) {
            return Err(outside);
        }
        let page = (address - self.table.origin) >> self.geometry().base().bytes().trailing_zeros();
        usize::try_from(page).map_err(|_| outside)
    }

    /// The number of the first page of a compound page that could be there.
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
