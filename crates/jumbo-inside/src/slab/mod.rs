//! Heap of blocks below 128 KiB: slabs of one size, with their records apart.
//!
//! - `class` has the sizes; `unit` the headers, by address; `chunks` the memory.
//! - `blocks` has one slab, `central` all of a class, `cache` the blocks at hand of each thread.
//! - `sweep` returns base pages without blocks; `run` has blocks between smaller ones.
//! - `meta` has the memory of the records.
//!
//! Nothing of the allocator is in free memory. Each block has a byte of state in the records of its
//! slab, which only its holder writes: the program's thread, a cache, or the slab under its lock.
//! So a base page without a taken block can go back at any time, a write into freed memory cannot
//! steer malloc(3), and a second free(3) is found.
//!
//! The locks are taken in this order: caches, slabs, chunks, records.
#![expect(
    unsafe_code,
    reason = "blocks, headers and states are reached by address"
)]

mod blocks;
mod cache;
mod central;
mod chunks;
mod class;
mod meta;
mod run;
mod sweep;
#[cfg(test)]
mod tests;
mod unit;

use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

pub use cache::Cache;
use class::UNIT_BYTES;
use unit::Unit;

use crate::events::Held;
use jumbo_sys as sys;

#[cfg(test)]
use crate::density;

/// States of a block.
mod state {
    /// Its slab has it.
    pub(super) const FREE: u8 = 0;
    /// The program has it.
    pub(super) const LIVE: u8 = 1;
    /// A cache has it.
    pub(super) const CACHED: u8 = 2;
    /// The program has freed it, and it could not be put back yet.
    pub(super) const LOST: u8 = 3;
    /// Bits of these.
    pub(super) const KIND: u8 = 3;
    /// Blocks of other classes have parts of it ([`super::run`]).
    pub(super) const PIECES: u8 = 8;
    /// The program has had it since its memory was zero.
    pub(super) const DIRTY: u8 = 4;
}

/// Largest size of a block, in bytes.
pub const MAX_BYTES: usize = class::MAX_BYTES - 1;

crate::one_page! {
    /// Set once the heap may serve.
    static IS_ON: AtomicBool = AtomicBool::new(false);
}

/// Block of the heap.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Address.
    pub address: usize,
    /// It may have another content than zeroes.
    pub is_dirty: bool,
}

/// Result of [`free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// The block is free.
    Done,
    /// The cache has no room: the caller calls [`put_aside`].
    Full,
    /// No block begins there.
    Invalid,
    /// The block is free already.
    Twice,
}

/// Places the heap by a random number, before its first use.
pub fn start(random: usize) {
    unit::place(random);
    cache::begin(sys::process(), core::ptr::null_mut());
    IS_ON.store(true, Ordering::Release);
}

/// Reports whether the heap serves.
pub fn is_on() -> bool {
    IS_ON.load(Ordering::Acquire)
}

/// Reports whether an address is in the heap's memory.
#[inline(always)]
pub fn is_ours(address: usize) -> bool {
    unit::is_in_chunk(address)
}

/// Returns the number of the block at an address, by the header of the address's unit.
///
/// # Safety
/// The header is that of the unit.
#[inline(always)]
unsafe fn number_in(header: *const Unit, address: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let number = offset_in(header, address) as u64 * u64::from((*header).factor);
        (number >> 32) as usize
    }
}

/// Returns the offset of an address in its slab, by the header of the address's unit.
///
/// # Safety
/// As for [`number_in`].
#[inline(always)]
unsafe fn offset_in(header: *const Unit, address: usize) -> usize {
    // SAFETY: the caller's promise.
    address % UNIT_BYTES + usize::from(unsafe { (*header).back }) * UNIT_BYTES
}

/// Marks a block of a cache as the program's.
#[inline(always)]
unsafe fn hand_out(address: usize) -> Block {
    let header = unit::header(unit::number_of(address));
    // SAFETY: the block is in a slab; records are never unmapped.
    let state = unsafe { &*(*header).states.add(number_in(header, address)) };
    let before = state.load(Ordering::Relaxed);
    let pieces = before & state::PIECES;
    state.store(state::LIVE | state::DIRTY | pieces, Ordering::Relaxed);
    Block {
        address,
        is_dirty: before & state::DIRTY != 0,
    }
}

