//! The leaf of the pool that accesses memory: [`Window`], the addresses of a source's pages.
//!
//! A window is a range of addresses with a fixed address for each frame, node by node. It is
//! reserved once, without memory; a source maps memory there ([`super::Source::populate`]) and
//! frees it. Only the holder of a [`Frame`] accesses its memory, so no two callers share a page.
//! All calls are raw: no interposed libc function, and errno stays unchanged.
#![expect(
    unsafe_code,
    reason = "the leaf that maps and touches the pool's memory"
)]

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use jumbo_inside::pool::populate;

use super::NodeSet;
use super::error::SetupError;
use super::folio::Part;
use super::frame::{Frame, MAX_FRAMES};
use crate::units::{Bytes, PageSize, Pages};
use jumbo_sys::{self as sys, Reserved, at};

/// An owned range of addresses; unmapped by drop, except in a child of fork(2) that has not
/// inherited parts of it.
#[derive(Debug)]
pub struct OwnedRange {
    reserved: Option<Reserved>,
    /// First address with the requested alignment.
    pub(super) address: usize,
    /// [`Origin`] of the process whose children do not inherit parts of it; 0 if all is inherited.
    /// In a child those addresses belong to the program.
    kept_in: AtomicU32,
}

/// Addresses of a source's pages.
#[derive(Debug)]
pub struct Window {
    mapping: OwnedRange,
    size: PageSize,
    bytes: usize,
    per_node: u32,
    nodes: NodeSet,
}

impl OwnedRange {
    /// Reserves `length` bytes at a multiple of `align`, without access and without memory.
    pub(super) fn reserve(length: usize, align: usize) -> Result<Self> {
        let reserved = Reserved::new(length, align)?;
        Ok(Self {
            address: reserved.address,
            reserved: Some(reserved),
            kept_in: AtomicU32::new(0),
        })
    }

    /// Maps a file shared at the aligned start, without access: pages are opened one by one.
    pub(super) fn map_file(&self, length: usize, file: BorrowedFd<'_>) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies in this reservation, without references: callers do this once,
        // before they lend any address.
        unsafe { mm::mmap(at(self.address), length, ProtFlags::empty(), flags, file, 0) }.map(drop)
    }

    /// Maps a part of a file over a part of the range, shared, readable and writable, unreserved.
    pub(super) fn map_part(
        &self,
        offset: usize,
        length: usize,
        file: BorrowedFd<'_>,
        at_offset: u64,
    ) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let start = at(self.address + offset);
        self.keep_in(Origin::mark()?)?;
        // SAFETY: the range lies in this reservation, and its owner has lent nothing of it yet.
        unsafe { mm::mmap(start, length, prot, flags, file, at_offset)? };
        // SAFETY: the advice changes nothing in this process.
        unsafe { mm::madvise(start, length, Advice::LinuxDontFork) }
    }

    /// Records that children do not inherit parts of it. EFAULT if a parent of this process
    /// recorded that: other memory may be there by now.
    fn keep_in(&self, here: Origin) -> Result<()> {
        let first = self
            .kept_in
            .compare_exchange(0, here.0, Ordering::Relaxed, Ordering::Relaxed);
        match first {
            Err(of) if of != here.0 => Err(Errno::FAULT),
            _ => Ok(()),
        }
    }

    /// Populates a part in pages of `page` bytes; fails where a touch would kill. Linux 5.14.
    pub(super) fn populate(&self, offset: usize, length: usize, page: usize) -> Result<()> {
        populate(self.address + offset, length, page)
    }

    /// Makes a part readable and writable.
    pub(super) fn open(&self, offset: usize, length: usize) -> Result<()> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: more access to the pool's own memory changes no byte.
        unsafe { mm::mprotect(at(self.address + offset), length, access) }
    }

    /// Frees the anonymous memory of a part; its addresses stay mapped. A failure is harmless: the
    /// end of the range frees it too.
    pub(super) fn discard(&self, offset: usize, length: usize) {
        // SAFETY: the caller holds the part's frames, so no reference to its bytes exists.
        let _ = unsafe { sys::discard_locked(self.address + offset, length) };
    }

    /// Returns the bytes of a part.
    ///
    /// # Safety
    /// The part is mapped, readable and writable for `'a`, and this process has no other reference
    /// to it.
    pub(super) unsafe fn bytes_mut<'a>(&self, offset: usize, length: usize) -> &'a mut [u8] {
        // SAFETY: the caller's contract; the mapping is anonymous, or a file that only the pool can
        // truncate.
        unsafe { std::slice::from_raw_parts_mut(at(self.address + offset).cast(), length) }
    }
}

