//! Pages side by side, for this process alone: [`Region`].

use std::ops::Range;

use super::error::SourceError;
use super::frame::Frame;
use super::window::OwnedRange;
use super::{Error, Pool, Reservation, lock};
use crate::units::{NodeId, Pages};

/// When the pages of a region come into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Populate {
    /// All at once, when it is made.
    UpFront,
    /// Each when it is asked for first. They are reserved when the region is made, so they are there then.
    OnTake,
}

/// Pages of a pool at consecutive addresses. What they hold at first is unspecified.
///
/// Every page of it is reserved when it is made and comes into place by a call, not by a fault, so there is
/// no touch that could fail.
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
    /// As [`Pool::reserve`]; [`Error::Source`] where addresses cannot be had or a page cannot be placed.
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
    /// Puts what is left of it side by side.
    ///
    /// # Errors
    /// [`Error::Source`] where addresses cannot be had or a page cannot be placed; the reservation is gone then.
    pub fn into_region(self, populate: Populate) -> Result<Region<'p>, Error> {
        let pages = self.left();
        let mapping = self.pool().addresses(pages)?;
        let mut region = Region {
            page: self.pool().source.window().page(),
            reservation: self,
            mapping: Some(mapping),
            frames: (0..pages.0).map(|_| None).collect(),
        };
        if populate == Populate::UpFront {
            region.populate(0..region.frames.len())?;
        }
        Ok(region)
    }
}

impl Region<'_> {
    /// How many pages it has.
    pub fn pages(&self) -> Pages {
        Pages(self.frames.len() as u64)
    }

    /// Puts the pages of `range` into place.
    ///
    /// # Errors
    /// [`Error::Source`] where the kernel cannot map a page (it has no memory for page tables); those before it
    /// are in place.
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

    /// The bytes of the pages of `range`, which come into place where they were not.
    ///
    /// # Errors
    /// As [`Region::populate`].
    ///
    /// # Panics
    /// Where `range` is not within the region, as slices do.
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
            // SAFETY: the pages of the range are in place, readable and writable, until the drop; the region
            // is borrowed mutably, and no other code knows their addresses.
            Some(mapping) => Ok(unsafe { mapping.bytes_mut(offset, length) }),
            None => Ok(&mut []),
        }
    }
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        let pool = self.reservation.pool();
        let Some(mapping) = self.mapping.take() else {
            return;
        };
        let mut home = Vec::new();
        for (at, frame) in self.frames.iter_mut().enumerate() {
            let Some(frame) = frame.take() else { continue };
            match pool.source.unplace(&frame, &mapping, at * self.page) {
                Ok(()) => home.push(frame),
                // Its memory goes with the region's addresses.
                Err(_) => lock(&pool.inventory).lose(frame),
            }
        }
        drop(mapping);
        while let Some(frame) = home.pop() {
            pool.give_frame(frame);
        }
    }
}
