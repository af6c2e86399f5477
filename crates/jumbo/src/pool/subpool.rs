//! A part of a pool with bounds of its own: [`Subpool`].
//!
//! What `size=` and `min_size=` of a hugetlbfs mount are to the kernel. The minimum is held as pages, so it is
//! promised whatever else happens to the pool: `held == max(0, minimum - charged)` whenever no thread is inside.

use std::sync::Mutex;

use super::collect::Purpose;
use super::frame::{Frame, List};
use super::{Error, Page, Pool, Reservation, lock};
use crate::units::Pages;

/// A part of a pool. Takes beyond its maximum fail, whatever the pool has; its minimum is reserved.
///
/// Threads that take from one subpool wait for each other while the source makes a page.
#[derive(Debug)]
pub struct Subpool<'p> {
    pool: &'p Pool,
    max: u64,
    min: u64,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    /// Pages taken and reserved through the subpool.
    charged: u64,
    /// What is left of the minimum.
    held: List,
}

impl Pool {
    /// Makes a subpool with at most `max` pages (`None`: as many as the pool has), of which `min` are
    /// reserved for it now.
    ///
    /// # Errors
    /// As [`Pool::reserve`]; [`Error::Quota`] where the minimum is beyond the maximum.
    pub fn subpool(&self, max: Option<Pages>, min: Pages) -> Result<Subpool<'_>, Error> {
        let max = max.unwrap_or(Pages(u64::MAX));
        if max < min {
            return Err(Error::Quota {
                wanted: min,
                max,
                used: Pages(0),
            });
        }
        let collected = self.collect_pages(min.0, self.placement, Purpose::Promise)?;
        Ok(Subpool {
            pool: self,
            max: max.0,
            min: min.0,
            books: Mutex::new(Books {
                charged: 0,
                held: collected.frames,
            }),
        })
    }
}

impl<'p> Subpool<'p> {
    /// Pages taken and reserved through it.
    pub fn charged(&self) -> Pages {
        Pages(lock(&self.books).charged)
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
        let frame = self.charge(1, Purpose::Use)?.pop(&self.pool.links);
        frame
            .map(|frame| Page::new(self.pool, Some(self), frame))
            .ok_or(Error::Placement)
    }

    /// Reserves `pages`, all or none.
    ///
    /// # Errors
    /// [`Error::Quota`]; those of [`Pool::reserve`].
    pub fn reserve(&'p self, pages: Pages) -> Result<Reservation<'p>, Error> {
        let held = self.charge(pages.0, Purpose::Promise)?;
        Ok(Reservation::new(self.pool, Some(self), held))
    }

    /// Pages of the minimum, and what that lacks of the pool's.
    fn charge(&self, wanted: u64, purpose: Purpose) -> Result<List, Error> {
        self.pool.check_fits(wanted)?;
        let mut books = lock(&self.books);
        if wanted > self.max.saturating_sub(books.charged) {
            return Err(Error::Quota {
                wanted: Pages(wanted),
                max: Pages(self.max),
                used: Pages(books.charged),
            });
        }
        let missing = wanted.saturating_sub(books.held.len());
        let mut frames = match missing {
            0 => List::new(),
            _ => {
                let collected = self
                    .pool
                    .collect_pages(missing, self.pool.placement, purpose)?;
                collected.frames
            }
        };
        books.charged += wanted;
        for _ in missing..wanted {
            let Some(frame) = books.held.pop(&self.pool.links) else {
                break;
            };
            if purpose == Purpose::Use {
                lock(&self.pool.inventory).unhold(frame.node());
            }
            frames.push(&self.pool.links, frame);
        }
        Ok(frames)
    }

    /// How many of `pages` that are uncharged the minimum wants held.
    fn uncharge(&self, books: &mut Books, pages: u64) -> u64 {
        books.charged -= pages;
        let owed = self.min.saturating_sub(books.charged);
        owed.saturating_sub(books.held.len()).min(pages)
    }

    /// Takes a page back, to the minimum where that is not whole.
    pub(super) fn give_frame(&self, frame: Frame) {
        let mut books = lock(&self.books);
        if self.uncharge(&mut books, 1) > 0 {
            lock(&self.pool.inventory).hold(frame.node());
            books.held.push(&self.pool.links, frame);
        } else {
            drop(books);
            self.pool.give_frame(frame);
        }
    }

    /// Takes back what was reserved and not used.
    pub(super) fn give_held(&self, mut frames: List) {
        let mut books = lock(&self.books);
        let owed = self.uncharge(&mut books, frames.len());
        frames.move_to(&mut books.held, owed, &self.pool.links);
        drop(books);
        self.pool.give_held(frames);
    }

    /// A page that was charged is lost.
    pub(super) fn lose_one(&self) {
        lock(&self.books).charged -= 1;
    }
}

impl Drop for Subpool<'_> {
    fn drop(&mut self) {
        let held = std::mem::replace(&mut lock(&self.books).held, List::new());
        self.pool.give_held(held);
    }
}
