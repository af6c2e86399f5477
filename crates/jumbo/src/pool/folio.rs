//! Folios smaller than a page of the pool: [`Folio`], a part of a split page.
//!
//! The pool describes its pages ([`vmemmap`](crate::vmemmap)). A page that is split for folios is
//! taken like any other: `used` counts it once. Folios are allocated as in the kernel's buddy
//! allocator: the smallest free part that is large enough is halved until it fits, and a returned
//! folio merges with its buddy if that is free. When all of a page is free it is whole again: its
//! descriptors are freed, and it returns to the pool.
//!
//! Invariant: each base page of a split page is in exactly one taken folio or one free part; no two
//! free parts are buddies.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use super::frame::Frame;
use super::{Error, Pool, lock};
use crate::units::{NodeId, Order, PageSize, Pages};
use crate::vmemmap::{self, Compound, Geometry, Vmemmap};

/// A part of a split page; drop returns it.
#[derive(Debug)]
pub struct Folio<'p> {
    pool: &'p Pool,
    part: Part,
    node: NodeId,
}

/// The token of a part of a page, neither copied nor cloned. The holder owns the part.
#[derive(Debug)]
pub(super) struct Part {
    /// First base page in the window.
    first: usize,
    order: u32,
    base: usize,
}

impl Part {
    /// Returns its offset in the window, in bytes.
    pub(super) fn offset(&self) -> usize {
        self.first * self.base
    }

    /// Returns its length in bytes.
    pub(super) fn length(&self) -> usize {
        self.base << self.order
    }
}

/// Counters of split pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Split {
    /// Split pages, each counted as used.
    pub pages: Pages,
    /// Their base pages in taken folios.
    pub used: Pages,
    /// Their free base pages.
    pub free: Pages,
}

/// Descriptors of a pool's pages.
#[derive(Debug)]
pub(super) struct Folios {
    vmemmap: Vmemmap,
    /// Order of a whole page.
    whole: u32,
    base: usize,
}

/// Free parts by order, and the split pages, by their first base pages.
#[derive(Debug, Default)]
pub(super) struct Buddies {
    free: Vec<BTreeSet<usize>>,
    split: BTreeMap<usize, Frame>,
    used: u64,
}

impl Folios {
    /// Creates the descriptors for pages of `size` in a window.
    ///
    /// # Errors
    /// [`Error::Undescribed`] if such pages have no smaller folios, or without addresses for
    /// descriptors.
    pub(super) fn new(start: usize, length: usize, size: PageSize) -> Result<Self, Error> {
        Self::describe(start, length, size).map_err(Error::Undescribed)
    }

    fn describe(start: usize, length: usize, size: PageSize) -> Result<Self, vmemmap::Error> {
        // A larger page is first split into PMD-sized ones, which takes no memory.
        let host = Geometry::of_host()?;
        let section = host.section().size(host.base());
        let geometry = Geometry::new(host.base(), size.min(section))?;
        let range = start as u64..(start + length) as u64;
        Ok(Self {
            vmemmap: Vmemmap::new(range, geometry)?,
            whole: size.order(geometry.base()).0,
            base: rustix::param::page_size(),
        })
    }

    fn address(&self, first: usize) -> u64 {
        self.vmemmap.range().start + (first * self.base) as u64
    }

    pub(super) fn prepare(&self, offset: usize) {
        let at = self.vmemmap.range().start + offset as u64;
        // A page that was lost and made again still has its descriptors.
        let _ = self.vmemmap.prepare(at, Order(self.whole));
    }

    pub(super) fn release(&self, offset: usize) {
        let at = self.vmemmap.range().start + offset as u64;
        let _ = self.vmemmap.release(at);
    }

    fn split(&self, first: usize, order: u32) -> Result<(), Error> {
        Ok(self.vmemmap.split(self.address(first), Order(order))?)
    }
}

impl Buddies {
    fn at(&mut self, order: u32) -> &mut BTreeSet<usize> {
        let order = order as usize;
        if self.free.len() <= order {
            self.free.resize_with(order + 1, BTreeSet::new);
        }
        &mut self.free[order]
    }

    /// Takes the smallest free part that is large enough, halved until it fits; on an error it
    /// stays free.
    fn take(&mut self, folios: &Folios, order: u32) -> Result<Option<usize>, Error> {
        let fits = (order..folios.whole).find(|order| !self.at(*order).is_empty());
        let found = fits.and_then(|order| Some((order, self.at(order).pop_first()?)));
        let Some((has, first)) = found else {
            return Ok(None);
        };
        match self.halve(folios, first, has, order) {
            Ok(()) => Ok(Some(first)),
            Err(error) => {
                self.at(has).insert(first);
                Err(error)
            }
        }
    }

