//! Placement of the program's own anonymous mappings: [`place_large`], [`take_small`],
//! [`place_piece`], [`advise_mapping`].
//!
//! A mapping of at least one PMD gets an address aligned to it and is advised, so that all but its
//! end can be PMD-mapped. Since 6.7 the kernel aligns too, but only lengths that are multiples of
//! the PMD size.
//!
//! Smaller mappings cannot be huge alone. Allocators that map, say, 1 MiB at a time (CPython's
//! arenas) get contiguous addresses on a separate frontier, once they have mapped enough. The
//! pieces in which V8 reserves its heap get contiguous addresses too, and stay V8's own mappings.
//!
//! The mappings belong to the program, which may unmap, protect, lock or advise them. No state is
//! kept for them.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::advised;
use super::backing::Backing;
use super::frontier::Frontier;
use super::{BASE_PAGE, HeapSettings, IS_PLACED, LOCKS_FUTURE, MAPS_BASE, MAPS_END, PMD, memory};
use crate::density::{self, Decision, Policy};
use crate::gather;
use crate::ledger::{Slot, stats};
use crate::sandbox;
use crate::sync::Lock;
use jumbo_sys::{self as sys, Maps, proc};

/// Smallest mapping that is packed. Smaller ones are mostly file buffers and stacks.
pub const MIN_PACKED_BYTES: usize = 256 << 10;
/// Small mappings, in PMDs, that a program makes before they are packed.
const PACKED_AFTER_PMDS: usize = 4;

#[derive(Debug)]
pub(super) struct PackedMappings {
    frontier: Frontier,
    requested: usize,
    pmd: usize,
    pieces: Pieces,
}

/// Addresses for the pieces of a heap, and the first block of them that is not scanned yet.
#[derive(Debug)]
struct Pieces {
    requested: usize,
    left: Range<usize>,
    open: usize,
}

/// Address range that is taken for pieces at a time.
const PIECES_BYTES: usize = 64 << 20;

impl Pieces {
    fn take(&mut self, length: usize, pmd: usize) -> Option<usize> {
        self.requested = self.requested.saturating_add(length);
        if self.requested < PACKED_AFTER_PMDS * pmd {
            return None;
        }
        // All pieces before the next one are mapped by now, as far as this thread requested them.
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
            // The kernel chooses this address; the next mapping is placed elsewhere.
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
        requested: 0,
        pmd: 0,
        pieces: Pieces {
            requested: 0,
            left: 0..0,
            open: 0,
        },
    });
}
/// Address of the next large mapping.
static LARGE_CURSOR: Cursor = Cursor::new(PACK_END, LARGE_END);
/// Address of the next large shared mapping: apart, because those are never moved or copied here.
static SHARED_CURSOR: Cursor = Cursor::new(LARGE_END, MAPS_END);

/// End of the addresses for small mappings; those for large and for shared ones follow.
const PACK_END: usize = MAPS_BASE + (MAPS_END - MAPS_BASE) / 4;
const LARGE_END: usize = MAPS_END - (MAPS_END - MAPS_BASE) / 4;

/// Addresses that are handed out in order, and from the start again at the end.
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

/// Reports whether `address` was handed out here for private memory of the program.
pub const fn is_placed(address: usize) -> bool {
    address.wrapping_sub(MAPS_BASE) < LARGE_END - MAPS_BASE
}

/// Reports whether the kernel may have split a mapping of the program because of jumbo: advice cut
/// it, or it is packed with others. All of it must be plain: readable, writable, private,
/// anonymous, without a hole, a lock, or advice of the program for a part of it. Behind a filter of the program the mapping cannot be
/// checked; a cut one then counts as split.
pub fn is_split(address: usize, length: usize) -> bool {
    let length = length.next_multiple_of(BASE_PAGE);
    // A page is in one mapping.
    let is_several = length > BASE_PAGE;
    let Some(end) = address.checked_add(length).filter(|_| is_several) else {
        return false;
    };
    if advised::splits(&(address..end)) {
        return false;
    }
    // Advice of the program ends what is known of the parts, not that they are parts. So the kernel is
    // asked of each mapping that may have been cut.
    let is_cut = density::is_cut(&(address..end));
    if !is_cut && !is_placed(address) {
        return false;
    }
    let looked = sys::unfiltered(|| {
        is_split_in_queries(&(address..end), is_cut)
            .unwrap_or_else(|_| is_split_in_maps(address..end, is_cut))
    });
    looked.unwrap_or(is_cut)
}

/// Reports whether a range is split, asking for one mapping after the other; an error before Linux 6.11.
/// The list would be read from its start.
fn is_split_in_queries(range: &Range<usize>, is_cut: bool) -> Result<bool> {
    let maps = Maps::open()?;
    let (mut at, mut parts) = (range.start, 0);
    while at < range.end {
        let mapping = maps.mapping(at)?;
        if !mapping.is_writable || mapping.is_executable || !mapping.is_private_anonymous {
            return Ok(false);
        }
        parts += 1;
        at = mapping.range.end;
    }
    let is_unlocked = gather::is_whole_and_unlocked(range.start, range.len()).is_ok();
    Ok(is_unlocked && (is_cut || parts > 1))
}

