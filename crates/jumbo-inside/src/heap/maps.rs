//! The program's own anonymous mappings: [`place_large`], [`take_small`], [`place_piece`], [`advise_mapping`].
//!
//! A mapping of at least one PMD gets an address aligned to it, so that all of it but the end can be
//! PMD-mapped (the kernel does so by itself since 6.7, and only for lengths that are multiples of the
//! PMD size), and is advised. Smaller ones cannot be huge alone: allocators that ask for, say, 1 MiB at a
//! time (CPython's arenas) get theirs packed one behind the other on a frontier of their own, once
//! they have asked for so much that it pays. The pieces that V8 reserves its heap in get addresses one
//! behind the other as well, and stay V8's own mappings.
//!
//! What is mapped here is the program's: it may unmap, protect, lock, or advise it otherwise, as any
//! mapping, and nothing is kept about it.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::backing::Backing;
use super::frontier::Frontier;
use super::{BASE_PAGE, HeapSettings, IS_PLACED, LOCKS_FUTURE, MAPS_BASE, MAPS_END, PMD, memory};
use crate::density::{self, Decision, Policy};
use crate::gather;
use crate::ledger::{Slot, stats};
use crate::proc;
use crate::sandbox;
use crate::sync::Lock;
use crate::sys;

/// Mappings below that are not packed: it is mostly files' buffers and stacks that are so small.
pub const MIN_PACKED_BYTES: usize = 256 << 10;
/// How many PMDs' worth of small mappings a program asks for before they are packed.
const PACKED_AFTER_PMDS: usize = 4;

#[derive(Debug)]
pub(super) struct PackedMappings {
    frontier: Frontier,
    asked: usize,
    pmd: usize,
    pieces: Pieces,
}

/// Addresses for the pieces of a heap, and the first block of them that is not scanned yet.
#[derive(Debug)]
struct Pieces {
    asked: usize,
    left: Range<usize>,
    open: usize,
}

/// The addresses for pieces that are taken at a time.
const PIECES_BYTES: usize = 64 << 20;

impl Pieces {
    /// The address of the next `length` bytes.
    fn take(&mut self, length: usize, pmd: usize) -> Option<usize> {
        self.asked = self.asked.saturating_add(length);
        if self.asked < PACKED_AFTER_PMDS * pmd {
            return None;
        }
        // All pieces in front of the next one are there by now, as far as this thread asked for them.
        let complete = self.open..self.left.start & !(pmd - 1);
        if complete.len() >= pmd {
            density::begin_on_base_pages(&complete);
            self.open = complete.end;
        }
        if self.left.len() < length {
            let start = LARGE_CURSOR.take(PIECES_BYTES.max(pmd), usize::MAX)?;
            self.left = start..start + PIECES_BYTES.max(pmd);
            self.open = start;
        }
        let at = self.left.start;
        self.left.start += length;
        Some(at)
    }
}

impl PackedMappings {
    fn take(&mut self, length: usize) -> Option<usize> {
        match self.frontier.take(length, false) {
            Ok(growth) => Some(growth.start),
            // The program takes an address of its own this once, and the next one is found elsewhere.
            Err(Errno::EXIST) => {
                let (left, right) = self.frontier.skip();
                if left < right {
                    #[expect(unsafe_code, reason = "unmaps memory")]
                    // SAFETY: the frontier mapped it, and never handed it out.
                    let _ = unsafe { memory::unmap(left, right - left) };
                }
                None
            }
            Err(Errno::RANGE) => {
                self.frontier.place(MAPS_BASE, PACK_END, self.pmd);
                None
            }
            Err(_) => None,
        }
    }
}

crate::one_page! {
    pub(super) static PACK: Lock<PackedMappings> = Lock::new(PackedMappings {
        frontier: Frontier::new(Backing::Advised),
        asked: 0,
        pmd: 0,
        pieces: Pieces {
            asked: 0,
            left: 0..0,
            open: 0,
        },
    });
}
/// Where the next large mapping goes.
static LARGE_CURSOR: Cursor = Cursor::new(PACK_END, LARGE_END);
/// Where the next large shared one goes: apart, since of those none is moved or copied here.
static SHARED_CURSOR: Cursor = Cursor::new(LARGE_END, MAPS_END);

/// Addresses for small mappings; those for large ones follow, and then those for shared ones.
const PACK_END: usize = MAPS_BASE + (MAPS_END - MAPS_BASE) / 4;
const LARGE_END: usize = MAPS_END - (MAPS_END - MAPS_BASE) / 4;

/// Addresses that are given out one behind the other, and from the start again.
#[derive(Debug)]
struct Cursor {
    next: AtomicUsize,
    start: usize,
    end: usize,
}

impl Cursor {
    const fn new(start: usize, end: usize) -> Self {
        Self {
            next: AtomicUsize::new(start),
            start,
            end,
        }
    }

    fn place(&self, random: usize, pmd: usize) {
        let offset = random % ((self.end - self.start) / 2 / pmd) * pmd;
        self.next.store(self.start + offset, Ordering::Relaxed);
    }

