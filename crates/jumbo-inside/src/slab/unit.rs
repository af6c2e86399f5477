//! Headers of units, beside the memory of the program: [`Unit`], by address or number.
//!
//! The headers are a table in a range of addresses of their own, mapped as the heap grows. Those of
//! a chunk fill a base page. All of the first units of slabs and of chunks have a meaning besides:
//! see the fields.
#![expect(unsafe_code, reason = "headers are reached by address")]

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use rustix::io::Result;
use rustix::mm::{MapFlags, ProtFlags};

use super::class::{CHUNK_BYTES, UNIT_BYTES, UNITS};
use jumbo_sys::{self as sys, SLABS};

/// End of a list of units.
pub(super) const NONE: u32 = u32::MAX;

/// Header of a unit.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Unit {
    /// States of the slab's blocks: a byte each ([`super::state`]).
    pub(super) states: *mut AtomicU8,
    /// As in the shape of the class.
    pub(super) size: u32,
    pub(super) factor: u32,
    /// Class of the slab; 0: the unit is in none.
    pub(super) class: u8,
    /// Units between the first of the slab and this one.
    pub(super) back: u8,
    /// List of the class that the slab is in; [`UNLISTED`]: none. First unit of a slab.
    pub(super) list: u8,
    /// Base pages of this unit that are not resident: a bit each.
    pub(super) gone: u8,
    /// Neighbours in that list. First unit of a slab.
    pub(super) next: u32,
    pub(super) before: u32,
    /// Blocks of the slab, and those that caches or the program have. First unit of a slab.
    pub(super) blocks: u16,
    pub(super) out: u16,
    /// No block before this one is free. First unit of a slab.
    pub(super) hint: u16,
    /// List of chunks that the chunk is in. First unit of a chunk.
    pub(super) chunk_list: u8,
    /// A block of the slab was taken since the last sweep. First unit of a slab.
    pub(super) serves: bool,
    /// Number of the cache that takes blocks of the slab. First unit of a slab.
    pub(super) owner: u32,
    /// Units of the chunk that are in no slab: a bit each. First unit of a chunk.
    pub(super) free: u64,
    /// Neighbours in the list of chunks. First unit of a chunk.
    pub(super) next_chunk: u32,
    pub(super) chunk_before: u32,
    /// Bits of the pieces in the slab, or null ([`super::run`]). First unit of a slab.
    pub(super) grains: *mut AtomicU64,
}

/// Value of [`Unit::list`] of a slab in no list.
pub(super) const UNLISTED: u8 = u8::MAX;

const _: () = assert!(size_of::<Unit>() == 64 && size_of::<Unit>() * UNITS == 4096);

/// End of the chunks' addresses, and start of the headers'. Both are fixed, so that the header of an
/// address is found without a load; the first chunk is at a random place.
const CHUNKS_END: usize = SLABS.end - (32 << 30);
const HEADERS: usize = CHUNKS_END;
const _: () = assert!((CHUNKS_END - SLABS.start) / UNIT_BYTES * size_of::<Unit>() <= 32 << 30);
/// Step in which headers are mapped: those of 16 chunks.
const HEADER_STEP_BYTES: usize = 64 << 10;

/// Start of the chunks; 0 before the start.
static START: AtomicUsize = AtomicUsize::new(0);
/// Bytes from there that are, or were, chunks.
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static HEADER_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Places the chunks by a random number.
pub(super) fn place(random: usize) {
    // Headers are mapped in steps from that of the first chunk.
    let chunks = (CHUNKS_END - SLABS.start) / 2 / CHUNK_BYTES;
    START.store(
        SLABS.start + random % chunks * CHUNK_BYTES,
        Ordering::Relaxed,
    );
}

/// Reports whether an address is among those of chunks.
#[inline(always)]
pub(super) const fn is_in_chunk(address: usize) -> bool {
    address.wrapping_sub(SLABS.start) < CHUNKS_END - SLABS.start
}

/// Returns the number of the unit at an address of a chunk.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the addresses have fewer units"
)]
pub(super) const fn number_of(address: usize) -> u32 {
    (address.wrapping_sub(SLABS.start) / UNIT_BYTES) as u32
}

/// Returns the address of a unit.
pub(super) const fn address_of(number: u32) -> usize {
    SLABS.start + number as usize * UNIT_BYTES
}

/// Returns the header of a unit of a chunk.
#[inline(always)]
pub(super) fn header(number: u32) -> *mut Unit {
    with_exposed_provenance_mut(HEADERS + number as usize * size_of::<Unit>())
}

/// Returns the header of the slab at an address in a chunk: that of its first unit.
///
/// # Safety
/// The address is in a chunk.
#[inline(always)]
pub(super) unsafe fn slab_at(address: usize) -> (*mut Unit, u32) {
    let number = number_of(address);
    let unit = header(number);
    // SAFETY: chunks have headers.
    let back = unsafe { (*unit).back };
    (
        // SAFETY: the first unit of a slab is in the same chunk.
        unsafe { unit.sub(usize::from(back)) },
        number.wrapping_sub(u32::from(back)),
    )
}

/// Returns the number of the next chunk's first unit, and the addresses that it would have. `None`
/// at the end of the addresses.
pub(super) fn next_chunk() -> Option<(u32, usize)> {
    let length = LENGTH.load(Ordering::Relaxed);
    let at = START.load(Ordering::Relaxed).checked_add(length)?;
    (at + CHUNK_BYTES <= CHUNKS_END).then_some((number_of(at), at))
}

/// Returns the numbers of all units of chunks.
pub(super) fn all() -> Range<u32> {
    let start = START.load(Ordering::Relaxed);
    number_of(start)..number_of(start + LENGTH.load(Ordering::Acquire))
}

/// Maps the headers of the next chunk.
///
/// # Errors
/// Those of mmap(2).
pub(super) fn map_headers() -> Result<()> {
    let needed = (LENGTH.load(Ordering::Relaxed) + CHUNK_BYTES) / UNIT_BYTES * size_of::<Unit>();
    let mapped = HEADER_BYTES.load(Ordering::Relaxed);
    if needed > mapped {
        let first = header(number_of(START.load(Ordering::Relaxed)));
        let at = first.addr() + mapped;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        sys::map_at(at, HEADER_STEP_BYTES, access, MapFlags::empty())?;
        HEADER_BYTES.store(mapped + HEADER_STEP_BYTES, Ordering::Relaxed);
    }
    Ok(())
}

/// Adds the next chunk, whose headers are mapped and written.
pub(super) fn add_chunk() {
    LENGTH.fetch_add(CHUNK_BYTES, Ordering::Release);
}
