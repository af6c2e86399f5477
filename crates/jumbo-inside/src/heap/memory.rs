//! The leaf of the heap that touches memory: mapping, unmapping, advising, moving, zeroing.
//!
//! Each function is a raw system call (by rustix, without errno and interposable functions) or a
//! plain memory access. Sizes and addresses are bytes, multiples of [`BASE_PAGE`].
#![expect(
    unsafe_code,
    reason = "the leaf that maps and touches the window's memory"
)]

use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Result;
use rustix::mm::{self, MapFlags, MremapFlags, ProtFlags};

use super::BASE_PAGE;
use super::extents::{PageRecord, Records};
use crate::density::{self, Policy};
pub(super) use crate::pool::populate;
use jumbo_sys::{self as sys, map_own};
pub(super) use jumbo_sys::{discard, unmap};

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn at(address: usize) -> *mut core::ffi::c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Maps private zero memory at `address`; `EEXIST` if something is mapped there.
pub(super) fn map(address: usize, length: usize) -> Result<()> {
    sys::map_at(address, length, READ_WRITE, MapFlags::empty())
}

/// Advises huge pages for a range of the heap, as far as [`density`] allows.
pub(super) fn advise(address: usize, length: usize) -> Result<()> {
    density::advise(&(address..address + length), Policy::Heap)
}

/// Maps zeroed hugetlb pages of `page` bytes, reserved and resident: a later touch cannot fail. On
/// an error nothing is mapped. MAP_HUGETLB with a size: Linux 3.8.
///
/// `EEXIST`: something is mapped there; `EINVAL`, `ENODEV`, `ENOSYS`: the kernel lacks that page
/// size; `EFAULT`: a cgroup limit; `ENOMEM` and others: no free page and no surplus page.
pub(super) fn map_hugetlb(address: usize, length: usize, page: usize) -> Result<()> {
    // The base-2 logarithm of the size, shifted by MAP_HUGE_SHIFT; see mmap(2).
    let size = MapFlags::from_bits_retain(page.trailing_zeros() << libc::MAP_HUGE_SHIFT);
    sys::map_at(address, length, READ_WRITE, MapFlags::HUGETLB | size)?;
    populate(address, length, page).inspect_err(|_| {
        // SAFETY: mapped above, and no other code has its address yet.
        let _ = unsafe { unmap(address, length) };
    })
}

/// Moves a mapping of `old` bytes to `to`, with `new` bytes there.
///
/// # Safety
/// The caller may move the mapping at `from` and lose the memory at `to`.
pub(super) unsafe fn move_grown(from: usize, to: usize, old: usize, new: usize) -> Result<()> {
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: the caller's promise.
    unsafe { mm::mremap_fixed(at(from), old, new, flags, at(to)).map(drop) }
}

/// Grows a mapping of `length` bytes in place, to `new` bytes.
pub(super) fn grow(address: usize, length: usize, new: usize) -> Result<()> {
    // SAFETY: growth in place uses free addresses only.
    unsafe { mm::mremap(at(address), length, new, MremapFlags::empty()).map(drop) }
}

/// Copies between two ranges.
///
/// # Safety
/// Both are mapped, do not overlap, and belong to the caller; `from` is readable, `to` writable.
pub(super) unsafe fn copy(from: usize, to: usize, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(at(from).cast::<u8>(), at(to).cast::<u8>(), length) }
}

/// Fills a range with zeros.
///
/// # Safety
/// The range is mapped and writable, and its content is the caller's to lose.
pub(super) unsafe fn zero(address: usize, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::write_bytes(at(address).cast::<u8>(), 0, length) }
}

/// A table of zeros that is mapped on demand.
#[derive(Debug)]
pub(super) struct ZeroedTable<T: 'static> {
    length: usize,
    start: AtomicPtr<T>,
}

/// Types that threads may share, and of which all zeros are a value.
///
/// # Safety
/// Both hold.
pub(super) unsafe trait Zeroed: Sync {}
// SAFETY: every bit pattern is a valid atomic integer.
unsafe impl Zeroed for core::sync::atomic::AtomicU8 {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU32 {}

impl<T: Zeroed> ZeroedTable<T> {
    /// Creates a table of `length` elements, not mapped yet.
    pub(super) const fn new(length: usize) -> Self {
        Self {
            length,
            start: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Maps the table, once; reports success.
    pub(super) fn map(&self) -> bool {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        map_own(self.length * size_of::<T>(), READ_WRITE, flags)
            .map(|start| self.start.store(start.cast(), Ordering::Release))
            .is_ok()
    }

    /// Returns the elements; none before [`ZeroedTable::map`].
    pub(super) fn get(&self) -> &'static [T] {
        let start = self.start.load(Ordering::Acquire);
        if start.is_null() {
            return &[];
        }
        // SAFETY: `map` mapped so many elements for good; each is zero or a stored value.
        unsafe { core::slice::from_raw_parts(start, self.length) }
    }
}

/// Maps memory among jumbo's own, until [`unmap`].
pub(super) fn own(length: usize) -> Result<usize> {
    map_own(length, READ_WRITE, MapFlags::PRIVATE).map(|start| start.expose_provenance())
}

/// Table of the [`PageRecord`]s of a window, mapped as the window grows.
#[derive(Debug)]
pub(super) struct RecordTable {
    base: usize,
    mapped: usize,
}

/// Least and most by which the table grows: records for 16 and 256 MiB of the window.
const MIN_STEP_BYTES: usize = 64 << 10;
const MAX_STEP_BYTES: usize = 1 << 20;

impl RecordTable {
    pub(super) const fn new() -> Self {
        Self { base: 0, mapped: 0 }
    }