    fn take(&self, length: usize, max: usize) -> Option<usize> {
        let pmd = PMD.load(Ordering::Relaxed);
        if !is_active() || length < pmd || length > max {
            return None;
        }
        let step = length.next_multiple_of(pmd);
        let next = |at: usize| match at + step > self.end {
            true => self.start + step,
            false => at + step,
        };
        let before =
            (self.next).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| Some(next(at)));
        before.ok().map(|at| next(at) - step)
    }
}

pub(super) fn place(settings: HeapSettings, random: usize) {
    let pmd = settings.pmd;
    let offset = |bytes: usize| random % (bytes / 2 / pmd) * pmd;
    PACK.with(|pack| {
        pack.frontier
            .place(MAPS_BASE + offset(PACK_END - MAPS_BASE), PACK_END, pmd);
        pack.pmd = pmd;
    });
    LARGE_CURSOR.place(random, pmd);
    SHARED_CURSOR.place(random, pmd);
}

/// True where `address` is one that was given out here, for memory of the program's own.
pub const fn is_placed(address: usize) -> bool {
    address.wrapping_sub(MAPS_BASE) < LARGE_END - MAPS_BASE
}

/// Whether the mapping of the program's that a range is may be several to the kernel by our doing: advice has cut it, or it
/// is packed behind others. And it is of one kind: readable, writable, private, without a file, a hole or a lock. Behind a
/// filter of the program's own that cannot be looked at, and is taken for true of memory that advice may have cut.
pub fn is_split(address: usize, length: usize) -> bool {
    let length = length.next_multiple_of(BASE_PAGE);
    let Some(end) = address.checked_add(length).filter(|_| length > 0) else {
        return false;
    };
    let is_packed =
        || address >= MAPS_BASE && end <= PACK_END && length < PMD.load(Ordering::Relaxed);
    let is_cut = density::is_cut(&(address..end));
    if sandbox::is_entered_later() || !is_cut && !is_packed() {
        return is_cut;
    }
    let mut is_plain = gather::is_whole_and_unlocked(address, length).is_ok();
    let looked = proc::each_mapping(|line| {
        if line.start < end && address < line.end {
            is_plain &= line.writable && !line.executable && line.is_private_anonymous();
        }
        line.start >= end
    });
    is_plain && looked.is_ok()
}

/// A good address for a mapping of `length` bytes, as a hint for mmap(2): the kernel takes another
/// one where this is in use. `None` where the mapping is too small to be huge.
pub fn place_large(length: usize) -> Option<usize> {
    LARGE_CURSOR.take(length, (LARGE_END - PACK_END) / 8)
}

/// As [`place_large`], for memory that processes share: databases have all of theirs in one mapping.
pub fn place_shared(length: usize) -> Option<usize> {
    SHARED_CURSOR.take(length, (MAPS_END - LARGE_END) / 2)
}

/// Fresh private memory of `length` bytes for a mapping that is too small to be huge alone, or `None`
/// where it is not for us. It is mapped, readable and writable.
pub fn take_small(length: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed);
    if !is_active() || !(MIN_PACKED_BYTES..pmd).contains(&length) {
        return None;
    }
    let length = length.next_multiple_of(BASE_PAGE);
    // mmap(2) waits for no other thread: one that is suspended may be in here.
    PACK.with_soon(|pack| {
        pack.asked = pack.asked.saturating_add(length);
        if pack.asked < PACKED_AFTER_PMDS * pack.pmd {
            return None;
        }
        pack.take(length)
    })
    .flatten()
    .inspect(|_| Slot::add(&stats::slot().maps_advised, length as u64))
}

/// A good address for a piece of a heap, as a hint for mmap(2), in the place of the program's own `hint`. `None` where
/// it is not for us.
///
/// V8 reserves its heap in pieces of 256 KiB at random addresses, where no huge page fits. To have a piece aligned, it
/// asks for as much more, and unmaps the rest.
pub fn place_piece(hint: usize, length: usize) -> Option<usize> {
    let kept = length.checked_sub(MIN_PACKED_BYTES - BASE_PAGE)?;
    let is_piece = hint != 0 && hint.is_multiple_of(MIN_PACKED_BYTES) && kept >= MIN_PACKED_BYTES;
    if !is_piece || !is_active() {
        return None;
    }
    let kept = kept.next_multiple_of(MIN_PACKED_BYTES);
    PACK.with_soon(|pack| pack.pieces.take(kept, pack.pmd))
        .flatten()
}

/// Advises an anonymous mapping that the program has just made, if a whole huge page fits in it. One without access is a reservation
/// of addresses, hundreds of GiB at times, which is advised for what becomes of it and is not counted.
pub fn advise_mapping(address: usize, length: usize, is_accessible: bool) {
    let policy = match is_accessible {
        true => Policy::Mapping,
        false => Policy::Reservation,
    };
    let _ = density::advise(&whole(address, length), policy);
}

