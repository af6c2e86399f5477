//! The one leaf of the heap that touches memory: mapping, unmapping, advising, moving, zeroing.
//!
//! Everything here is a raw system call (rustix's, which neither touches errno nor calls a function that
//! could be interposed) or a plain memory access inside the window, which belongs to this module alone.
//! Sizes and addresses are bytes, multiples of [`BASE_PAGE`].
#![expect(
    unsafe_code,
    reason = "the leaf that maps and touches the window's memory"
)]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::extents::{Record, Table};
use super::{BASE_PAGE, TABLE_BASE};
use crate::gather::Leaving;
use crate::kernel::sys;
use crate::ledger::stats;

fn at(address: usize) -> *mut core::ffi::c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Maps fresh private zero memory at `address`, which must be free: `EEXIST` where it is not.
///
/// `MAP_FIXED_NOREPLACE` is there since Linux 4.17; older kernels take it for a hint, so the address
/// that comes back is compared.
pub(super) fn map(address: usize, length: usize) -> Result<()> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    map_as(
        address,
        length,
        prot,
        MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE,
    )
}

/// Takes `length` bytes of address space at `address` without any memory behind them.
pub(super) fn reserve(address: usize, length: usize) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
    map_as(address, length, ProtFlags::empty(), flags)
}

fn map_as(address: usize, length: usize, prot: ProtFlags, flags: MapFlags) -> Result<()> {
    // SAFETY: FIXED_NOREPLACE never disturbs a mapping that is there already.
    let got = unsafe { mm::mmap_anonymous(at(address), length, prot, flags)? };
    if got.addr() == address {
        return Ok(());
    }
    // SAFETY: the kernel has just made this mapping for us, elsewhere; nobody has seen it yet.
    let _ = unsafe { mm::munmap(got, length) };
    Err(Errno::EXIST)
}

/// Unmaps pages of the window that nobody has a pointer to any more.
pub(super) fn unmap(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller is the window, and the extent has just been freed by its owner.
    unsafe { mm::munmap(at(address), length) }
}

/// Like [`unmap`] for a large range, of which `leaving` then frees the memory. False where nothing was done.
pub(super) fn take_away(address: usize, length: usize, leaving: &mut Option<&mut Leaving>) -> bool {
    let Some(leaving) = leaving else {
        return false;
    };
    // SAFETY: as for `unmap`.
    unsafe { leaving.take(address, length) }
}

/// Gives the memory of freed pages back and keeps them mapped.
pub(super) fn discard(address: usize, length: usize) -> Result<()> {
    // SAFETY: as for `unmap`: the pages were freed by their owner.
    unsafe { mm::madvise(at(address), length, Advice::LinuxDontNeed) }
}

/// Asks for huge pages in a range, and counts what the kernel said.
pub(super) fn advise(address: usize, length: usize) -> Result<()> {
    // SAFETY: MADV_HUGEPAGE changes how memory is backed, never what it holds.
    let answer = unsafe { mm::madvise(at(address), length, Advice::LinuxHugepage) };
    stats::advised(length, answer.err());
    answer
}

/// Makes a range readable and writable.
pub(super) fn unprotect(address: usize, length: usize) -> Result<()> {
    // SAFETY: more access to memory of the allocator's own takes nothing away from anybody.
    unsafe {
        mm::mprotect(
            at(address),
            length,
            MprotectFlags::READ | MprotectFlags::WRITE,
        )
    }
}

/// Makes fresh memory resident. MADV_POPULATE_WRITE, Linux 5.14.
pub(super) fn populate(address: usize, length: usize) {
    // SAFETY: the mapping was made by the caller and nobody has seen it yet.
    let _ = unsafe { mm::madvise(at(address), length, Advice::LinuxPopulateWrite) };
}

/// Replaces the base pages of one huge page's range by a huge page, now. MADV_COLLAPSE, Linux 6.1.
pub(super) fn collapse(address: usize, length: usize) {
    // SAFETY: MADV_COLLAPSE changes how memory is backed, never what it holds. rustix has no name for
    // it, and libc's madvise may be interposed, by ourselves for one.
    let done = unsafe {
        quietly(|| libc::syscall(libc::SYS_madvise, at(address), length, libc::MADV_COLLAPSE)) == 0
    };
    if done {
        stats::collapsed(length);
    }
}

