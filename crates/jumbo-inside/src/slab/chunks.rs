//! Chunks: huge pages of addresses, cut into units. [`take`] and [`give`] units of a slab.
//!
//! The first slab of a class may stay nearly empty, so it is in a chunk on base pages: in advised ones a
//! hundred classes of a few blocks each would use up what may be huge and untouched, before the program
//! fills its memory. Further slabs are in advised chunks, which they fill.
//!
//! A request takes units of the fullest chunk of its [`Kind`] that has them, so that empty chunks stay
//! whole and their memory can go back.
#![expect(unsafe_code, reason = "headers are reached by address")]

use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::class::{CHUNK_BYTES, UNITS};
use super::unit::{self, NONE, UNLISTED, Unit};
use crate::density::{self, Policy};
use crate::sandbox;
use crate::sync::{Apart, BackOff, Lock};
use jumbo_sys as sys;

/// Lists of chunks by their free units: the first for chunks without any, then by the power of two
/// below the number.
const LISTS: usize = UNITS.ilog2() as usize + 2;
/// Units of a chunk.
const CHUNK_UNITS: u32 = 64;
const _: () = assert!(CHUNK_UNITS as usize == UNITS);
/// Chunks of a list that a request looks at.
const MAX_LOOKS: usize = 16;
/// Units of slabs from which chunks are advised: a small program is on base pages, and not scanned.
const UNADVISED_UNITS: usize = UNITS;
/// Chunks' worth of addresses tried where the program has mapped some.
const MAX_DETOURS: usize = 8;

/// Kind of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// On base pages until it is dense.
    Base = 0,
    /// Advised when it is mapped.
    Advised = 1,
}

impl Kind {
    /// Returns the kind for the next slab of a class.
    pub(super) fn of(is_first: bool) -> Self {
        match !is_first && TAKEN_UNITS.load(Ordering::Relaxed) >= UNADVISED_UNITS {
            true => Self::Advised,
            false => Self::Base,
        }
    }
}

/// All chunks.
#[derive(Debug)]
pub(super) struct Chunks {
    /// The lists of each kind.
    lists: [u32; 2 * LISTS],
}

crate::one_page! {
    static WORD: AtomicU32 = AtomicU32::new(0);
}
pub(super) static CHUNKS: Lock<Chunks, Apart> = Lock::on(
    &WORD,
    Chunks {
        lists: [NONE; 2 * LISTS],
    },
);
/// Bytes of all chunks, and units in slabs.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);
static TAKEN_UNITS: AtomicUsize = AtomicUsize::new(0);
/// There is an advised chunk, so those on base pages are scanned.
static IS_ADVISING: AtomicBool = AtomicBool::new(false);
/// Least number of adjacent units that were not there since some were given back.
static MISSED_UNITS: AtomicUsize = AtomicUsize::new(usize::MAX);
/// No chunk can be mapped: requests do not try.
static REFUSED: BackOff = BackOff::new();
/// No chunk could be mapped: slabs take units of both kinds.
static IS_SHORT: AtomicBool = AtomicBool::new(false);

/// Returns the list of a chunk of a kind with these free units.
const fn list_of(kind: Kind, free: u64) -> usize {
    let list = match free.count_ones() {
        0 => 0,
        count => count.ilog2() as usize + 1,
    };
    kind as usize * LISTS + list
}

/// Returns the bit of the first of `units` adjacent free units.
fn run(free: u64, units: usize) -> Option<u32> {
    let mut starts = free;
    for shift in 1..units {
        starts &= free >> shift;
    }
    (starts != 0).then(|| starts.trailing_zeros())
}

fn mask(units: usize) -> u64 {
    u64::MAX >> (UNITS - units.clamp(1, UNITS))
}

/// Takes `units` adjacent units: returns the number of the first. Their headers are the caller's to
/// write, except for the pages that are gone. `None` if no chunk has them.
pub(super) fn take(units: usize, kind: Kind) -> Option<u32> {
    let taken = CHUNKS.with(|chunks| chunks.find(units, kind)).flatten();
    if taken.is_none() {
        MISSED_UNITS.fetch_min(units, Ordering::Relaxed);
    }
    taken
}

/// Reports whether [`take`] and [`grow`] have no `units`: nothing was given back since they had none, and
/// no chunk can be mapped.
pub(super) fn is_exhausted(units: usize) -> bool {
    units >= MISSED_UNITS.load(Ordering::Relaxed)
        && (sandbox::is_entered_later() || REFUSED.holds())
}

