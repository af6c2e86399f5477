//! Chunks: huge pages of addresses, cut into units. [`take`] and [`give`] units of a slab.
//!
//! A request takes units of the fullest chunk that has them, so that empty chunks stay whole and
//! their memory can go back.
#![expect(unsafe_code, reason = "headers are reached by address")]

use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::class::{CHUNK_BYTES, UNITS};
use super::unit::{self, NONE, UNLISTED, Unit};
use crate::density::{self, Policy};
use crate::sandbox;
use crate::sync::{Apart, Lock};
use crate::sys;

/// Lists of chunks by their free units: the first for chunks without any, then by the power of two
/// below the number.
const LISTS: usize = UNITS.ilog2() as usize + 2;
/// Units of a chunk.
const CHUNK_UNITS: u32 = 64;
const _: () = assert!(CHUNK_UNITS as usize == UNITS);
/// Chunks of a list that a request looks at.
const MAX_LOOKS: usize = 16;
/// Memory at the start that is on base pages, at least until there is more: all of a small program,
/// which is not scanned.
const UNADVISED_BYTES: usize = CHUNK_BYTES;
/// Chunks' worth of addresses tried where the program has mapped some.
const MAX_DETOURS: usize = 8;

/// All chunks.
#[derive(Debug)]
pub(super) struct Chunks {
    lists: [u32; LISTS],
}

crate::one_page! {
    static WORD: AtomicU32 = AtomicU32::new(0);
}
pub(super) static CHUNKS: Lock<Chunks, Apart> = Lock::on(
    &WORD,
    Chunks {
        lists: [NONE; LISTS],
    },
);
/// Bytes of all chunks.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns the list of a chunk with that many free units.
const fn list_of(free: u64) -> usize {
    match free.count_ones() {
        0 => 0,
        count => count.ilog2() as usize + 1,
    }
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
pub(super) fn take(units: usize) -> Option<u32> {
    CHUNKS.with(|chunks| chunks.find(units)).flatten()
}

/// Maps a chunk for a slab of a class, unless there is one; false without memory.
pub(super) fn grow(class: usize) -> bool {
    let units = usize::from(super::class::shape_of(class).units);
    let has_room = |chunks: &mut Chunks| chunks.look(units).is_some() || chunks.grow().is_some();
    CHUNKS.with(has_room) == Some(true)
}

/// Gives the units of a slab back.
///
/// # Safety
/// [`take`] returned them, and no block is in them.
pub(super) unsafe fn give(first: u32, units: usize) {
    CHUNKS.with(|chunks| {
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
    });
}

/// Counts a new chunk, and has it on huge pages.
fn advise(chunk: Range<usize>) {
    /// Address of the first chunk.
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    let before = MAPPED_BYTES.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
    if before == 0 {
        FIRST.store(chunk.start, Ordering::Relaxed);
    }
    if before < UNADVISED_BYTES {
        return;
    }
    let first = FIRST.load(Ordering::Relaxed);
    // Unless memory of the program lies between them.
    if before == UNADVISED_BYTES && chunk.start == first + UNADVISED_BYTES {
        density::begin_on_base_pages(&(first..chunk.start));
    }
    // Without advice it is on base pages.
    let _ = density::advise(&chunk, Policy::Heap);
}

impl Chunks {
    /// Takes units.
    fn find(&mut self, units: usize) -> Option<u32> {
        let first = self.look(units)?;
        // SAFETY: the units are free, and the lock is held.
        unsafe { self.change(first, |free, bit| free & !(mask(units) << bit)) };
        Some(first)
    }

    /// Looks for free units.
    fn look(&self, units: usize) -> Option<u32> {
        for list in self.lists.get(list_of(mask(units))..)? {
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
            let list = u8::try_from(list_of((*header).free)).unwrap_or(0);
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
            if list == UNLISTED {
                return;
            }
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

    /// Maps the next chunk.
    fn grow(&mut self) -> Option<()> {
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
                    });
                }
            }
            unit::add_chunk();
            if is_taken {
                continue;
            }
            advise(address..address + CHUNK_BYTES);
            // SAFETY: the chunk exists.
            unsafe { self.change(chunk, |_, _| u64::MAX) };
            return Some(());
        }
        None
    }

    /// Calls `each` with the first unit of every chunk that has free units.
    pub(super) fn each_with_free(&self, mut each: impl FnMut(u32, *mut Unit)) {
        for list in self.lists.iter().skip(1) {
            let mut chunk = *list;
            while chunk != NONE {
                let header = unit::header(chunk);
                each(chunk, header);
                // SAFETY: a listed chunk has headers, and the lock is held.
                chunk = unsafe { (*header).next_chunk };
            }
        }
    }
}

/// Returns the bytes of all chunks.
pub(super) fn mapped() -> usize {
    MAPPED_BYTES.load(Ordering::Relaxed)
}
