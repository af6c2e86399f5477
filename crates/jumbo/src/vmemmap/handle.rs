//! What keeps a compound page as it is: [`Reference`], and [`Pinned`] over many.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::table::Seen;
use super::words::Counts;
use super::{Compound, Error, Vmemmap};

/// A reference to a compound page, by its head. Dropping it puts it.
///
/// While it is there the page is neither split nor merged, optimised, restored or released.
#[derive(Debug)]
#[must_use = "dropping it puts the reference"]
pub struct Reference<'v> {
    vmemmap: &'v Vmemmap,
    seen: Seen,
}

/// Pages that are pinned: each of their compound pages has a reference for each of them. Dropping it unpins.
#[derive(Debug)]
#[must_use = "dropping it unpins the pages"]
pub struct Pinned<'v> {
    vmemmap: &'v Vmemmap,
    /// By number.
    pages: Range<usize>,
}

impl Vmemmap {
    /// Gets a reference to the compound page that the address is in; on a tail, to its head.
    ///
    /// Where another thread is just changing the page it waits for that, which takes no system call.
    ///
    /// # Errors
    /// [`Error::Absent`], [`Error::Outside`], [`Error::Overflow`].
    #[inline]
    pub fn get(&self, address: u64) -> Result<Reference<'_>, Error> {
        let seen = self.table.raise(self.page(address)?, |_| 1)?;
        let vmemmap = self;
        Ok(Reference { vmemmap, seen })
    }

    /// Pins all base pages that the addresses are of: with one step for each compound page, whatever its size.
    ///
    /// # Errors
    /// As [`Vmemmap::get`], for the first page that cannot be pinned. Nothing is pinned then.
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
    /// The page.
    pub fn compound(&self) -> Compound {
        self.vmemmap.compound(&self.seen)
    }

    /// The owner word of the page.
    pub fn owner(&self) -> u64 {
        let (_, owner) = self.vmemmap.table.words(self.seen.place);
        owner.load(Ordering::Acquire)
    }

    /// Sets the owner word, which means what the user has it mean. It stays with the page; of a split each part has it, of a merger
    /// the first one's counts.
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
    /// The addresses of the base pages.
    pub fn addresses(&self) -> Range<u64> {
        let table = &self.vmemmap.table;
        table.address(self.pages.start)..table.address(self.pages.end)
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let table = &self.vmemmap.table;
        // None of the pages can change or go while it is pinned.
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
