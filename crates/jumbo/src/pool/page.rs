//! Taken pages: [`Page`], which borrows its pool, and [`OwnedPage`], which keeps it alive.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::frame::Frame;
use super::{Error, Placement, Pool};
use crate::units::{NodeId, PageSize};

/// A huge page, taken from a pool; drop returns it. `P` is the reference to the pool.
#[derive(Debug)]
pub struct Taken<P: Deref<Target = Pool>> {
    pub(super) frame: Frame,
    pub(super) pool: P,
}

/// A page that borrows its pool.
pub type Page<'p> = Taken<&'p Pool>;

/// A page that keeps its pool alive, so it can be stored beside the pool and sent to any thread.
///
/// ```
/// use std::sync::Arc;
/// use jumbo::pool::{Placement, Pool, Thp};
/// use jumbo::units::Pages;
///
/// let pool = Arc::new(Pool::new(Thp::new()?, Placement::of_thread()?));
/// pool.set_overcommit(Pages(1));
/// let mut page = pool.take_owned()?;
/// std::thread::spawn(move || page.bytes_mut()[0] = 1).join().unwrap();
/// assert_eq!(pool.counters().total, Pages(0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type OwnedPage = Taken<Arc<Pool>>;

impl Pool {
    /// Takes a free page, else a surplus page. Its content is unspecified: zeroes, or data of an
    /// earlier user in this process.
    ///
    /// # Errors
    /// [`Error::Exhausted`], [`Error::Source`], [`Error::Placement`], [`Error::Window`],
    /// [`Error::Forked`].
    pub fn take(&self) -> Result<Page<'_>, Error> {
        self.take_placed(self.placement)
    }

    /// Same as [`Pool::take`], with its own placement.
    ///
    /// # Errors
    /// Same as [`Pool::take`].
    pub fn take_placed(&self, placement: Placement) -> Result<Page<'_>, Error> {
        let (frame, _) = self.take_frame(placement)?;
        Ok(Taken { pool: self, frame })
    }

    /// Same as [`Pool::take`]; the page keeps the pool alive.
    ///
    /// # Errors
    /// Same as [`Pool::take`].
    pub fn take_owned(self: &Arc<Self>) -> Result<OwnedPage, Error> {
        let (frame, _) = self.take_frame(self.placement)?;
        let pool = Arc::clone(self);
        Ok(Taken { pool, frame })
    }

    /// Takes a zeroed page.
    ///
    /// # Errors
    /// Same as [`Pool::take`].
    pub fn take_zeroed(&self) -> Result<Page<'_>, Error> {
        let (frame, fresh) = self.take_frame(self.placement)?;
        let mut page = Taken { pool: self, frame };
        if !fresh {
            page.bytes_mut().fill(0);
        }
        Ok(page)
    }
}

impl<P: Deref<Target = Pool>> Taken<P> {
    /// Returns its pool.
    pub fn pool(&self) -> &P {
        &self.pool
    }

    /// Returns its node.
    pub fn node(&self) -> NodeId {
        self.frame.node()
    }

    /// Returns its size.
    pub fn size(&self) -> PageSize {
        self.pool.page_size()
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.pool.source.window().bytes(&self.frame)
    }

    /// Returns its bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.pool.source.window().bytes_mut(&mut self.frame)
    }

    /// Returns its address, for the kernel or C code; valid for the life of the page.
    pub fn as_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.bytes_mut()).cast()
    }
}

impl<P: Deref<Target = Pool>> Drop for Taken<P> {
    fn drop(&mut self) {
        self.pool.give_frame(self.frame.leave());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::pool::Model;
    use crate::units::Pages;

    #[test]
    fn owned_pages_go_to_a_thread_and_keep_the_pool_alive() {
        let model = Model::new(&[16]).unwrap();
        let pool = Arc::new(Pool::new(model, Placement::of_thread().unwrap()));
        pool.resize(Pages(2));
        pool.set_overcommit(Pages(2));
        let watched = Arc::downgrade(&pool);
        let (sender, receiver) = mpsc::channel::<OwnedPage>();
        let reader = thread::spawn(move || {
            let last = receiver.iter().enumerate().map(|(at, page)| {
                let written = u8::try_from(at).unwrap();
                assert!(page.bytes().iter().all(|byte| *byte == written));
                page
            });
            last.last()
        });
        for at in 0..8 {
            // The reader may not have returned the missing page yet.
            let mut page = loop {
                match pool.take_owned() {
                    Ok(page) => break page,
                    Err(Error::Exhausted(_)) => thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            };
            page.bytes_mut().fill(at);
            sender.send(page).unwrap();
        }
        drop(sender);
        let last = reader.join().unwrap().unwrap();
        assert_eq!(pool.counters().used(), Pages(1));
        drop(pool);
        assert_eq!(last.bytes()[0], 7);
        assert_eq!(last.pool().counters().used(), Pages(1));
        drop(last);
        assert!(watched.upgrade().is_none());
    }
}