/// Reports whether a range is split, by the list of mappings.
fn is_split_in_maps(
    Range {
        start: address,
        end,
    }: Range<usize>,
    is_cut: bool,
) -> bool {
    let mut is_plain = gather::is_whole_and_unlocked(address, end - address).is_ok();
    let mut parts = 0;
    let looked = proc::each_mapping(|line| {
        if line.start < end && address < line.end {
            parts += 1;
            is_plain &= line.writable && !line.executable && line.is_private_anonymous();
        }
        line.start >= end
    });
    is_plain && looked.is_ok() && (is_cut || parts > 1)
}

/// Reports whether the program has forbidden huge pages for a mapping with a whole one: what it grows
/// by stays on base pages, too. Any other advice leaves the blocks tracked.
pub fn is_forbidden(address: usize, length: usize) -> bool {
    let range = address..address.saturating_add(length);
    let has_block = length >= 2 * PMD.load(Ordering::Relaxed);
    has_block && advised::covers(&range) && !density::is_cut(&range)
}

/// Returns a good address for a mapping of `length` bytes, as a hint for mmap(2); `None` if it is
/// too small to be huge. If the address is in use, the kernel chooses another one.
pub fn place_large(length: usize) -> Option<usize> {
    LARGE_CURSOR.take(length, (LARGE_END - PACK_END) / 8)
}

/// Returns a good address for shared memory: a database has all of its own in one mapping.
pub fn place_shared(length: usize) -> Option<usize> {
    SHARED_CURSOR.take(length, (MAPS_END - LARGE_END) / 2)
}

/// Returns a good address for a file that is mapped from an offset on.
pub fn place_file(length: usize, offset: usize) -> Option<usize> {
    let offset = offset & (PMD.load(Ordering::Relaxed).max(1) - 1);
    place_shared(length.checked_add(offset)?).map(|place| place + offset)
}

/// Maps private read-write memory for a mapping too small to be huge alone; `None` if not packed.
pub fn take_small(length: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed);
    if !is_active() || !(MIN_PACKED_BYTES..pmd).contains(&length) {
        return None;
    }
    let length = length.next_multiple_of(BASE_PAGE);
    // mmap(2) never waits for another thread, and a suspended thread may hold this lock.
    PACK.with_soon(|pack| {
        pack.requested = pack.requested.saturating_add(length);
        if pack.requested < PACKED_AFTER_PMDS * pack.pmd {
            return None;
        }
        pack.take(length)
    })
    .flatten()
    .inspect(|_| Slot::add(&stats::slot().maps_advised, length as u64))
}

/// Returns a good address for a piece of a heap, as a hint for mmap(2) that replaces the program's
/// `hint`. `None` if the mapping is no such piece.
///
/// V8 reserves its heap in pieces of 256 KiB at random addresses, where no huge page fits. To align
/// a piece, V8 maps almost twice its size and unmaps the rest.
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

/// Advises a new anonymous mapping of the program, if a whole huge page fits in it. One without
/// access is a reservation of up to hundreds of GiB: it is advised for later use and not counted.
pub fn advise_mapping(address: usize, length: usize, is_accessible: bool) {
    let policy = match is_accessible {
        true => Policy::Mapping,
        false => Policy::Reservation,
    };
    let _ = density::advise(&whole(address, length), policy);
}

/// Handles a mapping that replaces a part of a reservation (MAP_FIXED). True if it begins on base
/// pages and is scanned; else the caller advises it like any other.
///
/// A database writes the headers of a buffer pool, 2 MiB or more apart, long before it fills it.
pub fn commit(address: usize, length: usize) -> bool {
    let range = address..address.saturating_add(length);
    // With a bound it is a mapping like any other.
    let is_special = !LOCKS_FUTURE.load(Ordering::Relaxed) && !density::is_bounded();
    is_special && density::decide(&range, Policy::Committed).0 == Decision::BaseForNow
}

/// Advises new text mapped from a file: the kernel reads uncached parts in huge folios.
pub fn advise_text(address: usize, length: usize) {
    let _ = density::advise(&whole(address, length), Policy::Text);
}

/// Advises a new mapping of a data file that is only read: the kernel reads uncached parts in huge
/// folios.
pub fn advise_file(address: usize, length: usize) {
    if density::advise(&whole(address, length), Policy::Segment).is_ok() {
        Slot::add(&stats::slot().files_advised, length as u64);
    }
}

/// Reads the file of a mapping in, as MAP_POPULATE does. MADV_POPULATE_READ, Linux 5.14.
///
/// # Errors
/// EINVAL: an older kernel. Others as far as MAP_POPULATE would have come.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn populate_file(address: usize, length: usize) -> Result<()> {
    let length = length.next_multiple_of(BASE_PAGE);
    // SAFETY: the kernel checks the range, and reads change no byte.
    unsafe { sys::advise(address, length, libc::MADV_POPULATE_READ) }
}