impl Drop for OwnedRange {
    fn drop(&mut self) {
        let kept_in = *self.kept_in.get_mut();
        if kept_in != 0 && !Origin(kept_in).is_here() {
            // Only addresses without memory are left, and mappings of the child may lie between
            // them.
            std::mem::forget(self.reserved.take());
        }
    }
}

/// Names the first `length` bytes of a mapping in /proc/PID/maps, if the kernel supports that.
pub(super) fn name(mapping: &OwnedRange, length: usize, name: &CStr) {
    sys::name(mapping.address, length, name);
}

impl Window {
    /// Reserves addresses for `capacity` pages of `size` on each of `nodes`.
    ///
    /// # Errors
    /// [`SetupError::Window`] without that many addresses, or beyond `ulimit -v`.
    pub(super) fn reserve(
        size: PageSize,
        nodes: NodeSet,
        capacity: Pages,
    ) -> std::result::Result<Self, SetupError> {
        let per_node = u32::try_from(capacity.0)
            .unwrap_or(MAX_FRAMES)
            .clamp(1, MAX_FRAMES);
        let frames = u64::from(per_node) * u64::from(nodes.len().max(1));
        let whole = Bytes(frames.saturating_mul(size.bytes()));
        let none = || SetupError::Window(whole);
        let bytes = usize::try_from(size.bytes()).map_err(|_| none())?;
        let length = usize::try_from(whole.0).map_err(|_| none())?;
        Ok(Self {
            mapping: OwnedRange::reserve(length, bytes).map_err(|_| none())?,
            size,
            bytes,
            per_node,
            nodes,
        })
    }