    /// Sets the address of the records, a multiple of the base page; once, before the first record.
    pub(super) fn place(&mut self, base: usize) {
        self.base = base;
    }

    /// Maps a record for every page below `end`.
    pub(super) fn reach(&mut self, end: u32) -> Result<()> {
        let needed = end as usize * size_of::<PageRecord>();
        if needed > self.mapped {
            let step = self.mapped.clamp(MIN_STEP_BYTES, MAX_STEP_BYTES);
            let needed = needed
                .max(self.mapped + step)
                .next_multiple_of(MIN_STEP_BYTES);
            map(self.base + self.mapped, needed - self.mapped)?;
            self.mapped = needed;
        }
        Ok(())
    }

    /// Returns the address of a page's record, if [`RecordTable::reach`] has mapped it.
    fn record(&self, page: u32) -> Option<*mut PageRecord> {
        let offset = page as usize * size_of::<PageRecord>();
        debug_assert!(offset < self.mapped);
        (offset < self.mapped).then(|| at(self.base + offset).cast())
    }
}

impl Records for RecordTable {
    fn get(&self, page: u32) -> PageRecord {
        // SAFETY: `reach` mapped it for good; every bit pattern is a valid record.
        let read = |record: *mut PageRecord| unsafe { record.read() };
        self.record(page).map_or_else(PageRecord::default, read)
    }

    fn set(&mut self, page: u32, record: PageRecord) {
        if let Some(place) = self.record(page) {
            // SAFETY: as in `get`; `&mut self` under the heap's lock makes this the only access.
            unsafe { place.write(record) }
        }
    }

    fn forget(&mut self, pages: Range<u32>, within: Range<u32>) {
        let bytes = |page: u32| self.base + page as usize * size_of::<PageRecord>();
        let (down, up) = (
            |at: usize| at & !(BASE_PAGE - 1),
            |at: usize| at.next_multiple_of(BASE_PAGE),
        );
        let first = down(bytes(pages.start)).max(up(bytes(within.start)));
        let last = up(bytes(pages.end)).min(down(bytes(within.end)));
        if first < last {
            // Refused if the program has locked all its memory: then the records stay.
            // SAFETY: whole pages of the table, whose records are unused.
            let _ = unsafe { discard(first, last - first) };
        }
    }
}

/// Reads the record of a page in the table at `base`, without the lock.
///
/// # Safety
/// A live block of the caller begins at the page: it has a record, and no other thread changes it.
pub(super) unsafe fn peek(base: usize, page: usize) -> PageRecord {
    // SAFETY: the caller's promise; the table is never unmapped; every bit pattern is valid.
    unsafe {
        at(base + page * size_of::<PageRecord>())
            .cast::<PageRecord>()
            .read()
    }
}

/// Blocks freed while the lock was not available: a stack linked through the blocks themselves.
#[derive(Debug)]
pub(super) struct Deferred(AtomicPtr<FreedBlock>);

#[derive(Debug)]
struct FreedBlock {
    next: *mut Self,
}

impl Deferred {
    pub(super) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Adds a block. Lock-free, for signal handlers.
    ///
    /// # Safety
    /// The block belongs to the caller and has at least a page; nothing uses it from now on.
    pub(super) unsafe fn push(&self, address: usize) {
        let block = at(address).cast::<FreedBlock>();
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller's promise.
            unsafe { block.write(FreedBlock { next: head }) };
            match self
                .0
                .compare_exchange_weak(head, block, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Removes all blocks at once (so there is no ABA), and calls `release` with each address.
    pub(super) fn drain(&self, mut release: impl FnMut(usize)) {
        if self.0.load(Ordering::Relaxed).is_null() {
            return;
        }
        let mut head = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        while !head.is_null() {
            // SAFETY: only `push` adds blocks, and each stays mapped until it is released below.
            let next = unsafe { head.read().next };
            release(head.expose_provenance());
            head = next;
        }
    }
}