/// Returns the whole pages of a mapping.
const fn whole(address: usize, length: usize) -> Range<usize> {
    address..address + length.next_multiple_of(BASE_PAGE)
}

/// Counts a mapping that stays as the program made it.
pub fn count_unmodified(length: usize) {
    Slot::add(&stats::slot().maps_left, length as u64);
}

/// Moves a growing mapping of jumbo to a place with room, with the same alignment. For mremap(2)
/// with MREMAP_MAYMOVE, after growth in place has failed.
///
/// # Safety
/// The caller may move the `old` bytes at `address`: nothing uses them there from now on.
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn move_grown(address: usize, old: usize, new: usize) -> Option<usize> {
    let length = new.checked_next_multiple_of(BASE_PAGE)?;
    let target = reserve_aligned(address, length)?;
    // SAFETY: the caller's promise; this thread reserved the target above.
    unsafe {
        if memory::move_grown(address, target, old, new).is_err() {
            let _ = memory::unmap(target, length);
            return None;
        }
    }
    Some(target)
}

/// Reserves `length` bytes at an address with the alignment of `address`: at the next one for a
/// large mapping, or else where the kernel chooses.
fn reserve_aligned(address: usize, length: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed).max(BASE_PAGE);
    let all = length.checked_add(pmd)?;
    let place = |start: usize| start.next_multiple_of(pmd) + address % pmd;
    let chosen = place_large(all).map(place);
    if let Some(target) = chosen.filter(|target| sys::reserve(*target, length).is_ok()) {
        return Some(target);
    }
    let start = sys::reserve_anywhere(all.checked_add(pmd)?).ok()?;
    let (target, end) = (place(start), start + all + pmd);
    for (from, to) in [(start, target), (target + length, end)] {
        #[expect(unsafe_code, reason = "unmaps memory")]
        // SAFETY: reserved above, and outside of what is returned.
        let _ = unsafe { memory::unmap(from, to - from) };
    }
    Some(target)
}

/// Does an mremap(2) that the kernel refuses because the mapping is split ([`is_split`]): moves it
/// in units, and resizes the last page. `to` is the address that the program requests, if any.
///
/// # Errors
/// Those of mremap(2); ENOMEM: no address is free.
///
/// # Safety
/// The caller may move the `old` bytes at `address`: nothing uses them there from now on. The
/// memory at `to` is the caller's to lose.
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn move_cut(address: usize, old: usize, new: usize, to: Option<usize>) -> Result<usize> {
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
    let target = to.or_else(|| reserve_aligned(address, new));
    let target = target.ok_or(Errno::NOMEM)?;
    // Packed mappings are cut at any page.
    let unit = if old < pmd { BASE_PAGE } else { pmd };
    let body = old - BASE_PAGE;
    // SAFETY: the caller's promise; the target was reserved above, or is the caller's.
    let result = unsafe { sys::move_units(address, target, body, unit, false) }.and_then(|()| {
        // The last page grows by the rest.
        let length = BASE_PAGE + new - old;
        // SAFETY: as above.
        let last = unsafe { memory::move_grown(address + body, target + body, BASE_PAGE, length) };
        if last.is_err() {
            // SAFETY: it was moved from there.
            unsafe { sys::move_units(target, address, body, unit, false) }?;
        }
        last
    });
    if result.is_err() && to.is_none() {
        // SAFETY: reserved above.
        let _ = unsafe { memory::unmap(target, new) };
    }
    result.map(|()| target)
}

/// Variant of [`move_cut`] for MREMAP_DONTUNMAP: the mapping at `address` stays, without its pages.
///
/// # Errors
/// As for [`move_cut`].
///
/// # Safety
/// As for [`move_cut`].
#[expect(unsafe_code, reason = "drops the content of the memory")]
pub unsafe fn move_kept(address: usize, length: usize, to: Option<usize>) -> Result<usize> {
    let length = length.next_multiple_of(BASE_PAGE);
    let target = to.or_else(|| reserve_aligned(address, length));
    let target = target.ok_or(Errno::NOMEM)?;
    let pmd = PMD.load(Ordering::Relaxed);
    let unit = if length < pmd { BASE_PAGE } else { pmd };
    // SAFETY: the caller's promise; the target was reserved above, or is the caller's.
    let result = unsafe { sys::move_units(address, target, length, unit, true) };
    if result.is_err() && to.is_none() {
        // SAFETY: reserved above.
        let _ = unsafe { memory::unmap(target, length) };
    }
    result.map(|()| target)
}

/// Grows a split mapping in place, by its last page, and returns its address.
///
/// # Errors
/// Those of mremap(2).
pub fn grow_cut(address: usize, old: usize, new: usize) -> Result<usize> {
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