    /// Returns the page size.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> NodeSet {
        self.nodes
    }

    /// Returns the number of frames of each node.
    pub fn capacity(&self) -> Pages {
        Pages(self.per_node.into())
    }

    pub(super) fn mapping(&self) -> &OwnedRange {
        &self.mapping
    }

    /// Returns the length for all nodes, in bytes.
    pub(super) fn length(&self) -> usize {
        self.nodes.len() as usize * self.per_node as usize * self.bytes
    }

    /// Returns the offset and length of a node's part.
    pub(super) fn part(&self, node: crate::units::NodeId) -> (usize, usize) {
        let length = self.per_node as usize * self.bytes;
        (self.nodes.rank(node) as usize * length, length)
    }

    /// Returns the page size in bytes.
    pub(super) fn page(&self) -> usize {
        self.bytes
    }

    /// Returns the offset of a frame's page in the window.
    pub(super) fn offset(&self, frame: &Frame) -> usize {
        let row = self.nodes.rank(frame.node()) as usize * self.per_node as usize;
        (row + frame.index() as usize) * self.bytes
    }

    pub(super) fn address(&self, frame: &Frame) -> usize {
        self.mapping.address + self.offset(frame)
    }

    /// Returns the bytes of a populated page.
    pub(super) fn bytes<'a>(&'a self, frame: &'a Frame) -> &'a [u8] {
        // SAFETY: the page is populated, readable and writable from `Source::populate` to
        // `Source::release`, and the frame is borrowed; mapped memory is always initialized.
        unsafe { std::slice::from_raw_parts(at(self.address(frame)).cast(), self.bytes) }
    }

    /// Returns the bytes of a populated page, writable.
    pub(super) fn bytes_mut<'a>(&'a self, frame: &'a mut Frame) -> &'a mut [u8] {
        // SAFETY: as for `bytes`; the frame is unique and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(at(self.address(frame)).cast(), self.bytes) }
    }

    /// Returns the bytes of a part of a populated page.
    pub(super) fn folio<'a>(&'a self, part: &'a Part) -> &'a [u8] {
        let at = at(self.mapping.address + part.offset());
        // SAFETY: its page is held for the life of the part, so it is populated as for `bytes`; the
        // part is borrowed, and no other part has any of its bytes.
        unsafe { std::slice::from_raw_parts(at.cast(), part.length()) }
    }

    /// Returns the bytes of a part of a populated page, writable.
    pub(super) fn folio_mut<'a>(&'a self, part: &'a mut Part) -> &'a mut [u8] {
        let at = at(self.mapping.address + part.offset());
        // SAFETY: as for `folio`; the part is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), part.length()) }
    }

    /// Makes a frame's addresses readable and writable.
    pub(super) fn open(&self, frame: &Frame) -> Result<()> {
        self.mapping.open(self.offset(frame), self.bytes)
    }

    /// Removes the access to the addresses of an empty frame, so that mlockall(2) does not fill
    /// them. A failure (too many mappings) is harmless.
    pub(super) fn close(&self, frame: &Frame) {
        // SAFETY: the caller holds the frame, so no other reference to the page's bytes exists.
        let _ =
            unsafe { mm::mprotect(at(self.address(frame)), self.bytes, MprotectFlags::empty()) };
    }

    /// Populates the first `length` bytes of a page; fails where a touch would kill.
    pub(super) fn populate(&self, frame: &Frame, length: usize) -> Result<()> {
        populate(self.address(frame), length.min(self.bytes), self.bytes)
    }

    /// Frees the anonymous memory of a frame; its addresses stay mapped.
    pub(super) fn discard(&self, frame: &Frame) -> Result<()> {
        // SAFETY: the caller holds the frame, so no other reference to the page's bytes exists.
        unsafe { sys::discard_locked(self.address(frame), self.bytes) }
    }

    /// Excludes the whole window from children of fork(2).
    pub(super) fn keep_from_children(&self) -> Result<()> {
        self.mapping.keep_in(Origin::mark()?)?;
        let start = at(self.mapping.address);
        // SAFETY: the advice changes nothing in this process.
        unsafe { mm::madvise(start, self.length(), Advice::LinuxDontFork) }
    }

    /// Moves a huge page between the window and `offset` of `region`; the old addresses stay
    /// mapped, and empty. mremap(2) with MREMAP_DONTUNMAP, Linux 5.7.
    pub(super) fn relocate(
        &self,
        frame: &Frame,
        region: &OwnedRange,
        offset: usize,
        out: bool,
    ) -> Result<()> {
        let (home, away) = (at(self.address(frame)), at(region.address + offset));
        let (from, to) = if out { (home, away) } else { (away, home) };
        let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        // SAFETY: the caller holds the frame, to which both ranges belong.
        unsafe { mm::mremap_fixed(from, self.bytes, self.bytes, flags, to) }.map(drop)
    }
}

/// The process that created an object, not by its PID: a grandchild may reuse that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin(u32);

/// Number of forks from the first process that counted them to this one, plus one: 0 is no process.
static FORKS: AtomicU32 = AtomicU32::new(1);

impl Origin {
    /// Returns this process, and starts counting its forks (pthread_atfork(3)).
    pub(super) fn mark() -> Result<Self> {
        static REGISTERED: OnceLock<i32> = OnceLock::new();
        extern "C" fn forked() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler only increments an atomic, which is allowed anywhere in a child.
        let register = || unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        match REGISTERED.get_or_init(register) {
            0 => Ok(Self(FORKS.load(Ordering::Relaxed))),
            code => Err(Errno::from_raw_os_error(*code)),
        }
    }

    /// Reports whether this is the current process.
    pub(super) fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}