/// Finds the state of the block at an address of the heap, and its class. `None` if no block begins
/// there.
///
/// # Safety
/// The address is in a chunk.
#[inline(always)]
unsafe fn find(address: usize) -> Option<(&'static AtomicU8, usize, usize)> {
    let header = unit::header(unit::number_of(address));
    // SAFETY: the caller's promise: units of a chunk have headers; records are never unmapped.
    unsafe {
        let (size, class) = ((*header).size as usize, usize::from((*header).class));
        let number = number_in(header, address);
        if number * size != offset_in(header, address) || class == 0 {
            return None;
        }
        // The rest of a slab is too short for a block.
        Some((&*(*header).states.add(number), class, size))
    }
}

/// Allocates a block of at least `size` bytes from the cache of the calling thread. `None`: the
/// caller calls [`refill`].
///
/// # Safety
/// The cache is the calling thread's, or null; the size is at most [`MAX_BYTES`].
#[inline(always)]
pub unsafe fn allocate(cache: *mut Cache, size: usize) -> Option<Block> {
    // SAFETY: the caller's promise; the class is in the array.
    unsafe {
        if cache.is_null() || !(*cache).enter() {
            return None;
        }
        let magazine = cache::magazine_of(cache, class::of(size));
        let block = (*magazine).count.checked_sub(1).map(|left| {
            (*magazine).count = left;
            (*magazine).slots.add(left as usize).read()
        });
        (*cache).leave();
        block.map(|block| hand_out(block))
    }
}

/// Allocates a block of at least `size` bytes, and fills the cache of the calling thread. `None`
/// without memory: the caller calls [`grow`].
///
/// # Safety
/// As for [`allocate`]; `cache` becomes the thread's.
#[cold]
pub unsafe fn refill(cache: &mut *mut Cache, size: usize) -> Option<Block> {
    if !is_on() || size > MAX_BYTES {
        return None;
    }
    if cache.is_null() {
        cache::adopt(cache);
    }
    // SAFETY: the caller's promise.
    unsafe { cache::refill(*cache, class::of(size)).map(|block| hand_out(block)) }
}

/// Returns why the block at an address cannot go to a cache.
///
/// # Safety
/// The address is in a chunk.
#[cold]
unsafe fn refused(address: usize) -> Freed {
    // SAFETY: the caller's promise.
    unsafe {
        if run::is_live(address) {
            return Freed::Full;
        }
        match find(address) {
            Some((state, ..)) if state.load(Ordering::Relaxed) & state::PIECES == 0 => Freed::Twice,
            _ => Freed::Invalid,
        }
    }
}

/// Frees a block.
///
/// # Safety
/// The address is in the heap's memory; the cache is the calling thread's, or null. Nothing uses a
/// block that begins there.
#[inline(always)]
pub unsafe fn free(cache: *mut Cache, address: usize) -> Freed {
    // SAFETY: the caller's promise.
    unsafe {
        let Some((state, class, _)) = find(address) else {
            return refused(address);
        };
        if state.load(Ordering::Relaxed) & !state::DIRTY != state::LIVE {
            return refused(address);
        }
        if cache.is_null() || !(*cache).enter() {
            return Freed::Full;
        }
        let magazine = cache::magazine_of(cache, class);
        let count = (*magazine).count;
        let has_room = count < (*magazine).room;
        if has_room {
            (*magazine).slots.add(count as usize).write(address);
            state.store(state::CACHED | state::DIRTY, Ordering::Relaxed);
            (*magazine).count = count + 1;
        }
        (*cache).leave();
        match has_room {
            true => Freed::Done,
            false => Freed::Full,
        }
    }
}

/// Allocates a block whose address is a multiple of the largest power of two in its size. `None`
/// without memory: the caller calls [`grow`].
pub fn allocate_aligned(size: usize) -> Option<Block> {
    let mut block = 0;
    let is_taken = is_on() && cache::take_one(class::of(size), &mut block);
    // SAFETY: the block is in no cache.
    is_taken.then(|| unsafe { hand_out(block) })
}

/// Frees a block for which the cache has no room.
///
/// # Safety
/// As for [`free`], which has returned [`Freed::Full`]; `cache` becomes the thread's.
#[cold]
pub unsafe fn put_aside(cache: &mut *mut Cache, address: usize) {
    if cache.is_null() {
        cache::adopt(cache);
    }
    // SAFETY: the caller's promise.
    unsafe {
        if run::put(address) {
            return;
        }
        if let Some((state, class, _)) = find(address) {
            state.store(state::CACHED | state::DIRTY, Ordering::Relaxed);
            cache::flush(*cache, class, address);
        }
    }
}

