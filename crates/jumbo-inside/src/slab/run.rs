//! Pieces of the free memory between blocks of another class, where freed memory is sparse: [`take`]
//! and [`put`].
//!
//! A program may free most of its blocks, and go on with others of another size. Each base page with
//! a block left stays, and its slab serves one size only. So while the heap holds more than it may, a
//! request for which no slab has a block takes a piece of the free memory of another class's slab.
//!
//! Such a slab has two bits for each 16 bytes of it, a *grain*: a piece begins there, a piece ends
//! there. Blocks of which pieces have a part are marked [`state::PIECES`], and are free again after
//! the last of these.
#![expect(unsafe_code, reason = "blocks are reached by address")]

use core::ops::Range;
use core::sync::atomic::{AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};

use super::blocks::{BASE_BYTES, Slab, words};
use super::class::{CLASSES, GRAIN, UNIT_BYTES, shape_of};
use super::{central, meta, state, sweep, unit};
use jumbo_sys as sys;

/// Largest piece.
const MAX_BYTES: usize = 8 << 10;
/// Largest block of which smaller pieces are taken: a piece keeps the base pages of its block.
const MAX_BLOCK_BYTES: usize = BASE_BYTES;
/// Slabs that a request looks at, and those in which it looks for free blocks, or at each piece, in looks.
const MAX_LOOKS: usize = 256;
const RUN_LOOKS: usize = 3;
const SEARCH_LOOKS: usize = 16;
/// Requests that look at none after one has found nothing: in all slabs, and in some.
const PAUSE_REQUESTS: usize = 100;
const SHORT_PAUSE_REQUESTS: usize = 10;
/// Growth of the idle memory that ends the pause.
const PAUSE_BYTES: isize = 256 << 10;
/// Grains of the largest slab whose bits fit a record.
const MAX_GRAINS: usize = meta::MAX_BYTES * 8 / 2;

/// Class that had room last.
static NEXT_CLASS: AtomicUsize = AtomicUsize::new(1);
static PAUSE: AtomicUsize = AtomicUsize::new(0);
/// Idle memory at the beginning of the pause.
static PAUSE_IDLE: AtomicIsize = AtomicIsize::new(0);

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
    if pause > 0 && central::idle() < PAUSE_IDLE.load(Ordering::Relaxed) + PAUSE_BYTES {
        PAUSE.store(pause - 1, Ordering::Relaxed);
        return 0;
    }
    // Deeper than the caller's stack may be. SAFETY: the caller's promise.
    sys::apart(|| unsafe { search(class, to, wanted) }).unwrap_or(0)
}

/// Takes pieces between the blocks of other classes.
unsafe fn search(class: usize, to: *mut usize, wanted: usize) -> usize {
    let (first, mut looks) = (NEXT_CLASS.load(Ordering::Relaxed), 0);
    let has_pieces =
        |of: usize| of < class || of > class && shape_of(of).size as usize <= MAX_BLOCK_BYTES;
    for of in (first..CLASSES)
        .chain(1..first)
        .filter(|of| has_pieces(*of))
    {
        // SAFETY: the caller's promise.
        let taken = unsafe { take_of(of, class, to, wanted, &mut looks) };
        if taken > 0 {
            NEXT_CLASS.store(of, Ordering::Relaxed);
            return taken;
        }
        if looks >= MAX_LOOKS {
            NEXT_CLASS.store(of, Ordering::Relaxed);
            pause(SHORT_PAUSE_REQUESTS);
            return 0;
        }
    }
    pause(PAUSE_REQUESTS);
    0
}

fn pause(requests: usize) {
    PAUSE.store(requests, Ordering::Relaxed);
    PAUSE_IDLE.store(central::idle(), Ordering::Relaxed);
}

