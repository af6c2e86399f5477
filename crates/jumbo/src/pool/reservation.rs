//! Promised pages: [`Reservation`].

use super::collect::Purpose;
use super::frame::Frame;
use super::{Error, Page, Placement, Pool, lock};
use crate::units::Pages;

/// Promised pages: taking one cannot fail. Drop returns the rest, and releases surplus pages at
/// once.
#[derive(Debug)]
pub struct Reservation<'p> {
    pool: &'p Pool,
    held: Vec<Frame>,
}

impl Pool {
    /// Reserves `pages`, all or none. Missing pages are made as surplus pages.
    ///
    /// # Errors
    /// [`Error::Exhausted`], [`Error::Source`], [`Error::Placement`], [`Error::Window`],
    /// [`Error::Forked`].
    pub fn reserve(&self, pages: Pages) -> Result<Reservation<'_>, Error> {
        self.reserve_placed(pages, self.placement)
    }

    /// Same as [`Pool::reserve`], with its own placement.
    ///
    /// # Errors
    /// Same as [`Pool::reserve`].
    pub fn reserve_placed(
        &self,
        pages: Pages,
        placement: Placement,
    ) -> Result<Reservation<'_>, Error> {
        let collected = self.collect_pages(pages.0, placement, Purpose::Promise)?;
        Ok(Reservation {
            pool: self,
            held: collected.frames,
        })
    }
}

impl<'p> Reservation<'p> {
    /// Returns the number of pages left.
    pub fn left(&self) -> Pages {
        Pages(self.held.len() as u64)
    }

    /// Returns the pool.
    pub fn pool(&self) -> &'p Pool {
        self.pool
    }

    /// Takes a page; `None` once all are taken. Its content is unspecified.
    pub fn take(&mut self) -> Option<Page<'p>> {
        let frame = self.take_frame()?;
        Some(Page {
            pool: self.pool,
            frame,
        })
    }

    pub(super) fn take_frame(&mut self) -> Option<Frame> {
        let frame = self.held.pop()?;
        lock(&self.pool.inventory).unhold(frame.node());
        Some(frame)
    }

    /// Returns a taken page to the reservation.
    pub(super) fn put_back(&mut self, frame: Frame) {
        lock(&self.pool.inventory).hold(frame.node());
        self.held.push(frame);
    }

    /// Takes the pages of another reservation in the same pool.
    pub(super) fn join(&mut self, other: &mut Self) {
        self.held.append(&mut other.held);
    }

    /// Splits off up to `pages`, so that each thread can have its own part.
    #[must_use]
    pub fn split_off(&mut self, pages: Pages) -> Self {
        let pages = usize::try_from(pages.0).unwrap_or(usize::MAX);
        let part = self.held.split_off(self.held.len().saturating_sub(pages));
        Self {
            pool: self.pool,
            held: part,
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.pool.give_held(held);
    }
}