/// Moves the pages at `from` to `to`, over whatever is mapped there; both lie in the window.
pub(super) fn relocate(from: usize, to: usize, length: usize) -> Result<()> {
    // SAFETY: both ranges are extents that the caller took for this purpose: the source's owner asked
    // for the move, and the target was never handed out.
    unsafe { sys::move_mapping(from, to, length) }
}

/// Puts the pages back that a failed [`relocate`] may have moved.
pub(super) fn restore(from: usize, to: usize, length: usize) {
    // SAFETY: both ranges are extents of the window that the caller has taken, and the heap's lock is held.
    unsafe { sys::move_back(from, to, length) }
}

/// Makes a system call that rustix lacks and puts errno back: what succeeds must leave it alone.
fn quietly(call: impl FnOnce() -> libc::c_long) -> libc::c_long {
    // SAFETY: errno is this thread's own.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        let answer = call();
        *errno = saved;
        answer
    }
}

/// Grows or moves a mapping of the program's own to `to`, which the caller reserved with [`reserve`].
pub(super) fn relocate_grow(from: usize, to: usize, old: usize, new: usize) -> Result<()> {
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: the program asked for the move (mremap with MREMAP_MAYMOVE); the target is a reservation
    // of our own.
    unsafe { mm::mremap_fixed(at(from), old, new, flags, at(to)).map(drop) }
}

/// Copies between two extents that do not overlap.
pub(super) fn copy(from: usize, to: usize, length: usize) {
    // SAFETY: both are live extents of at least `length` bytes; different extents never overlap.
    unsafe { ptr::copy_nonoverlapping(at(from).cast::<u8>(), at(to).cast::<u8>(), length) }
}

/// Fills an extent with zeroes.
pub(super) fn zero(address: usize, length: usize) {
    // SAFETY: a live extent of at least `length` bytes that was not handed out yet.
    unsafe { ptr::write_bytes(at(address).cast::<u8>(), 0, length) }
}

/// The table of [`Record`]s behind the window, mapped as the window grows.
#[derive(Debug)]
pub(super) struct PageTable {
    mapped: usize,
}

/// The table is mapped in multiples of that: records for 256 MiB of the window.
const TABLE_STEP: usize = 1 << 20;

impl PageTable {
    pub(super) const fn new() -> Self {
        Self { mapped: 0 }
    }

    /// Makes sure that every page below `end` has a record.
    pub(super) fn reach(&mut self, end: u32) -> Result<()> {
        let needed = (end as usize * size_of::<Record>()).next_multiple_of(TABLE_STEP);
        if needed > self.mapped {
            map(TABLE_BASE + self.mapped, needed - self.mapped)?;
            self.mapped = needed;
        }
        Ok(())
    }

    fn record(&self, page: u32) -> *mut Record {
        debug_assert!((page as usize + 1) * size_of::<Record>() <= self.mapped);
        at(TABLE_BASE + page as usize * size_of::<Record>()).cast()
    }
}

impl Table for PageTable {
    fn get(&self, page: u32) -> Record {
        // SAFETY: `reach` mapped the record before the page was appended; a fresh record is all zeroes,
        // which is a valid `Record` (state 0 is `Live`).
        unsafe { self.record(page).read() }
    }

    fn set(&mut self, page: u32, record: Record) {
        // SAFETY: as in `get`; `&mut self` under the heap's lock makes this the only access.
        unsafe { self.record(page).write(record) }
    }
}

/// The record of a page that is known to have one: the first of a live block.
pub(super) fn peek(page: usize) -> Record {
    // SAFETY: the record was mapped when the block was handed out, and the table is never unmapped. Its
    // owner, who asks, is the only one that could change it now.
    unsafe {
        at(TABLE_BASE + page * size_of::<Record>())
            .cast::<Record>()
            .read()
    }
}

/// Blocks freed where the lock could not be had: a stack threaded through the blocks themselves.
#[derive(Debug)]
pub(super) struct Deferred(AtomicPtr<Block>);

#[derive(Debug)]
struct Block {
    next: *mut Self,
}

impl Deferred {
    pub(super) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Adds a freed block. Lock-free, so that a signal handler may.
    pub(super) fn push(&self, address: usize) {
        let block = at(address).cast::<Block>();
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: the block is at least a page, page-aligned, and its owner has freed it.
            unsafe { block.write(Block { next: head }) };
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

const _: () = assert!(TABLE_BASE.is_multiple_of(BASE_PAGE));