/// Takes pieces for a class between the blocks of another one.
unsafe fn take_of(
    of: usize,
    class: usize,
    to: *mut usize,
    wanted: usize,
    looks: &mut usize,
) -> usize {
    let bytes = shape_of(class).size as usize;
    let (mut taken, mut resident) = (0, 0);
    central::with(of, |slabs| {
        while taken < wanted && *looks < MAX_LOOKS {
            let Some(slab) = slabs.sparsest(bytes) else {
                return;
            };
            *looks += 1;
            let had_pieces = Grains::of(slab).is_some();
            if slab.idle_bytes() >= bytes
                && let Some(grains) = Grains::made(slab)
            {
                let mut found = |free: Range<usize>| {
                    let mut at = free.start;
                    while taken < wanted && at + bytes <= free.end {
                        grains.change(&(at..at + bytes), true);
                        resident += mark(slab, at..at + bytes);
                        // SAFETY: the caller's promise.
                        unsafe { to.add(taken).write(slab.address_of(0) + at) };
                        taken += 1;
                        at += bytes;
                    }
                    taken < wanted
                };
                let runs = free_runs(slab, bytes, &mut found);
                *looks += RUN_LOOKS;
                if runs.is_none() || runs == Some(0) && had_pieces && sweep::is_full() {
                    free_ranges(slab, grains, bytes, found);
                    *looks += SEARCH_LOOKS;
                }
            }
            // SAFETY: a slab of this class.
            unsafe {
                match taken < wanted {
                    true => slabs.set_without_runs(slab, bytes),
                    false => slabs.relist(slab),
                }
            }
        }
    });
    central::touched(resident);
    central::add_idle(resident.cast_signed() - (taken * bytes).cast_signed());
    taken
}

/// Marks the free blocks of which a piece has a part. Returns the bytes that become resident.
fn mark(slab: Slab, piece: Range<usize>) -> usize {
    let mut resident = 0;
    for block in blocks_of(slab, &piece) {
        let state = slab.state(block).load(Ordering::Relaxed);
        if state & state::PIECES == 0 {
            resident += slab.mark(block, state::LIVE | state::PIECES);
        }
    }
    resident
}

/// Returns the blocks of which a range of a slab has a part.
fn blocks_of(slab: Slab, range: &Range<usize>) -> Range<usize> {
    slab.number_at(range.start)..slab.number_at(range.end - 1) + 1
}

/// Calls `found` with the runs of free blocks of a slab that have `bytes`, until it returns false. Returns
/// their number; `None` if they are not found so: some are not resident, or a run would be too long. What
/// pieces leave free of their blocks is left out.
fn free_runs(
    slab: Slab,
    bytes: usize,
    found: &mut impl FnMut(Range<usize>) -> bool,
) -> Option<usize> {
    let (size, count) = (slab.size(), words(slab.blocks()));
    let wanted = bytes.div_ceil(size);
    if wanted > u64::BITS as usize || !slab.is_resident() {
        return None;
    }
    let free = |number: usize| match number < count {
        // SAFETY: within the bitmap; the lock of the class is held.
        true => unsafe { *slab.word(number) },
        false => 0,
    };
    let (mut end, mut runs) = (0, 0);
    for number in 0..count {
        let mut starts = u128::from(free(number)) | u128::from(free(number + 1)) << 64;
        let mut length = 1;
        while length < wanted {
            let shift = length.min(wanted - length);
            starts &= starts >> shift;
            length += shift;
        }
        #[expect(clippy::cast_possible_truncation, reason = "starts in this word")]
        let mut starts = starts as u64;
        while starts != 0 {
            let start = number * 64 + starts.trailing_zeros() as usize;
            starts &= starts - 1;
            if start < end {
                continue;
            }
            end = next_bit(start, count * 64, |number| !free(number)).unwrap_or(slab.blocks());
            end = end.min(slab.blocks());
            runs += 1;
            if !found(start * size..end * size) {
                return Some(runs);
            }
        }
    }
    Some(runs)
}

