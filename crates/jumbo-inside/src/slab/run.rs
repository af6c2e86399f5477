//! Blocks between those of a smaller class, where freed memory is sparse: [`take`] and [`put`].
//!
//! A program may free most of its blocks, and go on with others of another size. Each base page with
//! a block left stays, and its slab serves one size only. So while the heap holds more than it may, a
//! request for which no slab has a block takes a piece of adjacent free blocks of a smaller class.
//!
//! The block in which a piece begins has the flag [`state::RUN`], with the place of the beginning in
//! the upper bits; the others have [`state::TAIL`]. A piece ends where the next one begins, or with
//! its last block. No two pieces begin in the same block.
#![expect(unsafe_code, reason = "blocks are reached by address")]

use core::sync::atomic::{AtomicUsize, Ordering};

use super::blocks::{BASE_BYTES, Slab};
use super::central;
use super::class::shape_of;
use super::{state, sweep, unit};
use jumbo_sys as sys;

/// Largest block that is a piece of others.
const MAX_BYTES: usize = 8 << 10;
/// Slabs that a request looks at.
const MAX_LOOKS: usize = 16;
/// Requests that look at none after one has found nothing.
const PAUSE_REQUESTS: usize = 100;
/// Places in a block where a piece can begin.
const PLACES: usize = 8;

/// Class that had room last.
static NEXT_CLASS: AtomicUsize = AtomicUsize::new(1);
static PAUSE: AtomicUsize = AtomicUsize::new(0);

/// Returns the distance of two places in a block of that size.
fn step(size: usize) -> usize {
    size.div_ceil(PLACES).next_power_of_two().max(16)
}

/// Returns the first place at or after an offset in a slab of blocks of that size.
fn place_after(offset: usize, size: usize) -> usize {
    let (start, within) = (offset - offset % size, offset % size);
    start + within.next_multiple_of(step(size)).min(size)
}

/// Takes at most `wanted` pieces for blocks of a class: writes their addresses, and returns their
/// number.
///
/// # Safety
/// `to` has room for so many addresses.
#[inline(never)]
pub(super) unsafe fn take(class: usize, to: *mut usize, wanted: usize) -> usize {
    if shape_of(class).size as usize > MAX_BYTES || !sweep::is_sparse() {
        return 0;
    }
    let pause = PAUSE.load(Ordering::Relaxed);
    if pause > 0 {
        PAUSE.store(pause - 1, Ordering::Relaxed);
        return 0;
    }
    // Deeper than the caller's stack may be. SAFETY: the caller's promise.
    sys::apart(|| unsafe { search(class, to, wanted) }).unwrap_or(0)
}

/// Takes pieces between the blocks of smaller classes.
unsafe fn search(class: usize, to: *mut usize, wanted: usize) -> usize {
    let (first, mut looks) = (NEXT_CLASS.load(Ordering::Relaxed).min(class), 0);
    for of in (first..class).chain(1..first) {
        // SAFETY: the caller's promise.
        let taken = unsafe { take_of(of, shape_of(class).size as usize, to, wanted, &mut looks) };
        if taken > 0 {
            NEXT_CLASS.store(of, Ordering::Relaxed);
            return taken;
        }
        if looks >= MAX_LOOKS {
            break;
        }
    }
    PAUSE.store(PAUSE_REQUESTS, Ordering::Relaxed);
    0
}

