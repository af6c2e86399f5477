//! Memory for the allocator's own records: states of blocks, magazines, caches. [`take`], [`give`].
//!
//! Sizes are powers of two. What is given back serves the next request of its size.
#![expect(unsafe_code, reason = "links free pieces by address")]

use core::ptr::null_mut;

use rustix::mm::{MapFlags, ProtFlags};

use crate::sync::{Apart, Lock};
use jumbo_sys as sys;

/// Smallest piece.
const MIN_BYTES: usize = 16;
const MIN_LOG: u32 = MIN_BYTES.ilog2();
/// Largest piece.
pub(super) const MAX_BYTES: usize = 8 << 10;
const SIZES: usize = (MAX_BYTES.ilog2() - MIN_LOG + 1) as usize;
/// Step in which memory is mapped.
const STEP_BYTES: usize = 64 << 10;

struct Pieces {
    /// Free pieces of each size, linked by their first word.
    free: [*mut u8; SIZES],
    /// Memory that was never taken.
    fresh: *mut u8,
    left: usize,
}
// SAFETY: the pieces belong to no thread.
unsafe impl Send for Pieces {}

crate::one_page! {
    static WORD: core::sync::atomic::AtomicU32 = core::sync::atomic::AtomicU32::new(0);
}
static PIECES: Lock<Pieces, Apart> = Lock::on(
    &WORD,
    Pieces {
        free: [null_mut(); SIZES],
        fresh: null_mut(),
        left: 0,
    },
);

fn size_of_piece(bytes: usize) -> (usize, usize) {
    let size = bytes.max(MIN_BYTES).next_power_of_two();
    (size, (size.ilog2() - MIN_LOG) as usize)
}

/// Takes a piece of at least `bytes`, at most [`MAX_BYTES`], aligned to its size up to a base page,
/// with any content. `None` without memory, and in a handler that interrupted the holder of the lock.
pub(super) fn take(bytes: usize) -> Option<*mut u8> {
    let (size, index) = size_of_piece(bytes);
    PIECES
        .with(|pieces| {
            let free = pieces.free.get_mut(index)?;
            if !free.is_null() {
                let piece = *free;
                // SAFETY: a free piece begins with the address of the next one.
                *free = unsafe { piece.cast::<*mut u8>().read() };
                return Some(piece);
            }
            cut(pieces, size, size.min(4096))
        })
        .flatten()
}

/// Takes `bytes` that are never given back, aligned to 16, with any content. `None` as for [`take`].
pub(super) fn fresh(bytes: usize) -> Option<*mut u8> {
    PIECES
        .with(|pieces| cut(pieces, bytes.next_multiple_of(MIN_BYTES), MIN_BYTES))
        .flatten()
}

/// Cuts a piece of the fresh memory.
fn cut(pieces: &mut Pieces, size: usize, align: usize) -> Option<*mut u8> {
    let mut padding = pieces.fresh.align_offset(align);
    if pieces.fresh.is_null() || padding + size > pieces.left {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let new = sys::map_own(STEP_BYTES, access, MapFlags::PRIVATE).ok()?;
        (pieces.fresh, pieces.left) = (new.cast(), STEP_BYTES);
        padding = 0;
    }
    let piece = pieces.fresh.wrapping_add(padding);
    pieces.fresh = piece.wrapping_add(size);
    pieces.left -= padding + size;
    Some(piece)
}

/// Gives a piece back. In a handler that interrupted the holder of the lock it is lost.
///
/// # Safety
/// [`take`] returned it for as many bytes, and nothing uses it.
pub(super) unsafe fn give(piece: *mut u8, bytes: usize) {
    let (_, index) = size_of_piece(bytes);
    PIECES.with(|pieces| {
        if let Some(free) = pieces.free.get_mut(index) {
            // SAFETY: the caller's promise; the piece has room for an address.
            unsafe { piece.cast::<*mut u8>().write(*free) };
            *free = piece;
        }
    });
}

/// Acquires the lock for fork(2); false if this thread holds it.
pub(super) fn lock() -> bool {
    PIECES.acquire()
}

/// Releases the lock after fork(2).
///
/// # Safety
/// [`lock`] acquired it, in this thread or in its original.
pub(super) unsafe fn unlock() {
    // SAFETY: the caller's promise.
    unsafe { PIECES.release() };
}