/// Calls `found` with the free ranges of a slab that have `bytes`, until it returns false. A part of
/// each piece there is resident already.
fn free_ranges(
    slab: Slab,
    grains: Grains,
    bytes: usize,
    mut found: impl FnMut(Range<usize>) -> bool,
) {
    let mut used = [u64::MAX; MAX_GRAINS / 64];
    grains.cover(&mut used);
    let (size, length) = (slab.size(), grains.length * GRAIN);
    slab.each_taken(|block, state| {
        if state & state::PIECES == 0 {
            set(&mut used, block * size..(block + 1) * size);
        }
    });
    set(&mut used, slab.blocks() * size..length);
    // A larger piece has a resident page, and may have one that is not.
    let pages = length / BASE_BYTES;
    for page in (0..pages).filter(|page| bytes <= BASE_BYTES && slab.is_gone(*page)) {
        set(&mut used, page * BASE_BYTES..(page + 1) * BASE_BYTES);
    }
    let word = |number: usize| used.get(number).copied().unwrap_or(u64::MAX);
    let mut end = 0;
    while let Some(start) = next_bit(end / GRAIN, grains.length, |number| !word(number)) {
        let range =
            start * GRAIN..next_bit(start, grains.length, word).unwrap_or(grains.length) * GRAIN;
        end = range.end;
        let is_resident = bytes <= BASE_BYTES
            || (range.start / BASE_BYTES..range.end.div_ceil(BASE_BYTES))
                .any(|page| !slab.is_gone(page));
        if range.len() >= bytes && is_resident && !found(range) {
            return;
        }
    }
}

/// Sets the bits of the grains in a range of bytes.
fn set(words: &mut [u64], range: Range<usize>) {
    let (mut at, end) = (range.start / GRAIN, range.end / GRAIN);
    while at < end {
        let count = (64 - at % 64).min(end - at);
        if let Some(word) = words.get_mut(at / 64) {
            *word |= u64::MAX >> (64 - count) << (at % 64);
        }
        at += count;
    }
}

/// Returns the first bit from one on that is set, of `count`.
fn next_bit(from: usize, count: usize, word: impl Fn(usize) -> u64) -> Option<usize> {
    let mut mask = u64::MAX << (from % 64);
    for number in from / 64..count.div_ceil(64) {
        let bits = word(number) & mask;
        if bits != 0 {
            return Some(number * 64 + bits.trailing_zeros() as usize);
        }
        mask = u64::MAX;
    }
    None
}

/// Pieces of a slab, by the grains in which they begin and end.
#[derive(Clone, Copy)]
struct Grains {
    /// Bits of the beginnings, then those of the ends. Changed under the lock of the class.
    words: *mut AtomicU64,
    length: usize,
}

impl Grains {
    /// Returns those of a slab; `None` if it has no pieces.
    fn of(slab: Slab) -> Option<Self> {
        // SAFETY: the slab's header; its caller has a piece, or the lock of the class.
        let words = unsafe { (*slab.header).grains };
        let length = usize::from(shape_of(slab.class()).units) * UNIT_BYTES / GRAIN;
        (!words.is_null()).then_some(Self { words, length })
    }

    /// Returns those of a slab, after they were made if it has none. `None` without memory.
    fn made(slab: Slab) -> Option<Self> {
        let length = usize::from(shape_of(slab.class()).units) * UNIT_BYTES / GRAIN;
        Self::of(slab).or_else(|| {
            let words = (length <= MAX_GRAINS).then(|| meta::take(length / 8 * 2));
            let words = words.flatten()?;
            // SAFETY: the record has so many bytes; the lock of the class is held.
            unsafe {
                words.write_bytes(0, length / 8 * 2);
                // A thread that frees another piece reads the bits without the lock.
                fence(Ordering::Release);
                (*slab.header).grains = words.cast();
            }
            Self::of(slab)
        })
    }

