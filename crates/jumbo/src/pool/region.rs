//! Pages at consecutive addresses, private to this process: [`Region`].

use std::ops::Range;

use super::error::SourceError;
use super::frame::Frame;
use super::window::OwnedRange;
use super::{Error, Pool, Reservation, lock};
use crate::units::{NodeId, Pages};

/// Time at which a region's pages are mapped into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Populate {
    /// All pages, when the region is created.
    UpFront,
    /// Each page at its first use. All are reserved when the region is created.
    OnTake,
}

/// Pages of a pool at consecutive addresses. Their initial content is unspecified.
///
/// All pages are reserved when the region is created, and mapped by a call, not by a fault: no
/// touch can fail.
#[derive(Debug)]
pub struct Region<'p> {
    reservation: Reservation<'p>,
    mapping: Option<OwnedRange>,
    frames: Box<[Option<Frame>]>,
    page: usize,
}

impl Pool {
    /// Reserves `pages` and addresses for them.
    ///
    /// # Errors
    /// Same as [`Pool::reserve`]; [`Error::Source`] without addresses, or if a page cannot be
    /// mapped.
    pub fn region(&self, pages: Pages, populate: Populate) -> Result<Region<'_>, Error> {
        self.reserve(pages)?.into_region(populate)
    }

    fn addresses(&self, pages: Pages) -> Result<OwnedRange, Error> {
        let page = self.source.window().page();
        let length = usize::try_from(pages.0)
            .ok()
            .and_then(|n| n.checked_mul(page));
        let mapping = length
            .ok_or(rustix::io::Errno::NOMEM)
            .and_then(|length| OwnedRange::reserve(length.max(page), page));
        mapping.map_err(|errno| {
            Error::Source(SourceError {
                node: NodeId(0),
                operation: "mmap",
                errno,
                why: "no addresses for the region",
            })
        })
    }
}

impl<'p> Reservation<'p> {
    /// Maps the pages that are left at consecutive addresses.
    ///
    /// # Errors
    /// [`Error::Source`] without addresses, or if a page cannot be mapped; the reservation is gone
    /// then.
    pub fn into_region(mut self, populate: Populate) -> Result<Region<'p>, Error> {
        self.take_region(self.left(), populate)
    }

    /// Maps up to `pages` of the pages that are left at consecutive addresses.
    ///
    /// # Errors
    /// [`Error::Source`] without addresses, or if a page cannot be mapped; the reservation keeps the
    /// pages then.
    pub fn take_region(&mut self, pages: Pages, populate: Populate) -> Result<Region<'p>, Error> {
        let pages = pages.min(self.left());
        let mapping = self.pool().addresses(pages)?;
        let mut region = Region {
            page: self.pool().source.window().page(),
            reservation: self.split_off(pages),
            mapping: Some(mapping),
            frames: (0..pages.0).map(|_| None).collect(),
        };
        if populate == Populate::UpFront
            && let Err(error) = region.populate(0..region.frames.len())
        {
            region.unmap(|reservation, frame| reservation.put_back(frame));
            self.join(&mut region.reservation);
            return Err(error);
        }
        Ok(region)
    }
}

impl Region<'_> {
    /// Returns the number of pages.
    pub fn pages(&self) -> Pages {
        Pages(self.frames.len() as u64)
    }

    /// Maps the pages of `range`.
    ///
    /// # Errors
    /// [`Error::Source`] if the kernel cannot map a page, for lack of memory for page tables; the
    /// pages before it are mapped.
    pub fn populate(&mut self, range: Range<usize>) -> Result<(), Error> {
        let pool = self.reservation.pool();
        let Some(mapping) = &self.mapping else {
            return Ok(());
        };
        let within = range.start.min(self.frames.len())..range.end.min(self.frames.len());
        for at in within {
            if self.frames.get(at).is_none_or(Option::is_some) {
                continue;
            }
            let Some(frame) = self.reservation.take_frame() else {
                break;
            };
            if let Err(error) = pool.source.place(&frame, mapping, at * self.page) {
                self.reservation.put_back(frame);
                return Err(Error::Source(error));
            }
            self.frames[at] = Some(frame);
        }
        Ok(())
    }

    /// Returns the bytes of the pages of `range`, after mapping missing ones.
    ///
    /// # Errors
    /// Same as [`Region::populate`].
    ///
    /// # Panics
    /// Panics if `range` is not within the region.
    #[expect(unsafe_code, reason = "references into the region's own mapping")]
    pub fn bytes_mut(&mut self, range: Range<usize>) -> Result<&mut [u8], Error> {
        assert!(
            range.start <= range.end && range.end <= self.frames.len(),
            "pages {range:?} of a region of {}",
            self.frames.len()
        );
        self.populate(range.clone())?;
        let (offset, length) = (range.start * self.page, range.len() * self.page);
        match &self.mapping {
            // SAFETY: the pages of the range are mapped, readable and writable, until the drop; the
            // region is borrowed mutably, and no other code knows their addresses.
            Some(mapping) => Ok(unsafe { mapping.bytes_mut(offset, length) }),
            None => Ok(&mut []),
        }
    }
}

impl<'p> Region<'p> {
    /// Unmaps the pages, and passes them to `each` once no address has them.
    fn unmap(&mut self, mut each: impl FnMut(&mut Reservation<'p>, Frame)) {
        let pool = self.reservation.pool();
        let Some(mapping) = self.mapping.take() else {
            return;
        };
        let mut returned = Vec::new();
        for (at, frame) in self.frames.iter_mut().enumerate() {
            let Some(frame) = frame.take() else { continue };
            match pool.source.unplace(&frame, &mapping, at * self.page) {
                Ok(()) => returned.push(frame),
                // Unmapping the region frees its memory.
                Err(_) => lock(&pool.inventory).lose(frame),
            }
        }
        drop(mapping);
        while let Some(frame) = returned.pop() {
            each(&mut self.reservation, frame);
        }
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.unmap(|reservation, frame| reservation.pool().give_frame(frame));
    }
}
