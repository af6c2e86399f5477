//! The kernel's own huge pages: [`Hugetlb`].
//!
//! One sparse hugetlbfs file is mapped once, without a reservation; a page of the pool is a page of
//! that file. Populating it takes a page of the kernel's pool, or a surplus page within the
//! kernel's overcommit; punching a hole returns it. MADV_POPULATE_WRITE reports an empty pool and
//! the limit of a cgroup as errors, where a touch would cause SIGBUS. [`crate::host_pools`] resizes
//! the kernel's pool.
//!
//! The file is shared memory, so a child of fork(2) must not have it: the window is not mapped
//! there, and the pool returns [`super::super::Error::Forked`].

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::super::NodeSet;
use super::super::error::{SetupError, SourceError};
use super::super::frame::Frame;
use super::super::window::{Origin, OwnedRange, Window};
use super::{Source, failed};
use crate::units::{Bytes, NodeId, PageSize, Pages};
use jumbo_sys as sys;
use jumbo_sys::files::{Root, nodes};
use jumbo_sys::proc::kib_field;

/// Name of the file in /proc/PID/maps (after `/memfd:`).
const NAME: &CStr = c"jumbo-pool";
/// Default capacity of a window, as a multiple of the host's memory.
const WINDOW_PER_MEMORY: u64 = 2;

/// Pages of a hugetlbfs file.
#[derive(Debug)]
pub struct Hugetlb {
    window: Window,
    file: OwnedFd,
    origin: Origin,
}

impl Hugetlb {
    /// Creates a source of the kernel's pool of `size`, with addresses for twice the host's memory.
    ///
    /// # Errors
    /// [`SetupError::Call`] with ENODEV or EINVAL if the kernel has no pool of that size.
    pub fn new(size: PageSize) -> Result<Self, SetupError> {
        Self::at(&Root::host(), size)
    }

    /// Same as [`Hugetlb::new`], with the kernel's files below `root`.
    ///
    /// # Errors
    /// Same as [`Hugetlb::new`].
    pub fn at(root: &Root, size: PageSize) -> Result<Self, SetupError> {
        Self::with_capacity(root, size, default_capacity(root, size)?)
    }

    /// Same as [`Hugetlb::at`], with addresses for `capacity` pages on each node.
    ///
    /// # Errors
    /// Same as [`Hugetlb::new`].
    pub fn with_capacity(root: &Root, size: PageSize, capacity: Pages) -> Result<Self, SetupError> {
        let file =
            sys::memfd(NAME, Some(size)).map_err(SetupError::call("memfd_create(MFD_HUGETLB)"))?;
        let window = Window::reserve(size, host_nodes(root)?, capacity)?;
        let length = window.length();
        rustix::fs::ftruncate(&file, length as u64).map_err(SetupError::call("ftruncate"))?;
        window
            .mapping()
            .map_file(length, file.as_fd())
            .map_err(SetupError::call("mmap of the pool's file"))?;
        let children = window.keep_from_children();
        children.map_err(SetupError::call("madvise(MADV_DONTFORK)"))?;
        bind_parts(&window).map_err(SetupError::call("mbind"))?;
        let origin = Origin::mark().map_err(SetupError::call("pthread_atfork"))?;
        Ok(Self {
            window,
            file,
            origin,
        })
    }

    /// Fails in a child of fork(2): the pages are the parent's, and their addresses may have other
    /// memory.
    fn check_here(&self, frame: &Frame) -> Result<(), SourceError> {
        if self.is_here() {
            return Ok(());
        }
        Err(SourceError {
            node: frame.node(),
            operation: "fork",
            errno: Errno::OWNERDEAD,
            why: "the pool's pages are another process's",
        })
    }
}

/// Returns the nodes that this process may use; node 0 on a kernel without NUMA.
pub(super) fn host_nodes(root: &Root) -> Result<NodeSet, SetupError> {
    let nodes: NodeSet = nodes(root)?.into_iter().collect();
    let allowed = sys::allowed_nodes().map_or(nodes, |mask| {
        nodes
            .iter()
            .filter(|node| mask >> node.0 & 1 == 1)
            .collect()
    });
    Ok(if allowed.is_empty() {
        NodeSet::of(NodeId(0))
    } else {
        allowed
    })
}

/// Returns the default number of pages with addresses on each node.
pub(super) fn default_capacity(root: &Root, size: PageSize) -> Result<Pages, SetupError> {
    let file = "proc/meminfo";
    let total = kib_field(&root.read_bytes(file)?, b"MemTotal:");
    let total = total.ok_or_else(|| root.misread(file, "no `MemTotal:`"))?.0;
    let pages = Bytes(total.saturating_mul(WINDOW_PER_MEMORY)).whole_pages(size);
    Ok(Pages(pages.0.max(1)))
}

/// Binds each node's part of a window to its node, if there are several.
pub(super) fn bind_parts(window: &Window) -> rustix::io::Result<()> {
    if window.nodes().len() < 2 {
        return Ok(());
    }
    window.nodes().iter().try_for_each(|node| {
        let (offset, length) = window.part(node);
        sys::bind(
            window.mapping().address + offset,
            length,
            NodeSet::of(node).mask(),
        )
    })
}

fn why(errno: Errno) -> &'static str {
    match errno {
        Errno::FAULT => {
            "the kernel's pool and overcommit, or a cgroup's hugetlb limit, are used up"
        }
        Errno::NOMEM => {
            "the kernel's pool and overcommit, or a cgroup's limit on reservations, are used up"
        }
        Errno::INVAL => "a kernel before Linux 5.14",
        _ => "the kernel's answer",
    }
}

impl Source for Hugetlb {
    fn window(&self) -> &Window {
        &self.window
    }

    fn populate(&self, frame: &Frame) -> Result<(), SourceError> {
        self.check_here(frame)?;
        let failed = |operation| failed(frame.node(), operation, why);
        self.window.open(frame).map_err(failed("mprotect"))?;
        self.window
            .populate(frame, self.window.page())
            .map_err(failed("MADV_POPULATE_WRITE"))
            .inspect_err(|_| self.window.close(frame))
    }

    fn release(&self, frame: &Frame) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (self.window.offset(frame), self.window.page());
        if !self.is_here() {
            return;
        }
        // A signal can interrupt it; other failures cannot be handled here.
        while rustix::fs::fallocate(&self.file, hole, offset as u64, length as u64)
            == Err(Errno::INTR)
        {}
        self.window.close(frame);
    }

    fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    fn place(&self, frame: &Frame, region: &OwnedRange, offset: usize) -> Result<(), SourceError> {
        self.check_here(frame)?;
        let failed = |operation| failed(frame.node(), operation, why);
        let (from, length) = (self.window.offset(frame) as u64, self.window.page());
        region
            .map_part(offset, length, self.file.as_fd(), from)
            .map_err(failed("mmap into a region"))?;
        // The page is present: this fills only the page table.
        region
            .populate(offset, length, length)
            .map_err(failed("MADV_POPULATE_WRITE"))
    }

    /// Does nothing: the page never moved, and its second mapping is unmapped with the region.
    fn unplace(&self, _: &Frame, _: &OwnedRange, _: usize) -> Result<(), SourceError> {
        Ok(())
    }
}
