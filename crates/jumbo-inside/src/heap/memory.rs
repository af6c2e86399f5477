//! The one leaf of the heap that touches memory: mapping, unmapping, advising, moving, zeroing.
//!
//! Everything here is a raw system call (rustix's, which neither touches errno nor calls a function that
//! could be interposed) or a plain memory access.
//! Sizes and addresses are bytes, multiples of [`BASE_PAGE`].
#![expect(
    unsafe_code,
    reason = "the leaf that maps and touches the window's memory"
)]

use core::ops::Range;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::BASE_PAGE;
use super::extents::{PageRecord, Records};
use crate::density::{self, Policy};
pub(super) use crate::sys::unmap;
use crate::{pool, sandbox, sys};

fn at(address: usize) -> *mut core::ffi::c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Maps fresh private zero memory at `address`, which must be free: `EEXIST` where it is not.
pub(super) fn map(address: usize, length: usize) -> Result<()> {
    sys::map_at(
        address,
        length,
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::empty(),
    )
}

/// Keeps addresses for [`unprotect`], which must be free: `EEXIST` where they are not.
pub(super) fn reserve(address: usize, length: usize) -> Result<()> {
    sys::map_at(address, length, ProtFlags::empty(), MapFlags::NORESERVE)
}

/// Gives the memory of pages back and keeps them mapped. Where no advice may be given, they are mapped anew.
///
/// # Safety
/// The pages are private, readable and writable, and nothing needs what they hold.
pub(super) unsafe fn discard(address: usize, length: usize) -> Result<()> {
    if sandbox::allows_advice() {
        // SAFETY: the caller's promise.
        return unsafe { mm::madvise(at(address), length, Advice::LinuxDontNeed) };
    }
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the caller's promise; what takes their place is as private, and zero.
    unsafe { mm::mmap_anonymous(at(address), length, prot, flags | MapFlags::FIXED).map(drop) }
}

/// Asks for huge pages in a range of the heap, as far as [`density`] lets it.
pub(super) fn advise(address: usize, length: usize) -> Result<()> {
    density::advise(&(address..address + length), Policy::Heap)
}

/// Makes a range readable and writable.
///
/// # Safety
/// No code counts on an access to the range that fails.
pub(super) unsafe fn unprotect(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        mm::mprotect(
            at(address),
            length,
            MprotectFlags::READ | MprotectFlags::WRITE,
        )
    }
}

/// Makes memory resident, where a filter lets it pass: else `EPERM`.
///
/// # Errors
/// As [`pool::populate`].
pub(super) fn populate(address: usize, length: usize, huge: usize) -> Result<()> {
    if !sandbox::allows_advice() {
        return Err(Errno::PERM);
    }
    pool::populate(address, length, huge)
}

/// Maps fresh zero hugetlb pages of `page` bytes at `address`, reserved and resident: a later touch cannot
/// fail. Nothing is mapped where that cannot be had. MAP_HUGETLB with a size, Linux 3.8;
/// MADV_POPULATE_WRITE, 5.14.
///
/// # Errors
/// `EEXIST`: something is mapped there; `EINVAL`, `ENODEV`, `ENOSYS`: this kernel has no pages of that size; `EFAULT`: a
/// limit of a control group; `ENOMEM` and others: the pool has no free page, and no surplus page could be had.
pub(super) fn map_hugetlb(address: usize, length: usize, page: usize) -> Result<()> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // The binary logarithm of the size, behind MAP_HUGE_SHIFT; see mmap(2).
    let size = MapFlags::from_bits_retain(page.trailing_zeros() << libc::MAP_HUGE_SHIFT);
    sys::map_at(address, length, prot, MapFlags::HUGETLB | size)?;
    pool::populate(address, length, page).inspect_err(|_| {
        // SAFETY: the mapping has just been made, and no other code has its address yet.
        let _ = unsafe { unmap(address, length) };
    })
}

/// Moves a mapping to `to`, where it has a length of `new`.
///
/// # Safety
/// The mapping at `from` is the caller's to move, and what is at `to` the caller's to lose.
pub(super) unsafe fn move_grown(from: usize, to: usize, old: usize, new: usize) -> Result<()> {
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: the caller's promise.
    unsafe { mm::mremap_fixed(at(from), old, new, flags, at(to)).map(drop) }
}

/// Has a mapping that ends behind `length` bytes grow to `new`, where it is: nothing moves.
pub(super) fn grow(address: usize, length: usize, new: usize) -> Result<()> {
    // SAFETY: it takes addresses that nothing is mapped at.
    unsafe { mm::mremap(at(address), length, new, MremapFlags::empty()).map(drop) }
}

/// Copies between two ranges.
///
/// # Safety
/// Both are the caller's, mapped, and do not overlap; the one can be read and the other written.
pub(super) unsafe fn copy(from: usize, to: usize, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(at(from).cast::<u8>(), at(to).cast::<u8>(), length) }
}

/// Fills a range with zeroes.
///
/// # Safety
/// It is mapped and writable, and what it holds is the caller's to lose.
pub(super) unsafe fn zero(address: usize, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::write_bytes(at(address).cast::<u8>(), 0, length) }
}