/// The program has made memory of a part of what it had reserved (MAP_FIXED). True where it begins on base pages, and is
/// scanned; else it is to be advised as any other.
///
/// A database lays out the headers of a buffer pool, 2 MiB apart or more, long before it fills it.
pub fn commit(address: usize, length: usize) -> bool {
    let range = address..address.saturating_add(length);
    // With a bound it is a mapping like any other.
    let is_special = !LOCKS_FUTURE.load(Ordering::Relaxed) && !density::is_bounded();
    is_special && density::decide(&range, Policy::Committed).0 == Decision::BaseForNow
}

/// Advises text that the program has just mapped from a file, if a whole huge page fits in it: what is not cached yet is
/// then read in huge folios.
pub fn advise_text(address: usize, length: usize) {
    let _ = density::advise(&whole(address, length), Policy::Text);
}

/// The whole pages of a mapping.
const fn whole(address: usize, length: usize) -> Range<usize> {
    address..address + length.next_multiple_of(BASE_PAGE)
}

/// Makes a mapping resident, as MAP_POPULATE would have: as far as it goes. MADV_POPULATE_WRITE, 5.14.
pub fn populate(address: usize, length: usize) {
    let huge = PMD.load(Ordering::Relaxed);
    let _ = memory::populate(address, length.next_multiple_of(BASE_PAGE), huge);
}

/// A mapping that was left as the program made it.
pub fn left_alone(length: usize) {
    Slot::add(&stats::slot().maps_left, length as u64);
}

/// Moves a mapping of ours that has to grow to a place where it can, aligned as it was. For mremap(2)
/// with MREMAP_MAYMOVE, after growing in place has failed.
///
/// # Safety
/// The caller may move the `old` bytes at `address`: nothing uses them there from now on.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn move_grown(address: usize, old: usize, new: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed);
    let off = address % pmd.max(1);
    let target = place_large(new.checked_add(pmd)?)? + off;
    let length = new.next_multiple_of(BASE_PAGE);
    sys::reserve(target, length).ok()?;
    // SAFETY: the caller's promise; what is at the target was reserved above, by this thread.
    unsafe {
        if memory::move_grown(address, target, old, new).is_err() {
            let _ = memory::unmap(target, length);
            return None;
        }
    }
    Some(target)
}

/// Does by hand what mremap(2) refuses because a mapping of the program's is several to the kernel ([`is_split`]): moves it
/// in units, and the last one to its new size. `to`: the place that the program wants, where what is mapped goes.
///
/// # Errors
/// Those of mremap(2); ENOMEM: no place is found.
///
/// # Safety
/// The caller may move the `old` bytes at `address`: nothing uses them there from now on. What is at `to` is the caller's to
/// lose.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn move_cut(
    address: usize,
    old: usize,
    new: usize,
    to: Option<usize>,
) -> Result<usize, Errno> {
    let (old, new) = (
        old.next_multiple_of(BASE_PAGE),
        new.next_multiple_of(BASE_PAGE),
    );
    if new < old {
        // SAFETY: the caller's promise.
        unsafe { memory::unmap(address + new, old - new) }?;
    }
    let old = old.min(new);
    let pmd = PMD.load(Ordering::Relaxed);
    let target = match to {
        Some(to) => to,
        None => {
            let place = new.checked_add(pmd).and_then(place_large);
            let target = place.ok_or(Errno::NOMEM)? + address % pmd;
            sys::reserve(target, new).map_err(|_| Errno::NOMEM)?;
            target
        }
    };
    // What is packed meets anywhere.
    let unit = if old < pmd { BASE_PAGE } else { pmd };
    let body = old - BASE_PAGE;
    // SAFETY: the caller's promise; the target was reserved above, or is the caller's.
    let result = unsafe { sys::move_units(address, target, body, unit) }.and_then(|()| {
        // The last page grows by the rest.
        let length = BASE_PAGE + new - old;
        // SAFETY: as above.
        let last = unsafe { memory::move_grown(address + body, target + body, BASE_PAGE, length) };
        if last.is_err() {
            // SAFETY: it came from there.
            unsafe { sys::move_units(target, address, body, unit) }?;
        }
        last
    });
    if result.is_err() && to.is_none() {
        // SAFETY: reserved above.
        let _ = unsafe { memory::unmap(target, new) };
    }
    result.map(|()| target)
}

/// Has such a mapping grow where it is, by its last page. Gives its address.
///
/// # Errors
/// Those of mremap(2).
pub fn grow_cut(address: usize, old: usize, new: usize) -> Result<usize, Errno> {
    let old = old.next_multiple_of(BASE_PAGE);
    let more = new
        .next_multiple_of(BASE_PAGE)
        .checked_sub(old)
        .filter(|_| old > 0)
        .ok_or(Errno::FAULT)?;
    let last = (address + old).checked_sub(BASE_PAGE).ok_or(Errno::FAULT)?;
    memory::grow(last, BASE_PAGE, BASE_PAGE + more).map(|()| address)
}

fn is_active() -> bool {
    let advised = IS_PLACED.load(Ordering::Acquire) && sandbox::allows_advice();
    advised && !LOCKS_FUTURE.load(Ordering::Relaxed)
}