/// Reports whether a chunk was refused not long ago.
pub(super) fn is_refused() -> bool {
    REFUSED.is_on()
}

/// Records that no chunk can be mapped, for a number of requests.
pub(super) fn refused() {
    /// At a limit, or where all memory is locked: a request that tries takes microseconds.
    const SKIPPED_REQUESTS: u32 = 1 << 14;
    REFUSED.begin(SKIPPED_REQUESTS);
}

/// Maps a chunk for a slab of `units`, unless there is one; false without memory.
pub(super) fn grow(units: usize, kind: Kind) -> bool {
    let has_room = |chunks: &mut Chunks| {
        chunks.look(units, kind).is_some()
            || chunks.grow(kind).is_some()
            || !IS_SHORT.swap(true, Ordering::Relaxed) && chunks.look(units, kind).is_some()
    };
    let has_grown = CHUNKS.with(has_room) == Some(true);
    if !has_grown {
        refused();
    }
    has_grown
}

/// Gives the units of a slab back; false in a handler that interrupted the holder of the lock.
///
/// # Safety
/// [`take`] returned them, and no block is in them.
pub(super) unsafe fn give(first: u32, units: usize) -> bool {
    let given = CHUNKS.with(|chunks| {
        for number in first..first.saturating_add(u32::try_from(units).unwrap_or(0)) {
            let header = unit::header(number);
            // SAFETY: units of a chunk have headers, which the lock protects.
            unsafe {
                (*header).class = 0;
                (*header).back = 0;
            }
        }
        // SAFETY: as above.
        unsafe { chunks.change(first, |free, bit| free | mask(units) << bit) };
        TAKEN_UNITS.fetch_sub(units, Ordering::Relaxed);
        MISSED_UNITS.store(usize::MAX, Ordering::Relaxed);
    });
    given.is_some()
}

impl Chunks {
    /// Takes units.
    fn find(&mut self, units: usize, kind: Kind) -> Option<u32> {
        let first = self.look(units, kind)?;
        // SAFETY: the units are free, and the lock is held.
        unsafe { self.change(first, |free, bit| free & !(mask(units) << bit)) };
        TAKEN_UNITS.fetch_add(units, Ordering::Relaxed);
        Some(first)
    }

    /// Looks for free units, of both kinds where there will be no other chunk.
    fn look(&self, units: usize, kind: Kind) -> Option<u32> {
        let other = match kind {
            Kind::Base => Kind::Advised,
            Kind::Advised => Kind::Base,
        };
        let is_last = || IS_SHORT.load(Ordering::Relaxed) || sandbox::is_entered_later();
        let found = self.look_in(units, kind);
        found.or_else(|| is_last().then(|| self.look_in(units, other))?)
    }

    fn look_in(&self, units: usize, kind: Kind) -> Option<u32> {
        let (first, end) = (list_of(kind, mask(units)), list_of(kind, u64::MAX));
        for list in self.lists.get(first..=end)? {
            let mut chunk = *list;
            for _ in 0..MAX_LOOKS {
                if chunk == NONE {
                    break;
                }
                // SAFETY: a listed chunk has headers.
                let (free, next) = unsafe {
                    let header = unit::header(chunk);
                    ((*header).free, (*header).next_chunk)
                };
                if let Some(bit) = run(free, units) {
                    return Some(chunk + bit);
                }
                chunk = next;
            }
        }
        None
    }

    /// Changes the free units of the chunk of a unit, and its list.
    ///
    /// # Safety
    /// The chunk exists.
    unsafe fn change(&mut self, number: u32, change: impl FnOnce(u64, u32) -> u64) {
        let (chunk, bit) = (number & !(CHUNK_UNITS - 1), number % CHUNK_UNITS);
        let header = unit::header(chunk);
        // SAFETY: the caller's promise; the lock is held.
        unsafe {
            (*header).free = change((*header).free, bit);
            let kind = match usize::from((*header).chunk_list) < LISTS {
                true => Kind::Base,
                false => Kind::Advised,
            };
            let list = u8::try_from(list_of(kind, (*header).free)).unwrap_or(0);
            if (*header).chunk_list != list {
                self.unlist(header);
                self.enlist(chunk, header, list);
            }
        }
    }

