//! A part of a pool with bounds of its own: [`Subpool`].
//!
//! What `size=` and `min_size=` of a hugetlbfs mount are to the kernel. The minimum is held as pages, so it is
//! promised whatever else happens to the pool: `held == max(0, minimum - charged)` whenever no thread is inside.

use std::sync::Mutex;

use jumbo_inside::pool::Quota;

use super::collect::Purpose;
use super::frame::{Frame, List};
use super::{Error, Page, Pool, Reservation, lock};
use crate::units::Pages;

/// A part of a pool. Takes beyond its maximum fail, whatever the pool has; its minimum is reserved.
#[derive(Debug)]
pub struct Subpool<'p> {
    pool: &'p Pool,
    /// Pages taken and reserved through the subpool, with those that are just being asked for. Changed with the books
    /// locked.
    quota: Quota,
    min: u64,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    /// Those of the quota that are just being asked for.
    asking: u64,
    /// What is left of the minimum.
    held: List,
}

impl Books {
    /// How many more pages the minimum wants held.
    fn owed(&self, min: u64, quota: &Quota) -> u64 {
        let firm = quota.charged() - self.asking;
        min.saturating_sub(firm).saturating_sub(self.held.len())
    }

    /// How many are held beyond the minimum.
    fn excess(&self, min: u64, quota: &Quota) -> u64 {
        let firm = quota.charged() - self.asking;
        self.held.len().saturating_sub(min.saturating_sub(firm))
    }
}

impl Pool {
    /// Makes a subpool with at most `max` pages (`None`: as many as the pool has), of which `min` are
    /// reserved for it now.
    ///
    /// # Errors
    /// As [`Pool::reserve`]; [`Error::Quota`] where the minimum is beyond the maximum.
    pub fn subpool(&self, max: Option<Pages>, min: Pages) -> Result<Subpool<'_>, Error> {
        if let Some(max) = max.filter(|max| *max < min) {
            return Err(Error::Quota {
                wanted: min,
                max,
                used: Pages(0),
            });
        }
        let collected = self.collect_pages(min.0, self.placement, Purpose::Promise)?;
        Ok(Subpool {
            pool: self,
            quota: Quota::new(max.map_or(u64::MAX, |max| max.0)),
            min: min.0,
            books: Mutex::new(Books {
                asking: 0,
                held: collected.frames,
            }),
        })
    }
}

impl<'p> Subpool<'p> {
    /// Pages taken and reserved through it.
    pub fn charged(&self) -> Pages {
        Pages(self.quota.charged())
    }

    /// What is reserved of its minimum and neither taken nor reserved through it yet.
    pub fn held(&self) -> Pages {
        Pages(lock(&self.books).held.len())
    }

    /// Takes a page. Up to the minimum that cannot fail. What the page holds is unspecified.
    ///
    /// # Errors
    /// [`Error::Quota`]; beyond the minimum those of [`Pool::take`].
    pub fn take(&'p self) -> Result<Page<'p>, Error> {
        let mut reservation = self.reserve_as(1, Purpose::Use)?;
        let frame = reservation.pop(&self.pool.links);
        frame
            .map(|frame| Page::new(self.pool, Some(self), frame))
            .ok_or(Error::Placement)
    }

    /// Reserves `pages`, all or none.
    ///
    /// # Errors
    /// [`Error::Quota`]; those of [`Pool::reserve`].
    pub fn reserve(&'p self, pages: Pages) -> Result<Reservation<'p>, Error> {
        let held = self.reserve_as(pages.0, Purpose::Promise)?;
        Ok(Reservation::new(self.pool, Some(self), held))
    }

    fn reserve_as(&self, wanted: u64, purpose: Purpose) -> Result<List, Error> {
        self.pool.check_fits(wanted)?;
        let (links, mut frames) = (&self.pool.links, List::new());
        let mut books = lock(&self.books);
        if !self.quota.charge(wanted) {
            return Err(Error::Quota {
                wanted: Pages(wanted),
                max: Pages(self.quota.most()),
                used: self.charged(),
            });
        }
        books.held.move_to(&mut frames, wanted, links);
        let missing = wanted - frames.len();
        books.asking += missing;
        drop(books);
        let asked = if missing == 0 {
            Ok(())
        } else if purpose == Purpose::Use {
            self.pool
                .take_frame(self.pool.placement)
                .map(|(frame, _)| frames.push(links, frame))
        } else {
            self.pool
                .collect_pages(missing, self.pool.placement, purpose)
                .map(|mut collected| collected.frames.move_to(&mut frames, missing, links))
        };
        if missing > 0 {
            self.close_books(missing, asked.is_ok(), wanted, &mut frames);
        } else if purpose == Purpose::Use {
            self.unhold_all(&mut frames);
        }
        asked.map(|()| frames)
    }

    /// Closes the books on what was asked of the pool.
    fn close_books(&self, asked: u64, granted: bool, wanted: u64, frames: &mut List) {
        let links = &self.pool.links;
        let mut books = lock(&self.books);
        books.asking -= asked;
        if !granted {
            self.quota.uncharge(wanted);
            let from_minimum = frames.len();
            frames.move_to(&mut books.held, from_minimum, links);
        }
        // Pages that came back meanwhile were kept in case the pool said no.
        let (mut spare, excess) = (List::new(), books.excess(self.min, &self.quota));
        books.held.move_to(&mut spare, excess, links);
        drop(books);
        self.pool.give_held(spare);
    }

    fn unhold_all(&self, frames: &mut List) {
        let (links, mut taken) = (&self.pool.links, List::new());
        while let Some(frame) = frames.pop(links) {
            lock(&self.pool.inventory).unhold(frame.node());
            taken.push(links, frame);
        }
        *frames = taken;
    }

    /// Takes a page back, to the minimum where that is not whole.
    pub(super) fn give_frame(&self, frame: Frame) {
        let mut books = lock(&self.books);
        self.quota.uncharge(1);
        if books.owed(self.min, &self.quota) > 0 {
            lock(&self.pool.inventory).hold(frame.node());
            books.held.push(&self.pool.links, frame);
        } else {
            drop(books);
            self.pool.give_frame(frame);
        }
    }

    /// Takes back what was reserved and not used.
    pub(super) fn give_held(&self, mut frames: List) {
        let links = &self.pool.links;
        let mut books = lock(&self.books);
        self.quota.uncharge(frames.len());
        let owed = books.owed(self.min, &self.quota);
        frames.move_to(&mut books.held, owed, links);
        drop(books);
        self.pool.give_held(frames);
    }

    /// A page that was charged is lost.
    pub(super) fn lose_one(&self) {
        let _books = lock(&self.books);
        self.quota.uncharge(1);
    }
}

impl Drop for Subpool<'_> {
    fn drop(&mut self) {
        let held = std::mem::replace(&mut lock(&self.books).held, List::new());
        self.pool.give_held(held);
    }
}
