//! The one leaf of the pool that touches memory: [`Window`], the addresses of a source's pages.
//!
//! A window is a range of addresses in which each frame has its place for good, node after node. It is
//! reserved once, without memory behind it; a source puts memory there ([`super::Source::populate`]) and
//! takes it away again. What is done to a frame's memory is done by the holder of the [`Frame`], so no two
//! callers can disagree about a page. Every call is raw: no libc wrapper that could be interposed, and
//! errno stays as it was.
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
use crate::kernel::{Reserved, at, sys};
use crate::units::{Bytes, PageSize, Pages};

/// A range of addresses of its own; unmapped when dropped, but for one with parts that a child of fork(2) has not
/// inherited, in such a child.
#[derive(Debug)]
pub struct OwnedRange {
    reserved: Option<Reserved>,
    /// The first address that is aligned as was asked.
    pub(super) address: usize,
    /// The number of the process out of whose children parts of it are kept; 0 where none are. In a child
    /// those addresses are the program's.
    kept_in: AtomicU32,
}

/// The places of a source's pages.
#[derive(Debug)]
pub struct Window {
    mapping: OwnedRange,
    size: PageSize,
    bytes: usize,
    per_node: u32,
    nodes: NodeSet,
}

impl OwnedRange {
    /// Reserves `length` bytes at a multiple of `align`, with no access and no memory behind them.
    pub(super) fn reserve(length: usize, align: usize) -> Result<Self> {
        let reserved = Reserved::new(length, align)?;
        Ok(Self {
            address: reserved.address,
            reserved: Some(reserved),
            kept_in: AtomicU32::new(0),
        })
    }

    /// Puts a file over the mapping, from its aligned start on, shared: a window, in which pages are opened one by one.
    pub(super) fn map_file(&self, length: usize, file: BorrowedFd<'_>) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies in this reservation, to which no reference exists: the
        // callers do this once, before they hand out any address.
        unsafe { mm::mmap(at(self.address), length, ProtFlags::empty(), flags, file, 0) }.map(drop)
    }

    /// Puts a part of a file over a part of the mapping, readable and writable, shared; no reservation.
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
        // SAFETY: the range lies in this reservation; its owner asks, who has handed nothing of it out yet.
        unsafe { mm::mmap(start, length, prot, flags, file, at_offset)? };
        // SAFETY: the advice changes nothing in this process.
        unsafe { mm::madvise(start, length, Advice::LinuxDontFork) }
    }

    /// Remembers that parts of it are for this process alone. EFAULT where that was said in a parent of this
    /// process: other memory may be there by now.
    fn keep_in(&self, here: Origin) -> Result<()> {
        let first = self
            .kept_in
            .compare_exchange(0, here.0, Ordering::Relaxed, Ordering::Relaxed);
        match first {
            Err(of) if of != here.0 => Err(Errno::FAULT),
            _ => Ok(()),
        }
    }

    /// Makes memory resident in pages of `page` bytes, and reports failure where a touch would kill. Linux 5.14.
    pub(super) fn populate(&self, offset: usize, length: usize, page: usize) -> Result<()> {
        populate(self.address + offset, length, page)
    }

    /// The bytes of a part of it that is mapped, readable and writable.
    ///
    /// # Safety
    /// The part is mapped so, and stays so for `'a`; there is no other reference to it in this process.
    pub(super) unsafe fn bytes_mut<'a>(&self, offset: usize, length: usize) -> &'a mut [u8] {
        // SAFETY: the caller's contract; the mapping is anonymous or a file that only we can truncate.
        unsafe { std::slice::from_raw_parts_mut(at(self.address + offset).cast(), length) }
    }
}

impl Drop for OwnedRange {
    fn drop(&mut self) {
        let kept_in = *self.kept_in.get_mut();
        if kept_in != 0 && !Origin(kept_in).is_here() {
            // What is left of it here are addresses without memory; between them may be what the child has
            // mapped since.
            std::mem::forget(self.reserved.take());
        }
    }
}

/// Names the first `length` bytes of a mapping in /proc/PID/maps, where the kernel can.
pub(super) fn name(mapping: &OwnedRange, length: usize, name: &CStr) {
    sys::name(mapping.address, length, name);
}

impl Window {
    /// Reserves addresses for `capacity` pages of `size` on each of `nodes`.
    ///
    /// # Errors
    /// [`SetupError::Window`] where there are not that many addresses (or `ulimit -v` says so).
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

    /// The size of its pages.
    pub fn size(&self) -> PageSize {
        self.size
    }

    /// The nodes that have places in it.
    pub fn nodes(&self) -> NodeSet {
        self.nodes
    }

    /// How many places each node has.
    pub fn capacity(&self) -> Pages {
        Pages(self.per_node.into())
    }

    /// All of it.
    pub(super) fn mapping(&self) -> &OwnedRange {
        &self.mapping
    }

    /// Its first address.
    pub(super) fn first_address(&self) -> usize {
        self.mapping.address
    }

    /// In bytes, of all nodes.
    pub(super) fn length(&self) -> usize {
        self.nodes.len() as usize * self.per_node as usize * self.bytes
    }