/// Takes pieces of `bytes` between the blocks of a class.
unsafe fn take_of(
    class: usize,
    bytes: usize,
    to: *mut usize,
    wanted: usize,
    looks: &mut usize,
) -> usize {
    let (mut taken, mut used, mut resident) = (0, 0, 0);
    central::with(class, |slabs| {
        while taken < wanted && *looks < MAX_LOOKS {
            let Some(slab) = slabs.sparsest() else { return };
            *looks += 1;
            let mut from = 0;
            while taken < wanted {
                let Some((first, free)) = slab.next_free(from) else {
                    break;
                };
                from = first + free;
                let (size, end) = (slab.size(), from * slab.size());
                let (mut at, mut next) = (first * size, first);
                while taken < wanted && at + bytes <= end {
                    let last = (at + bytes).div_ceil(BASE_BYTES);
                    if (at / BASE_BYTES..last).all(|page| slab.is_gone(page)) {
                        // The next page may be resident.
                        at = place_after(
                            (last * BASE_BYTES).saturating_sub(bytes).max(at + 16),
                            size,
                        );
                        next = next.max(at / size);
                        continue;
                    }
                    let (begin, piece_end) = (at / size, (at + bytes).div_ceil(size));
                    let place = u8::try_from(at % size / step(size)).unwrap_or(0);
                    let kind = state::CACHED | state::RUN | place << state::PLACE_SHIFT;
                    if begin < next {
                        // The block in which the last piece ends.
                        slab.state(begin)
                            .store(kind | state::DIRTY, Ordering::Relaxed);
                    }
                    for block in begin.max(next)..piece_end {
                        let tail = state::LIVE | state::TAIL;
                        resident += slab.mark(block, if block == begin { kind } else { tail });
                        used += size;
                    }
                    next = piece_end;
                    // SAFETY: the caller's promise.
                    unsafe { to.add(taken).write(slab.address_of(0) + at) };
                    taken += 1;
                    at = place_after(at + bytes, size);
                }
            }
            // SAFETY: a slab of this class.
            unsafe {
                match taken < wanted {
                    true => slabs.set_without_runs(slab),
                    false => slabs.relist(slab),
                }
            }
        }
    });
    central::touched(resident);
    central::add_idle(resident.cast_signed() - used.cast_signed());
    taken
}

/// A piece, in a slab.
struct Piece {
    slab: Slab,
    /// Offset in the slab, in bytes.
    at: usize,
}

impl Piece {
    /// # Safety
    /// The address is in a slab.
    unsafe fn new(address: usize) -> Self {
        // SAFETY: the caller's promise.
        let (header, first) = unsafe { unit::slab_at(address) };
        let slab = Slab { first, header };
        Self {
            slab,
            at: address - slab.address_of(0),
        }
    }

    fn begin(&self) -> usize {
        self.at / self.slab.size()
    }

    fn state(&self, block: usize) -> u8 {
        match block < self.slab.blocks() {
            true => self.slab.state(block).load(Ordering::Relaxed),
            false => 0,
        }
    }

    /// Reports whether the piece begins at the address, and the program has it.
    fn is_live(&self) -> bool {
        let (state, within) = (self.state(self.begin()), self.at % self.slab.size());
        state & (state::RUN | state::KIND) == state::RUN | state::LIVE
            && usize::from(state >> state::PLACE_SHIFT) * step(self.slab.size()) == within
    }

    /// Returns the first block after the piece's, in which the next piece may begin.
    fn end(&self) -> usize {
        let mut end = self.begin() + 1;
        while self.state(end) & (state::TAIL | state::RUN) == state::TAIL {
            end += 1;
        }
        end
    }
}

/// Reports whether a piece that the program has begins at an address of a chunk.
///
/// # Safety
/// The address is in a chunk.
pub(super) unsafe fn is_live(address: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let (header, _) = unit::slab_at(address);
        (*header).class != 0 && Piece::new(address).is_live()
    }
}

/// Returns the room of a piece, in bytes.
///
/// # Safety
/// A piece begins at the address.
pub(super) unsafe fn room(address: usize) -> usize {
    // SAFETY: the caller's promise.
    let piece = unsafe { Piece::new(address) };
    let (end, size) = (piece.end(), piece.slab.size());
    let next = piece.state(end);
    let within = match next & state::RUN {
        0 => 0,
        _ => usize::from(next >> state::PLACE_SHIFT) * step(size),
    };
    end * size + within - piece.at
}

/// Puts a piece back.
///
/// # Safety
/// A piece that is taken begins at the address, and nothing uses it.
pub(super) unsafe fn put(address: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let piece = Piece::new(address);
        let (slab, size) = (piece.slab, piece.slab.size());
        let class = usize::from((*slab.header).class);
        let mut freed = 0;
        central::with(class, |slabs| {
            let (begin, end) = (piece.begin(), piece.end());
            // The piece before may end in the block in which this one begins.
            let is_shared = begin > 0
                && !piece.at.is_multiple_of(size)
                && piece.state(begin - 1) & (state::RUN | state::TAIL) != 0;
            let first = match is_shared {
                true => {
                    let tail = state::LIVE | state::TAIL | state::DIRTY;
                    slab.state(begin).store(tail, Ordering::Relaxed);
                    begin + 1
                }
                false => begin,
            };
            slab.free(first, end - first);
            freed = (end - first) * size;
            slabs.settle(slab);
        });
        central::add_idle(freed.cast_signed());
    }
}