/// A table of zeroes that is mapped when it is needed, so that who does not need it does without.
#[derive(Debug)]
pub(super) struct ZeroedTable<T: 'static> {
    length: usize,
    start: AtomicPtr<T>,
}

/// What all zeroes are a value of, and what threads may share.
///
/// # Safety
/// Both hold.
pub(super) unsafe trait Zeroed: Sync {}
// SAFETY: an atomic number may have any bits.
unsafe impl Zeroed for core::sync::atomic::AtomicU8 {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU32 {}

impl<T: Zeroed> ZeroedTable<T> {
    /// A table of `length` elements, not there yet.
    pub(super) const fn new(length: usize) -> Self {
        Self {
            length,
            start: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Maps it, once; false where that cannot be done.
    pub(super) fn map(&self) -> bool {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let length = self.length * size_of::<T>();
        // SAFETY: a mapping at an address of the kernel's choice replaces none.
        let got = unsafe { mm::mmap_anonymous(ptr::null_mut(), length, prot, flags) };
        got.map(|start| self.start.store(start.cast(), Ordering::Release))
            .is_ok()
    }

    /// The elements: none before it is mapped.
    pub(super) fn get(&self) -> &'static [T] {
        let start = self.start.load(Ordering::Acquire);
        if start.is_null() {
            return &[];
        }
        // SAFETY: `map` mapped so many elements there, for good; they are zeroes or what was stored since.
        unsafe { core::slice::from_raw_parts(start, self.length) }
    }
}

/// Fresh memory at an address of the kernel's choice, for as long as the process lives or until [`unmap`].
pub(super) fn anywhere(length: usize) -> Result<usize> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping at an address of the kernel's choice replaces none.
    unsafe { mm::mmap_anonymous(ptr::null_mut(), length, prot, MapFlags::PRIVATE) }
        .map(|start| start.expose_provenance())
}

/// The table of [`PageRecord`]s behind a window, mapped as the window grows.
#[derive(Debug)]
pub(super) struct RecordTable {
    base: usize,
    mapped: usize,
}

/// The table is mapped in multiples of that: records for 256 MiB of the window.
const TABLE_STEP_BYTES: usize = 1 << 20;

impl RecordTable {
    /// A table without a place.
    pub(super) const fn new() -> Self {
        Self { base: 0, mapped: 0 }
    }

    /// Has the records begin at `base`, a multiple of the base page. Once, before the first one.
    pub(super) fn place(&mut self, base: usize) {
        self.base = base;
    }

    /// Makes sure that every page below `end` has a record.
    pub(super) fn reach(&mut self, end: u32) -> Result<()> {
        let needed = (end as usize * size_of::<PageRecord>()).next_multiple_of(TABLE_STEP_BYTES);
        if needed > self.mapped {
            map(self.base + self.mapped, needed - self.mapped)?;
            self.mapped = needed;
        }
        Ok(())
    }

    /// Where the record of a page is, if [`RecordTable::reach`] has come so far.
    fn record(&self, page: u32) -> Option<*mut PageRecord> {
        let offset = page as usize * size_of::<PageRecord>();
        debug_assert!(offset < self.mapped);
        (offset < self.mapped).then(|| at(self.base + offset).cast())
    }
}

impl Records for RecordTable {
    fn get(&self, page: u32) -> PageRecord {
        // SAFETY: `reach` mapped it, for good; a record is four numbers, whatever stands there.
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
            // Refused where the program has locked all its memory: then they stay.
            // SAFETY: whole pages of the table, whose records mean nothing.
            let _ = unsafe { discard(first, last - first) };
        }
    }
}

/// The record of a page in the table at `base`.
///
/// # Safety
/// A live block begins at the page, and is the caller's: it has a record since it was handed out, and no other thread
/// changes that.
pub(super) unsafe fn peek(base: usize, page: usize) -> PageRecord {
    // SAFETY: the caller's promise; the table is never unmapped. Any numbers are a record.
    unsafe {
        at(base + page * size_of::<PageRecord>())
            .cast::<PageRecord>()
            .read()
    }
}

/// Blocks freed where the lock could not be had: a stack threaded through the blocks themselves.
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

    /// Adds a block. Lock-free, so that a signal handler may.
    ///
    /// # Safety
    /// The block is at least a page, and the caller's; nothing uses it from now on.
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

    /// Takes everything out, at once (so there is no ABA), and calls `release` with each address.
    pub(super) fn drain(&self, mut release: impl FnMut(usize)) {
        if self.0.load(Ordering::Relaxed).is_null() {
            return;
        }
        let mut head = self.0.swap(ptr::null_mut(), Ordering::Acquire);
        while !head.is_null() {
            // SAFETY: only `push` puts blocks here, and each stays mapped until it is released below.
            let next = unsafe { head.read().next };
            release(head.expose_provenance());
            head = next;
        }
    }
}

/// The header in front of a chunk of glibc's malloc: its size with three flag bits.
///
/// # Safety
/// `pointer` was returned by glibc's malloc and is still allocated.
pub(super) unsafe fn chunk_header(pointer: usize) -> usize {
    // SAFETY: glibc keeps `mchunk_size` in the word before the memory it hands out (malloc/malloc.c,
    // "Vital statistics": unchanged since glibc 2.3).
    unsafe { at(pointer - size_of::<usize>()).cast::<usize>().read() }
}