    /// Halves a part of order `has`, which is in no list, down to `order`. On an error it is whole.
    fn halve(&mut self, folios: &Folios, first: usize, has: u32, order: u32) -> Result<(), Error> {
        for half in (order..has).rev() {
            if let Err(error) = folios.split(first, half) {
                // The other halves are free: merge all of them again.
                for half in half + 1..has {
                    self.at(half).remove(&(first + (1 << half)));
                    let at = folios.address(first);
                    let _ = folios.vmemmap.merge(at, Order(half + 1));
                }
                return Err(error);
            }
            self.at(half).insert(first + (1 << half));
        }
        Ok(())
    }

    /// Returns a part; returns its page if all of it is free.
    fn give(&mut self, folios: &Folios, mut first: usize, mut order: u32) -> Option<Frame> {
        while order < folios.whole {
            let buddy = first ^ (1 << order);
            if !self.at(order).remove(&buddy) {
                break;
            }
            let both = first.min(buddy);
            if folios
                .vmemmap
                .merge(folios.address(both), Order(order + 1))
                .is_err()
            {
                self.at(order).insert(buddy);
                break;
            }
            (first, order) = (both, order + 1);
        }
        if order == folios.whole {
            return self.split.remove(&first);
        }
        self.at(order).insert(first);
        None
    }
}

impl Pool {
    /// Takes a folio of `order`, in base pages: a free part of a split page, else of a page that is
    /// taken and split now. Its content is unspecified.
    ///
    /// # Errors
    /// [`Error::Order`] if that is not less than a page; [`Error::WithoutFolios`],
    /// [`Error::Undescribed`]; those of [`Pool::take`]; [`Error::Split`] if the taken page cannot
    /// be split: it returns to the pool.
    pub fn take_folio(&self, order: Order) -> Result<Folio<'_>, Error> {
        self.check_here()?;
        let folios = self.folios.as_ref().map_err(|error| *error)?;
        if order.0 >= folios.whole {
            return Err(Error::Order { order });
        }
        let found = lock(&self.buddies).take(folios, order.0)?;
        let first = match found {
            Some(first) => first,
            None => self.split_page(folios, order.0)?,
        };
        let mut buddies = lock(&self.buddies);
        buddies.used += 1 << order.0;
        let page = first >> folios.whole << folios.whole;
        let node = buddies.split.get(&page).map_or(NodeId(0), Frame::node);
        let part = Part {
            first,
            order: order.0,
            base: folios.base,
        };
        let pool = self;
        Ok(Folio { pool, part, node })
    }

    /// Takes a page and splits it; returns its first part.
    fn split_page(&self, folios: &Folios, order: u32) -> Result<usize, Error> {
        let (frame, _) = self.take_frame(self.placement)?;
        let first = self.source.window().offset(&frame) / folios.base;
        let mut buddies = lock(&self.buddies);
        match buddies.halve(folios, first, folios.whole, order) {
            Ok(()) => {
                buddies.split.insert(first, frame);
                Ok(first)
            }
            Err(error) => {
                drop(buddies);
                self.give_frame(frame);
                Err(error)
            }
        }
    }

    fn give_part(&self, part: &Part) {
        let Ok(folios) = &self.folios else {
            return;
        };
        let mut buddies = lock(&self.buddies);
        buddies.used -= 1 << part.order;
        let whole = buddies.give(folios, part.first, part.order);
        drop(buddies);
        if let Some(frame) = whole {
            self.give_frame(frame);
        }
    }

    /// Returns the counters of split pages.
    pub fn split(&self) -> Split {
        let buddies = lock(&self.buddies);
        let pages = Pages(buddies.split.len() as u64);
        let whole = self.folios.as_ref().map_or(0, |folios| folios.whole);
        let used = Pages(buddies.used);
        Split {
            pages,
            used,
            free: Pages((pages.0 << whole) - used.0),
        }
    }

    /// Returns the page or folio at an address; `None` without a page there. Lock-free.
    pub fn compound_of(&self, address: NonNull<u8>) -> Option<Compound> {
        let folios = self.folios.as_ref().ok()?;
        folios.vmemmap.head_of(address.addr().get() as u64)
    }
}

impl Folio<'_> {
    /// Returns its order, in base pages.
    pub fn order(&self) -> Order {
        Order(self.part.order)
    }

    /// Returns its node.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.pool.source.window().folio(&self.part)
    }

    /// Returns its bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.pool.source.window().folio_mut(&mut self.part)
    }

    /// Returns its address, for the kernel or C code; valid for the life of the folio.
    pub fn as_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.bytes_mut()).cast()
    }
}

impl Drop for Folio<'_> {
    fn drop(&mut self) {
        self.pool.give_part(&self.part);
    }
}