    fn word(self, number: usize) -> &'static AtomicU64 {
        debug_assert!(number < self.length / 64 * 2);
        // SAFETY: within the record, which is never unmapped.
        unsafe { &*self.words.add(number) }
    }

    fn bits(self, number: usize) -> u64 {
        self.word(number).load(Ordering::Relaxed)
    }

    /// Returns the first grain of a range in which a piece begins.
    fn next_begin(self, range: Range<usize>) -> Option<usize> {
        let next = next_bit(range.start, range.end, |number| self.bits(number));
        next.filter(|grain| *grain < range.end)
    }

    /// Returns the first grain of a range in which a piece ends.
    fn next_end(self, range: Range<usize>) -> Option<usize> {
        let ends = self.length / 64;
        let next = next_bit(range.start, range.end, |number| self.bits(ends + number));
        next.filter(|grain| *grain < range.end)
    }

    /// Adds a piece, or removes it.
    fn change(self, piece: &Range<usize>, is_added: bool) {
        let ends = self.length / 64;
        for (first, grain) in [(0, piece.start / GRAIN), (ends, piece.end / GRAIN - 1)] {
            let (word, bit) = (self.word(first + grain / 64), 1 << (grain % 64));
            let bits = word.load(Ordering::Relaxed);
            let bits = if is_added { bits | bit } else { bits & !bit };
            word.store(bits, Ordering::Relaxed);
        }
    }

    /// Returns the piece that begins at an offset.
    fn piece(self, at: usize) -> Option<Range<usize>> {
        let grain = at / GRAIN;
        let begins = at.is_multiple_of(GRAIN) && self.bits(grain / 64) & 1 << (grain % 64) != 0;
        let end = begins
            .then(|| self.next_end(grain..self.length))
            .flatten()?;
        Some(at..(end + 1) * GRAIN)
    }

    /// Writes the bits of the grains that pieces have.
    fn cover(self, words: &mut [u64]) {
        let ends = self.length / 64;
        // Set within a piece: each beginning, and each grain after an end, changes it.
        let mut inside = 0;
        for (number, word) in words.iter_mut().take(ends).enumerate() {
            let last = self.bits(ends + number);
            let mut changes = self.bits(number) ^ last << 1 ^ inside;
            for shift in [1, 2, 4, 8, 16, 32] {
                changes ^= changes << shift;
            }
            *word = changes;
            inside = (changes >> 63) & !(last >> 63);
        }
    }

    /// Reports whether a piece has a part of a range.
    fn meet(self, range: &Range<usize>) -> bool {
        let (start, end) = (range.start / GRAIN, range.end / GRAIN);
        let furthest = (start + MAX_BYTES / GRAIN).min(self.length);
        // An end that comes first is that of a piece that began before.
        self.next_begin(start..end).is_some() || {
            let next = self.next_end(start..furthest);
            next.is_some_and(|next| self.next_begin(end..next + 1).is_none())
        }
    }
}

/// Returns the slab at an address, and the piece that begins there, as offsets in the slab.
///
/// # Safety
/// The address is in a chunk.
unsafe fn piece_at(address: usize) -> Option<(Slab, Range<usize>)> {
    // SAFETY: the caller's promise.
    let (header, first) = unsafe { unit::slab_at(address) };
    let slab = Slab { first, header };
    // SAFETY: the header of a unit.
    let is_in_slab = unsafe { (*header).class != 0 };
    let grains = is_in_slab.then(|| Grains::of(slab)).flatten()?;
    Some((slab, grains.piece(address - slab.address_of(0))?))
}

/// Reports whether a piece begins at an address of a chunk.
///
/// # Safety
/// The address is in a chunk.
pub(super) unsafe fn is_live(address: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { piece_at(address).is_some() }
}

/// Returns the room of the piece at an address, in bytes; `None` if none begins there.
///
/// # Safety
/// The address is in a chunk.
pub(super) unsafe fn room(address: usize) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe { piece_at(address) }.map(|(_, piece)| piece.len())
}

/// Puts the piece at an address back; false if none begins there.
///
/// # Safety
/// The address is in a chunk; nothing uses a piece that begins there.
pub(super) unsafe fn put(address: usize) -> bool {
    // SAFETY: the caller's promise.
    let Some((slab, piece)) = (unsafe { piece_at(address) }) else {
        return false;
    };
    let done = central::with(slab.class(), |slabs| {
        let Some(grains) = Grains::of(slab) else {
            return;
        };
        grains.change(&piece, false);
        for block in blocks_of(slab, &piece) {
            if !grains.meet(&(block * slab.size()..(block + 1) * slab.size())) {
                // SAFETY: no piece has a part of the block any more.
                unsafe { slab.free(block, 1) };
            }
        }
        // SAFETY: the slab is of this class.
        unsafe { slabs.settle_piece(slab) };
    });
    if done.is_some() {
        central::add_idle(piece.len().cast_signed());
    }
    true
}

/// Gives back the record of a slab that has no pieces any more.
///
/// # Safety
/// The slab has no block that is taken, and its class's lock is held.
pub(super) unsafe fn forget(slab: Slab) {
    if let Some(grains) = Grains::of(slab) {
        // SAFETY: the caller's promise.
        unsafe {
            (*slab.header).grains = core::ptr::null_mut();
            meta::give(grains.words.cast(), grains.length / 8 * 2);
        }
    }
}
