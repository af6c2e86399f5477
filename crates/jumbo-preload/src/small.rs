//! Blocks below 128 KiB: [`jumbo_inside::slab`], with the cache of each thread.
//!
//! The C library's allocator serves what the slabs do not: all under `--heap=glibc`, blocks aligned
//! to more than a base page, and what the slabs would have to grow for under a seccomp filter of the
//! program, locked future mappings or a limit.

use core::ffi::c_void;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jumbo_inside::density::program_break;
use jumbo_inside::heap;
use jumbo_inside::slab::{self, Block, Cache, Freed};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::alloc::ALIGN;
use crate::end::invalid;
use crate::local::local;
use crate::next;
use crate::own_stack::{away, on};
use crate::reaper::auto;

/// Returns the calling thread's cache, or null.
#[inline(always)]
fn cache() -> *mut Cache {
    local().cache.get()
}

/// Returns the place of the calling thread's cache.
#[inline(always)]
fn place() -> *mut *mut Cache {
    local().cache.as_ptr()
}

/// Makes [`passed`] count.
static COUNTS: AtomicBool = AtomicBool::new(false);

/// Follows the heap of the C library, which serves all sizes.
pub(crate) fn follow() {
    program_break::follow();
    COUNTS.store(true, Ordering::Release);
}

/// Counts a request that the C library serves; looks at its heap after a number of bytes.
#[inline(always)]
pub(crate) fn passed(size: usize) {
    if COUNTS.load(Ordering::Relaxed) {
        count(size);
    }
}

#[inline(never)]
fn count(size: usize) {
    const STEP_BYTES: usize = 1 << 20;
    let counted = &local().passed_bytes;
    counted.set(counted.get().saturating_add(size));
    if counted.get() >= STEP_BYTES {
        counted.set(0);
        on(program_break::check);
    }
}

/// Bytes of the heap at the last report to [`auto`].
static REPORTED: AtomicUsize = AtomicUsize::new(0);

/// Makes the slabs serve.
pub(crate) fn start() {
    let mut bytes = [0; size_of::<usize>()];
    // Early in boot there may be no randomness yet; a fixed address is better than none.
    let _ = getrandom(&mut bytes, GetRandomFlags::NONBLOCK);
    slab::start(usize::from_ne_bytes(bytes) >> 16);
}

/// Allocates a block from the cache of the thread; null: [`allocate`] may have one.
#[inline(always)]
pub(crate) fn cached(size: usize) -> *mut c_void {
    // SAFETY: the thread's cache; the size is one of the slabs.
    match unsafe { slab::allocate(cache(), size) } {
        Some(block) if size <= slab::MAX_BYTES => with_exposed_provenance_mut(block.address),
        _ => null_mut(),
    }
}

/// Allocates a block; null for other sizes and without memory.
pub(crate) fn allocate(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    let size = match align <= ALIGN {
        true => size,
        false => match align
            .is_power_of_two()
            .then(|| slab::aligned(size, align))
            .flatten()
        {
            Some(size) => size,
            None => return null_mut(),
        },
    };
    if size > slab::MAX_BYTES || !slab::is_on() {
        return null_mut();
    }
    let block = match align <= ALIGN {
        // SAFETY: the thread's cache.
        true => unsafe { slab::allocate(cache(), size) }.or_else(|| refill(size)),
        false => growing(size, || slab::allocate_aligned(size)),
    };
    let Some(Block { address, is_dirty }) = block else {
        return null_mut();
    };
    let block = with_exposed_provenance_mut::<c_void>(address);
    if zeroed && is_dirty {
        // SAFETY: a new block of at least that size.
        unsafe { block.cast::<u8>().write_bytes(0, size) };
    }
    block
}

/// Fills the thread's cache, and returns a block besides.
#[cold]
#[inline(never)]
fn refill(size: usize) -> Option<Block> {
    // SAFETY: the thread's own variable.
    let block = growing(size, || unsafe { slab::refill(&mut *place(), size) });
    sweep();
    block
}

/// Sweeps if that is due. Not inlined, as [`grow_away`]: the caller's frame is to be small.
#[inline(never)]
fn sweep() {
    if let Some(sweep) = slab::due_sweep() {
        on(sweep);
    }
}

/// Allocates a block, after the heap has grown where it must.
#[inline(always)]
fn growing(size: usize, allocate: impl Fn() -> Option<Block>) -> Option<Block> {
    /// Other threads may take what the heap has grown by.
    const MAX_TRIES: usize = 4;
    for _ in 0..MAX_TRIES {
        if let Some(block) = allocate() {
            return Some(block);
        }
        if !slab::may_grow(size) || !grow_away(size) {
            break;
        }
    }
    None
}

#[cold]
#[inline(never)]
fn grow_away(size: usize) -> bool {
    away(|| grow(size))
}

fn grow(size: usize) -> bool {
    // A mapping would be resident, and count towards the limit on locked memory.
    let has_grown = match heap::locks_future() {
        true => {
            slab::refuse();
            false
        }
        false => slab::grow(size),
    };
    let mapped = slab::mapped();
    if REPORTED.load(Ordering::Relaxed) != mapped {
        heap::make_room(mapped.saturating_sub(REPORTED.swap(mapped, Ordering::Relaxed)));
        auto::allocated();
    }
    has_grown
}

/// Reports whether a block is one of the slabs.
#[inline(always)]
pub(crate) fn is_ours(block: *const c_void) -> bool {
    slab::is_ours(block.addr())
}

/// free(3) of a block of the slabs.
///
/// # Safety
/// As for free(3).
#[inline(always)]
pub(crate) unsafe fn free(block: *mut c_void) {
    // SAFETY: the caller's promise.
    match unsafe { slab::free(cache(), block.addr()) } {
        Freed::Done => {}
        other => refused(block, other),
    }
}

#[cold]
#[inline(never)]
fn refused(block: *mut c_void, why: Freed) {
    match why {
        Freed::Full => {
            // SAFETY: the block is live, and the program gives it up.
            unsafe { slab::put_aside(&mut *place(), block.addr()) };
            if let Some(sweep) = slab::due_sweep() {
                on(sweep);
            }
        }
        Freed::Invalid => invalid("free(): invalid pointer"),
        Freed::Twice | Freed::Done => invalid("free(): double free detected"),
    }
}

/// malloc_usable_size(3) of a block of the slabs; `None` for other blocks.
#[inline(always)]
pub(crate) fn room(block: *const c_void) -> Option<usize> {
    is_ours(block).then(|| slab::room(block.addr()).unwrap_or(0))
}

/// malloc_trim(3).
pub(crate) fn trim() -> bool {
    // SAFETY: the thread's cache.
    unsafe { slab::trim(cache()) }
}

/// Acquires the locks for fork(2).
pub(crate) fn before_fork() {
    if slab::is_on() && !next::is_single_threaded() {
        slab::lock();
    }
}

/// Releases the locks after fork(2), in both processes.
pub(crate) fn after_fork() {
    // SAFETY: after `before_fork`, in its thread or the original's.
    unsafe { slab::unlock() };
}

/// Forgets the parent's other threads, in the child of a fork.
pub(crate) fn forked(process: u32) {
    slab::forked(process.cast_signed(), cache());
}
