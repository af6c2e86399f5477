//! Transparent huge pages: [`Thp`], a pool for every user, without any privilege.
//!
//! A place is anonymous memory, aligned to what one PMD maps. A page is made by touching one base page of it
//! and MADV_COLLAPSE, which puts all of it on one huge page whatever the host's `enabled` says, or answers with
//! an error. The touch is the dangerous part: at the limit of a memory cgroup it does not fail, it kills; so
//! the cgroup is asked for room before ([`Room`]).
//!
//! The memory is private, so a child of fork(2) has a copy of the pool and of every page in it.

use jumbo_inside::pool::{Claim, Room, make_huge};
use jumbo_inside::sys::collapse;
use rustix::io::Errno;

use super::super::error::{SetupError, SourceError};
use super::super::frame::Frame;
use super::super::window::{self, Window};
use super::hugetlb::{bind_parts, default_capacity, host_nodes};
use super::{Source, failed};
use crate::kernel::Root;
use crate::units::{NodeId, PageSize, Pages};

/// What a memory cgroup and the host keep for the rest of the process. At a cgroup's limit the kernel kills for a page of a stack as well, and for
/// the buffer of a file that is read, such as those with the limits themselves: some 16 KiB for each thread that asks.
const LEFT: usize = 4 << 20;

/// Anonymous memory, collapsed into THPs.
#[derive(Debug)]
pub struct Thp {
    window: Window,
    room: Room,
}

impl Thp {
    /// Pages of the PMD size, with addresses for twice the host's memory.
    ///
    /// # Errors
    /// [`SetupError`] where this kernel has no THP or no MADV_COLLAPSE (6.1), or there are no addresses.
    pub fn new() -> Result<Self, SetupError> {
        Self::at(&Root::host())
    }

    /// The same on a host whose files are behind `root`.
    ///
    /// # Errors
    /// As [`Thp::new`].
    pub fn at(root: &Root) -> Result<Self, SetupError> {
        let size = Self::size(root)?;
        Self::with_capacity(root, default_capacity(root, size)?)
    }

    /// The same, with addresses for `capacity` pages on each node.
    ///
    /// # Errors
    /// As [`Thp::new`].
    pub fn with_capacity(root: &Root, capacity: Pages) -> Result<Self, SetupError> {
        let window = Window::reserve(Self::size(root)?, host_nodes(root)?, capacity)?;
        bind_parts(&window).map_err(SetupError::call("mbind"))?;
        window::name(window.mapping(), window.length(), c"jumbo-pool");
        Ok(Self {
            window,
            room: Room::new(LEFT),
        })
    }

    fn size(root: &Root) -> Result<PageSize, SetupError> {
        match crate::kernel::thp::Thp::read(root)? {
            Some(thp) => Ok(thp.pmd_size),
            None => Err(SetupError::Size("this kernel has no THP".to_owned())),
        }
    }

    /// Kept until the page is there.
    fn room(&self, node: NodeId) -> Result<Claim<'_>, SourceError> {
        // The huge page, the base page that it replaces, and the page tables.
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
}