/// Work that returns memory which the heap holds beyond what it may. It needs some KiB of stack.
pub fn due_sweep() -> Option<impl FnOnce()> {
    sweep::due().map(|due| {
        move || {
            cache::drain_ended(SWEPT_CACHES);
            sweep::do_due(due);
        }
    })
}

/// Caches that a sweep looks at for threads that have ended.
const SWEPT_CACHES: usize = 16;

/// Returns memory that the heap holds beyond what it may, before other memory grows by `bytes`.
pub fn about_to_fill(bytes: usize) {
    central::grew(bytes);
    if let Some(sweep) = due_sweep() {
        sweep();
    }
}

/// Reports whether [`grow`] may succeed.
pub fn may_grow(size: usize) -> bool {
    size <= MAX_BYTES && is_on() && !central::is_exhausted(class::of(size))
}

/// Records that [`grow`] is not to be tried for a number of requests.
pub fn refuse() {
    chunks::refused();
}

/// Takes more memory, for a block of that size; false without memory.
pub fn grow(size: usize) -> bool {
    size <= MAX_BYTES && is_on() && central::grow(class::of(size))
}

/// Returns the room of the block at an address of the heap's memory; `None` if no block begins
/// there.
pub fn room(address: usize) -> Option<usize> {
    // SAFETY: the address is in a chunk.
    unsafe {
        match find(address) {
            Some((state, _, size))
                if state.load(Ordering::Relaxed) & !state::DIRTY == state::LIVE =>
            {
                Some(size)
            }
            _ => run::room(address),
        }
    }
}

/// Returns the size of a block for which [`allocate`] returns a multiple of `align`, a power of two
/// of at most a base page; `None` if there is no such size.
pub fn aligned(size: usize, align: usize) -> Option<usize> {
    let size = size.max(1).checked_next_multiple_of(align)?;
    if size > MAX_BYTES || align > blocks::BASE_BYTES {
        return None;
    }
    let mut class = class::of(size);
    while class < class::CLASSES {
        let size = class::size(class);
        if size.is_multiple_of(align) {
            return (size <= MAX_BYTES).then_some(size);
        }
        class += 1;
    }
    None
}

/// Returns memory without blocks to the kernel; reports whether there was any.
///
/// # Safety
/// The cache is the calling thread's, or null.
pub unsafe fn trim(cache: *mut Cache) -> bool {
    // SAFETY: the caller's promise.
    unsafe { cache::drain(cache) };
    cache::drain_ended(usize::MAX);
    is_on() && sweep::sweep(0, sweep::Sweep::All)
}

/// Bytes of the heap: [`totals`].
#[derive(Clone, Copy, Debug)]
pub struct Totals {
    /// Addresses that the heap has mapped.
    pub mapped: usize,
    /// Blocks that the program or a cache has.
    pub taken: usize,
}

/// Returns the bytes of the heap.
pub fn totals() -> Totals {
    let taken = central::resident() - cache::idle();
    let mapped = chunks::mapped();
    Totals {
        mapped,
        taken: usize::try_from(taken).unwrap_or(0).min(mapped),
    }
}

/// Returns the bytes of addresses that the heap has mapped.
pub fn mapped() -> usize {
    chunks::mapped()
}

/// Forgets what other threads did, in the child of a fork, `process`. The cache is the calling thread's,
/// or null.
pub fn forked(process: i32, cache: *mut Cache) {
    sweep::forked();
    cache::begin(process, cache);
}

/// Acquires all locks for fork(2) that this thread does not hold.
pub fn lock() {
    let caches = u32::from(cache::lock());
    let slabs = central::lock();
    let chunks = u32::from(chunks::CHUNKS.acquire());
    let records = u32::from(meta::lock());
    HELD.took(caches | chunks << 1 | records << 2);
    HELD_SLABS.took(slabs);
}

/// Releases the locks after fork(2) that [`lock`] has acquired, if any.
///
/// # Safety
/// The thread is that of [`lock`], or the one of its original's child.
pub unsafe fn unlock() {
    let (slabs, others) = (HELD_SLABS.give_back(), HELD.give_back());
    // SAFETY: the caller's promise.
    unsafe {
        if others & 4 != 0 {
            meta::unlock();
        }
        if others & 2 != 0 {
            chunks::CHUNKS.release();
        }
        central::unlock(slabs);
        if others & 1 != 0 {
            cache::unlock();
        }
    }
}

crate::one_page! {
    /// Locks that a fork holds: caches, chunks, records; and those of slabs.
    static HELD: Held = Held::new();
    static HELD_SLABS: Held = Held::new();
}