    unsafe fn unlist(&mut self, header: *mut Unit) {
        // SAFETY: neighbours of a listed chunk are chunks.
        unsafe {
            let (list, next, before) = (
                (*header).chunk_list,
                (*header).next_chunk,
                (*header).chunk_before,
            );
            if next != NONE {
                (*unit::header(next)).chunk_before = before;
            }
            if before != NONE {
                (*unit::header(before)).next_chunk = next;
            } else if let Some(head) = self.lists.get_mut(usize::from(list)) {
                *head = next;
            }
        }
    }

    unsafe fn enlist(&mut self, chunk: u32, header: *mut Unit, list: u8) {
        let Some(head) = self.lists.get_mut(usize::from(list)) else {
            return;
        };
        // SAFETY: as above.
        unsafe {
            (*header).chunk_list = list;
            (*header).chunk_before = NONE;
            (*header).next_chunk = *head;
            if *head != NONE {
                (*unit::header(*head)).chunk_before = chunk;
            }
        }
        *head = chunk;
    }

    /// Has a new chunk on huge pages, at once or when it is dense.
    fn advise(&self, kind: Kind, chunk: Range<usize>) {
        let is_first = kind == Kind::Advised && !IS_ADVISING.swap(true, Ordering::Relaxed);
        if is_first {
            let base = self.lists.iter().take(LISTS);
            base.for_each(|list| {
                Self::each_of(*list, |number, _| {
                    let start = unit::address_of(number);
                    density::begin_on_base_pages(&(start..start + CHUNK_BYTES));
                });
            });
        }
        match kind {
            // Without advice it is on base pages.
            Kind::Advised => drop(density::advise(&chunk, Policy::Heap)),
            Kind::Base if IS_ADVISING.load(Ordering::Relaxed) => {
                density::begin_on_base_pages(&chunk);
            }
            Kind::Base => {}
        }
    }

    /// Maps the next chunk.
    fn grow(&mut self, kind: Kind) -> Option<()> {
        if sandbox::is_entered_later() {
            return None;
        }
        for _ in 0..MAX_DETOURS {
            let (chunk, address) = unit::next_chunk()?;
            unit::map_headers().ok()?;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let mapped = sys::map_at(address, CHUNK_BYTES, access, MapFlags::empty());
            let is_taken = match mapped {
                Ok(()) => false,
                // The program has mapped something there.
                Err(Errno::EXIST) => true,
                Err(_) => return None,
            };
            for number in chunk..chunk + CHUNK_UNITS {
                // SAFETY: mapped above, for this chunk.
                unsafe {
                    unit::header(number).write(Unit {
                        states: null_mut(),
                        size: 0,
                        factor: 0,
                        class: 0,
                        back: 0,
                        list: UNLISTED,
                        gone: u8::MAX,
                        next: NONE,
                        before: NONE,
                        blocks: 0,
                        out: 0,
                        hint: 0,
                        chunk_list: UNLISTED,
                        serves: false,
                        owner: 0,
                        free: 0,
                        next_chunk: NONE,
                        chunk_before: NONE,
                        grains: core::ptr::null_mut(),
                    });
                }
            }
            unit::add_chunk();
            if is_taken {
                continue;
            }
            MAPPED_BYTES.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
            self.advise(kind, address..address + CHUNK_BYTES);
            let list = u8::try_from(list_of(kind, u64::MAX)).unwrap_or(0);
            // SAFETY: the chunk exists.
            unsafe {
                let header = unit::header(chunk);
                (*header).free = u64::MAX;
                self.enlist(chunk, header, list);
            }
            return Some(());
        }
        None
    }

    /// Calls `each` with the first unit of every chunk that has free units.
    pub(super) fn each_with_free(&self, mut each: impl FnMut(u32, *mut Unit)) {
        for (number, list) in self.lists.iter().enumerate() {
            if !number.is_multiple_of(LISTS) {
                Self::each_of(*list, &mut each);
            }
        }
    }

    /// Calls `each` with the first unit of every chunk of a list.
    fn each_of(list: u32, mut each: impl FnMut(u32, *mut Unit)) {
        let mut chunk = list;
        while chunk != NONE {
            let header = unit::header(chunk);
            each(chunk, header);
            // SAFETY: a listed chunk has headers, and the lock is held.
            chunk = unsafe { (*header).next_chunk };
        }
    }
}

/// Returns the bytes of all chunks.
pub(super) fn mapped() -> usize {
    MAPPED_BYTES.load(Ordering::Relaxed)
}
