//! A page in use: [`Page`].

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::frame::Frame;
use super::{Error, Placement, Pool, Subpool};
use crate::units::{NodeId, PageSize};

/// A huge page, taken out of a pool. Dropping it gives it back; nothing can use it after that.
#[derive(Debug)]
pub struct Page<'p> {
    pool: &'p Pool,
    subpool: Option<&'p Subpool<'p>>,
    frame: ManuallyDrop<Frame>,
}

impl Pool {
    /// Takes a page: a free one, else a surplus page. What it holds is unspecified: zeroes, or what
    /// somebody of this process left there.
    ///
    /// # Errors
    /// [`Error::Exhausted`], [`Error::Source`], [`Error::Placement`], [`Error::Window`], [`Error::Forked`].
    pub fn take(&self) -> Result<Page<'_>, Error> {
        self.take_placed(self.placement)
    }

    /// The same, from the nodes of a placement of its own.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_placed(&self, placement: Placement) -> Result<Page<'_>, Error> {
        let (frame, _) = self.take_frame(placement)?;
        Ok(Page::new(self, None, frame))
    }

    /// Takes a page that holds zeroes.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_zeroed(&self) -> Result<Page<'_>, Error> {
        let (frame, fresh) = self.take_frame(self.placement)?;
        let mut page = Page::new(self, None, frame);
        if !fresh {
            page.bytes_mut().fill(0);
        }
        Ok(page)
    }
}

impl<'p> Page<'p> {
    pub(super) fn new(pool: &'p Pool, subpool: Option<&'p Subpool<'p>>, frame: Frame) -> Self {
        Self {
            pool,
            subpool,
            frame: ManuallyDrop::new(frame),
        }
    }

    /// The node that it is on.
    pub fn node(&self) -> NodeId {
        self.frame.node()
    }

    /// Its size.
    pub fn size(&self) -> PageSize {
        self.pool.page_size()
    }

    /// What it holds.
    pub fn bytes(&self) -> &[u8] {
        self.pool.source.window().bytes(&self.frame)
    }

    /// What it holds, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.pool.source.window().bytes_mut(&mut self.frame)
    }

    /// Its address, for what is given to the kernel or to C. It is good for as long as the page is.
    pub fn as_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.bytes_mut()).cast()
    }
}

impl Drop for Page<'_> {
    #[expect(unsafe_code, reason = "the frame leaves the page in its drop")]
    fn drop(&mut self) {
        // SAFETY: this is the drop, so nobody touches the field again.
        let frame = unsafe { ManuallyDrop::take(&mut self.frame) };
        match self.subpool {
            Some(subpool) => subpool.give_frame(frame),
            None => self.pool.give_frame(frame),
        }
    }
}
