//! Transparent huge pages: [`Thp`], a source without privilege.
//!
//! Its memory is anonymous, aligned to the PMD size. A page is made by a touch of one base page and
//! MADV_COLLAPSE, which makes it huge whatever the host's `enabled` is, or returns an error. The
//! touch is the dangerous part: at the limit of a memory cgroup it kills. So the room is checked
//! first ([`Room`]).
//!
//! The memory is private, so a child of fork(2) has a copy of the pool and all its pages.

use jumbo_inside::pool::{Claim, Room, make_huge};
use jumbo_sys::collapse;
use rustix::io::Errno;

use super::super::error::{SetupError, SourceError};
use super::super::frame::Frame;
use super::super::window::{self, OwnedRange, Window};
use super::hugetlb::{bind_parts, default_capacity, host_nodes};
use super::{Source, failed};
use crate::units::{NodeId, PageSize, Pages};
use jumbo_sys::files::Root;

/// Room left for the rest of the process. At a cgroup's limit the kernel also kills for a page of a
/// stack, and for the buffers of files, such as those of the limits: some 16 KiB for each thread
/// that reads them.
const MIN_FREE_BYTES: usize = 4 << 20;

/// Anonymous memory, collapsed into THPs.
#[derive(Debug)]
pub struct Thp {
    window: Window,
    room: Room,
}

impl Thp {
    /// Creates a source of PMD-sized pages, with addresses for twice the host's memory.
    ///
    /// # Errors
    /// [`SetupError`] on a kernel without THP or MADV_COLLAPSE (Linux 6.1), or without addresses.
    pub fn new() -> Result<Self, SetupError> {
        Self::at(&Root::host())
    }

    /// Same as [`Thp::new`], with the kernel's files below `root`.
    ///
    /// # Errors
    /// Same as [`Thp::new`].
    pub fn at(root: &Root) -> Result<Self, SetupError> {
        let size = Self::size(root)?;
        Self::with_capacity(root, default_capacity(root, size)?)
    }

    /// Same as [`Thp::at`], with addresses for `capacity` pages on each node.
    ///
    /// # Errors
    /// Same as [`Thp::new`].
    pub fn with_capacity(root: &Root, capacity: Pages) -> Result<Self, SetupError> {
        let window = Window::reserve(Self::size(root)?, host_nodes(root)?, capacity)?;
        bind_parts(&window).map_err(SetupError::call("mbind"))?;
        window::name(window.mapping(), window.length(), c"jumbo-pool");
        Ok(Self {
            window,
            room: Room::new(MIN_FREE_BYTES),
        })
    }

    fn size(root: &Root) -> Result<PageSize, SetupError> {
        match jumbo_sys::thp::Thp::read(root)? {
            Some(thp) => Ok(thp.pmd_size),
            None => Err(SetupError::Size("this kernel has no THP".to_owned())),
        }
    }

    /// Claims the room for a page, held until the page is made.
    fn room(&self, node: NodeId) -> Result<Claim<'_>, SourceError> {
        // The huge page, the base page that it replaces, and page tables.
        let needed = self.window.page() + (64 << 10);
        self.room.claim(needed).ok_or(SourceError {
            node,
            operation: "memory cgroup",
            errno: Errno::BUSY,
            why: "the cgroup's memory limit, or the host, leaves no room for a huge page",
        })
    }
}

fn why(errno: Errno) -> &'static str {
    match errno {
        Errno::BUSY => "the memory cgroup is at its limit",
        Errno::NOMEM => "no huge page can be formed, or the commit limit is reached",
        Errno::AGAIN => "no huge page can be formed now",
        Errno::INVAL => "a kernel before Linux 6.1, or THP is off for this process",
        _ => "the kernel's answer",
    }
}

impl Source for Thp {
    fn window(&self) -> &Window {
        &self.window
    }

    fn populate(&self, frame: &Frame) -> Result<(), SourceError> {
        let node = frame.node();
        let _claim = self.room(node)?;
        let open = self.window.open(frame);
        open.map_err(failed(node, "mprotect", why))?;
        let (address, page) = (self.window.address(frame), self.window.page());
        make_huge(address, page, page, collapse)
            .map_err(failed(node, "MADV_POPULATE_WRITE and MADV_COLLAPSE", why))
            .inspect_err(|_| self.release(frame))
    }

    fn release(&self, frame: &Frame) {
        let _ = self.window.discard(frame);
        self.window.close(frame);
    }

    /// Without MREMAP_DONTUNMAP, which valgrind lacks, the page is made anew.
    fn place(&self, frame: &Frame, region: &OwnedRange, offset: usize) -> Result<(), SourceError> {
        let failed = |operation| failed(frame.node(), operation, why);
        match self.window.relocate(frame, region, offset, true) {
            Err(Errno::INVAL) => {
                let page = self.window.page();
                let _claim = self.room(frame.node())?;
                region.open(offset, page).map_err(failed("mprotect"))?;
                make_huge(region.address + offset, page, page, collapse)
                    .map_err(failed("MADV_POPULATE_WRITE and MADV_COLLAPSE"))
                    .inspect_err(|_| region.discard(offset, page))?;
                self.release(frame);
                Ok(())
            }
            moved => moved.map_err(failed("mremap")),
        }
    }

    fn unplace(
        &self,
        frame: &Frame,
        region: &OwnedRange,
        offset: usize,
    ) -> Result<(), SourceError> {
        match self.window.relocate(frame, region, offset, false) {
            Err(Errno::INVAL) => {
                region.discard(offset, self.window.page());
                self.populate(frame)
            }
            moved => moved
                .map_err(failed(frame.node(), "mremap", why))
                .inspect_err(|_| self.release(frame)),
        }
    }
}
