//! References to compound pages: [`Reference`] to one, [`Pinned`] to many.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::table::Seen;
use super::words::Counts;
use super::{Compound, Error, Vmemmap};

/// A reference to a compound page, through its head; drop releases it.
///
/// During its life the page is not split, merged, optimised, restored or released.
#[derive(Debug)]
#[must_use = "dropping it puts the reference"]
pub struct Reference<'v> {
    vmemmap: &'v Vmemmap,
    seen: Seen,
}

/// Pinned pages: their compound pages have a reference for each of them. Drop unpins them.
#[derive(Debug)]
#[must_use = "dropping it unpins the pages"]
pub struct Pinned<'v> {
    vmemmap: &'v Vmemmap,
    /// Numbers of the pages.
    pages: Range<usize>,
}

impl Vmemmap {
    /// Gets a reference to the compound page at an address; for a tail, to its head.
    ///
    /// Waits while another thread changes the page, which takes no system call.
    ///
    /// # Errors
    /// [`Error::Absent`], [`Error::Outside`], [`Error::Overflow`].
    #[inline]
    pub fn get(&self, address: u64) -> Result<Reference<'_>, Error> {
        let seen = self.table.raise(self.page(address)?, |_| 1)?;
        let vmemmap = self;
        Ok(Reference { vmemmap, seen })
    }

    /// Pins all base pages of an address range, in one step for each compound page of any size.
    ///
    /// # Errors
    /// Same as [`Vmemmap::get`], for the first page that cannot be pinned. No page is pinned then.
    pub fn pin(&self, addresses: Range<u64>) -> Result<Pinned<'_>, Error> {
        if addresses.is_empty() {
            let address = addresses.start;
            return Err(Error::Outside { address });
        }
        let (first, last) = (self.page(addresses.start)?, self.page(addresses.end - 1)?);
        let mut pinned = Pinned {
            vmemmap: self,
            pages: first..first,
        };
        while pinned.pages.end <= last {
            let page = pinned.pages.end;
            let count = |seen: &Seen| seen.pages().end.min(last + 1) - page;
            let more = |seen: &Seen| Counts::many(count(seen) as u64, true);
            let seen = self.table.raise(page, more)?;
            pinned.pages.end += count(&seen);
        }
        Ok(pinned)
    }
}

impl Reference<'_> {
    /// Returns the page.
    pub fn compound(&self) -> Compound {
        self.vmemmap.compound(&self.seen)
    }

    /// Returns the owner word of the page.
    pub fn owner(&self) -> u64 {
        let (_, owner) = self.vmemmap.table.words(self.seen.place);
        owner.load(Ordering::Acquire)
    }

    /// Sets the owner word, a value for the user. Each part of a split page has it; a merged page
    /// has that of its first part.
    pub fn set_owner(&self, word: u64) {
        let (_, owner) = self.vmemmap.table.words(self.seen.place);
        owner.store(word, Ordering::Release);
    }
}

impl Drop for Reference<'_> {
    #[inline]
    fn drop(&mut self) {
        self.vmemmap.table.lower(self.seen.place, 1);
    }
}

impl Pinned<'_> {
    /// Returns the addresses of the base pages.
    pub fn addresses(&self) -> Range<u64> {
        let table = &self.vmemmap.table;
        table.address(self.pages.start)..table.address(self.pages.end)
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let table = &self.vmemmap.table;
        // Pinned pages cannot change.
        while self.pages.start < self.pages.end
            && let Some(seen) = table.look(self.pages.start)
        {
            let end = seen.pages().end.min(self.pages.end);
            table.lower(
                seen.place,
                Counts::many((end - self.pages.start) as u64, true),
            );
            self.pages.start = end;
        }
    }
}