    /// The part of one node: offset and length.
    pub(super) fn part(&self, node: crate::units::NodeId) -> (usize, usize) {
        let length = self.per_node as usize * self.bytes;
        (self.nodes.rank(node) as usize * length, length)
    }

    /// In bytes, of one page.
    pub(super) fn page(&self) -> usize {
        self.bytes
    }

    /// Where a frame's page is, from the start of the window.
    pub(super) fn offset(&self, frame: &Frame) -> usize {
        let row = self.nodes.rank(frame.node()) as usize * self.per_node as usize;
        (row + frame.index() as usize) * self.bytes
    }

    /// Where a frame's page is.
    pub(super) fn address(&self, frame: &Frame) -> usize {
        self.mapping.address + self.offset(frame)
    }

    /// The bytes of a populated page.
    pub(super) fn bytes<'a>(&'a self, frame: &'a Frame) -> &'a [u8] {
        // SAFETY: the page is populated, readable and writable from `Source::populate` until its frame
        // goes back there, and the frame is borrowed; bytes of mapped memory are always initialised.
        unsafe { std::slice::from_raw_parts(at(self.address(frame)).cast(), self.bytes) }
    }

    /// The bytes of a populated page, to write.
    pub(super) fn bytes_mut<'a>(&'a self, frame: &'a mut Frame) -> &'a mut [u8] {
        // SAFETY: as for `bytes`; the frame is the only one of its number and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(at(self.address(frame)).cast(), self.bytes) }
    }

    /// The bytes of a part of a populated page.
    pub(super) fn folio<'a>(&'a self, part: &'a Part) -> &'a [u8] {
        let at = at(self.mapping.address + part.offset());
        // SAFETY: the page that it is a part of is held for as long as the part is, so it is populated as for `bytes`; the part is
        // borrowed, and no other part has any of its bytes.
        unsafe { std::slice::from_raw_parts(at.cast(), part.length()) }
    }

    /// The bytes of a part of a populated page, to write.
    pub(super) fn folio_mut<'a>(&'a self, part: &'a mut Part) -> &'a mut [u8] {
        let at = at(self.mapping.address + part.offset());
        // SAFETY: as for `folio`; the part is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), part.length()) }
    }

    /// Makes the place readable and writable.
    pub(super) fn open(&self, frame: &Frame) -> Result<()> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: more access to the pool's own memory takes nothing away.
        unsafe { mm::mprotect(at(self.address(frame)), self.bytes, access) }
    }

    /// Takes the access to an empty place away, so that mlockall(2) does not fill it. Where that fails (too many
    /// mappings) the place stays open, and nothing else is different.
    pub(super) fn close(&self, frame: &Frame) {
        // SAFETY: the frame is held by the caller, so there is no other reference to the page's bytes.
        let _ =
            unsafe { mm::mprotect(at(self.address(frame)), self.bytes, MprotectFlags::empty()) };
    }

    /// Makes the first `length` bytes resident, and reports failure where a touch would kill.
    pub(super) fn populate(&self, frame: &Frame, length: usize) -> Result<()> {
        populate(self.address(frame), length.min(self.bytes), self.bytes)
    }

    /// Gives anonymous memory back to the kernel; the place stays.
    pub(super) fn discard(&self, frame: &Frame) -> Result<()> {
        // SAFETY: the frame is held by the caller, so there is no other reference to the page's bytes.
        unsafe { sys::discard(self.address(frame), self.bytes) }
    }

    /// Keeps the whole window out of the children of fork(2).
    pub(super) fn keep_from_children(&self) -> Result<()> {
        self.mapping.keep_in(Origin::mark()?)?;
        let start = at(self.mapping.address);
        // SAFETY: the advice changes nothing in this process.
        unsafe { mm::madvise(start, self.length(), Advice::LinuxDontFork) }
    }

    /// Moves a page's memory between its place and `offset` of `region`, huge page and all; what it
    /// leaves is still mapped, and empty. mremap(2) with MREMAP_DONTUNMAP, Linux 5.7.
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
        // SAFETY: the caller holds the frame, whose place and whose part of the region both ranges are.
        unsafe { mm::mremap_fixed(from, self.bytes, self.bytes, flags, to) }.map(drop)
    }
}

/// The process that something was made in. Not its ID: a grandchild may have that one again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin(u32);

/// How many fork(2)s lie between the first process that counted them and this one, and one more: 0 is no process.
static FORKS: AtomicU32 = AtomicU32::new(1);

impl Origin {
    /// This process, which counts its forks from now on (pthread_atfork(3)).
    pub(super) fn mark() -> Result<Self> {
        static REGISTERED: OnceLock<i32> = OnceLock::new();
        extern "C" fn forked() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler adds to a number, which may be done at any point of a child.
        let register = || unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        match REGISTERED.get_or_init(register) {
            0 => Ok(Self(FORKS.load(Ordering::Relaxed))),
            code => Err(Errno::from_raw_os_error(*code)),
        }
    }

    /// True in the process that this is.
    pub(super) fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}
