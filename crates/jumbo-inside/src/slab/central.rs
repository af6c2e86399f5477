//! Slabs of each class, with the blocks that no cache has: [`take`] and [`put`] them in batches.
//!
//! Slabs with free blocks are in lists by their occupancy. A request takes blocks of the fullest, so
//! that others become empty, whose units go back to their chunk.
#![expect(unsafe_code, reason = "headers and states are reached by address")]

use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicIsize, AtomicU8, Ordering};

use super::class::{CLASSES, UNIT_BYTES, shape_of};
use super::unit::{self, NONE, UNLISTED, Unit};
use super::{chunks, meta, state};
use crate::sync::Lock;

/// Locks of all classes: the number of a class selects one.
const BANKS: usize = u32::BITS as usize;
/// Lists of slabs by occupancy, in quarters, after the list of those without runs ([`super::run`]).
const LISTS: usize = 1 + QUARTERS;
const QUARTERS: usize = 4;
pub(super) const WITHOUT_RUNS: u8 = 0;
pub(super) const BASE_BYTES: usize = 4096;
/// Base pages of a unit.
const BASES: usize = UNIT_BYTES / BASE_BYTES;

/// No owner of a slab: [`take`].
pub(super) const ANYONE: u32 = 0;
/// Slabs that a request looks at for one of its own.
const MAX_LOOKS: usize = 8;

/// Slabs of a class.
#[derive(Debug)]
pub(super) struct Slabs {
    lists: [u32; LISTS],
    /// States of former slabs, linked.
    records: *mut u8,
}

struct Table(UnsafeCell<[Slabs; CLASSES]>);
// SAFETY: only the holder of a class's lock uses its entry.
unsafe impl Sync for Table {}

/// Lock on a cache line of its own.
#[repr(align(64))]
struct Bank(Lock<()>);

crate::one_page! {
    static LOCKS: [Bank; BANKS] = [const { Bank(Lock::new(())) }; BANKS];
}
static SLABS: Table = Table(UnsafeCell::new(
    [const {
        Slabs {
            lists: [NONE; LISTS],
            records: null_mut(),
        }
    }; CLASSES],
));

/// Resident memory that neither caches nor the program have, in bytes: an upper bound. Base pages
/// count as resident once a block in them was taken.
static IDLE_BYTES: AtomicIsize = AtomicIsize::new(0);

/// Resident memory of the heap, in bytes, by the same count; and the largest so far.
static RESIDENT_BYTES: AtomicIsize = AtomicIsize::new(0);
static PEAK_BYTES: AtomicIsize = AtomicIsize::new(0);
/// Bytes by which that peak, and other memory of the program, have grown since the last sweep.
static GROWN_BYTES: AtomicIsize = AtomicIsize::new(0);

/// Reports whether the heap has grown beyond its peak, or other memory has, by at least `step` bytes
/// since the last such report.
pub(super) fn has_grown(step: isize) -> bool {
    let has_grown = GROWN_BYTES.load(Ordering::Relaxed) >= step;
    if has_grown {
        GROWN_BYTES.store(0, Ordering::Relaxed);
    }
    has_grown
}

/// Notes growth.
pub(super) fn grew(bytes: usize) {
    GROWN_BYTES.fetch_add(bytes.cast_signed(), Ordering::Relaxed);
}

/// Returns the resident memory of the heap beyond the blocks of caches and of the program.
pub(super) fn idle() -> isize {
    IDLE_BYTES.load(Ordering::Relaxed)
}

/// Returns the resident memory of the heap.
pub(super) fn resident() -> isize {
    RESIDENT_BYTES.load(Ordering::Relaxed)
}

/// Notes that idle memory was dropped.
pub(super) fn drop_resident(bytes: usize) {
    RESIDENT_BYTES.fetch_sub(bytes.cast_signed(), Ordering::Relaxed);
    add_idle(-bytes.cast_signed());
}

/// Notes memory that has become resident.
pub(super) fn touched(bytes: usize) {
    if bytes == 0 {
        return;
    }
    let bytes = bytes.cast_signed();
    let resident = RESIDENT_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
    let peak = PEAK_BYTES.load(Ordering::Relaxed);
    if resident > peak {
        PEAK_BYTES.store(resident, Ordering::Relaxed);
        grew((resident - peak).unsigned_abs());
    }
}

pub(super) fn add_idle(bytes: isize) {
    IDLE_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

/// Runs `work` on the slabs of a class; `None` in a handler that interrupted the holder of the lock.
pub(super) fn with<R>(class: usize, work: impl FnOnce(&mut Slabs) -> R) -> Option<R> {
    LOCKS
        .get(class % BANKS)?
        .0
        .with(|()| {
            let slabs = SLABS.0.get().cast::<Slabs>();
            // SAFETY: the lock of the class is held; the number is that of a class.
            (class < CLASSES).then(|| work(unsafe { &mut *slabs.add(class) }))
        })
        .flatten()
}

/// Acquires the locks for fork(2). Returns a bit for each; none for those that this thread holds.
pub(super) fn lock() -> u32 {
    let locks = LOCKS.iter().enumerate();
    locks.fold(0, |taken, (number, lock)| {
        taken | u32::from(lock.0.acquire()) << number
    })
}

/// Releases locks after fork(2).
///
/// # Safety
/// [`lock`] returned these, in this thread or in its original.
pub(super) unsafe fn unlock(locks: u32) {
    for (number, lock) in LOCKS.iter().enumerate() {
        if locks & 1 << number != 0 {
            // SAFETY: the caller's promise.
            unsafe { lock.0.release() };
        }
    }
}

/// Words of the bitmap of free blocks, in front of the states.
const fn words(blocks: usize) -> usize {
    blocks.div_ceil(64)
}

/// Bytes of the records of a slab.
const fn record_bytes(blocks: usize) -> usize {
    (words(blocks) * 8 + blocks).next_multiple_of(16)
}

/// A slab whose class's lock is held.
#[derive(Clone, Copy)]
pub(super) struct Slab {
    pub(super) first: u32,
    pub(super) header: *mut Unit,
}

impl Slab {
    /// # Safety
    /// `first` is the first unit of a slab, and the lock of its class is held.
    pub(super) unsafe fn new(first: u32) -> Self {
        Self {
            first,
            header: unit::header(first),
        }
    }

    pub(super) fn blocks(self) -> usize {
        // SAFETY: `new`.
        usize::from(unsafe { (*self.header).blocks })
    }

    /// Returns the address of a block.
    pub(super) fn address_of(self, block: usize) -> usize {
        unit::address_of(self.first) + block * self.size()
    }

    /// Returns the number of the block at an address.
    fn number_of(self, address: usize) -> usize {
        let offset = (address - unit::address_of(self.first)) as u64;
        // SAFETY: `new`.
        ((offset * u64::from(unsafe { (*self.header).factor })) >> 32) as usize
    }

    pub(super) fn size(self) -> usize {
        // SAFETY: `new`.
        unsafe { (*self.header).size as usize }
    }

    pub(super) fn state(self, block: usize) -> &'static AtomicU8 {
        // SAFETY: `new`; records are never unmapped.
        unsafe { &*(*self.header).states.add(block) }
    }

    /// Returns a word of the bitmap of free blocks.
    fn word(self, number: usize) -> *mut u64 {
        // SAFETY: the bitmap is in front of the states, aligned to 8 bytes.
        unsafe {
            (*self.header)
                .states
                .cast::<u64>()
                .sub(words(self.blocks()))
                .add(number)
        }
    }

    fn set_free(self, block: usize, is_free: bool) {
        let word = self.word(block / 64);
        // SAFETY: within the bitmap; the lock is held.
        unsafe {
            match is_free {
                true => *word |= 1 << (block % 64),
                false => *word &= !(1 << (block % 64)),
            }
        }
    }

    /// Takes at most `wanted` free blocks from the first: writes their addresses. Returns their
    /// number, and the bytes that become resident.
    ///
    /// # Safety
    /// `to` has room for so many addresses.
    unsafe fn take(self, to: *mut usize, wanted: usize) -> (usize, usize) {
        let (start, size) = (unit::address_of(self.first), self.size());
        // SAFETY: `new`; the bitmap has bits of blocks alone; the caller's promise.
        unsafe {
            let (hint, words) = (usize::from((*self.header).hint), words(self.blocks()));
            let is_resident = self.is_resident();
            let (mut number, mut taken, mut resident) = (hint / 64, 0, 0);
            while taken < wanted && number < words {
                let word = self.word(number);
                let mut bits = *word;
                while bits != 0 && taken < wanted {
                    let block = number * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    let state = self.state(block);
                    let dirty = state.load(Ordering::Relaxed) & state::DIRTY;
                    state.store(state::CACHED | dirty, Ordering::Relaxed);
                    if !is_resident {
                        resident += self.touch(block);
                    }
                    to.add(taken).write(start + block * size);
                    taken += 1;
                }
                *word = bits;
                if taken < wanted {
                    number += 1;
                }
            }
            (*self.header).hint = u16::try_from(number * 64).unwrap_or(0);
            (*self.header).out += u16::try_from(taken).unwrap_or(0);
            (taken, resident)
        }
    }

    /// Reports whether all base pages count as resident.
    fn is_resident(self) -> bool {
        let units = usize::from(shape_of(self.class()).units);
        // SAFETY: the units are the slab's.
        (0..units).all(|unit| unsafe { (*self.header.add(unit)).gone } == 0)
    }

    /// Frees adjacent blocks.
    ///
    /// # Safety
    /// They are taken, and nothing uses them.
    pub(super) unsafe fn free(self, block: usize, count: usize) {
        for number in block..block + count {
            self.state(number)
                .store(state::FREE | state::DIRTY, Ordering::Relaxed);
            self.set_free(number, true);
        }
        // SAFETY: `new`.
        unsafe {
            (*self.header).hint = (*self.header).hint.min(u16::try_from(block).unwrap_or(0));
            let count = u16::try_from(count).unwrap_or(0);
            (*self.header).out = (*self.header).out.saturating_sub(count);
        }
    }

    /// Marks a free block as one of a run. Returns the bytes that become resident.
    pub(super) fn mark(self, block: usize, state: u8) -> usize {
        self.state(block)
            .store(state | state::DIRTY, Ordering::Relaxed);
        self.set_free(block, false);
        // SAFETY: `new`.
        unsafe { (*self.header).out += 1 };
        self.touch(block)
    }

    /// Returns the next free block from a block on, and the number of free ones in a row.
    pub(super) fn next_free(self, from: usize) -> Option<(usize, usize)> {
        let (words, from_word) = (words(self.blocks()), from / 64);
        let word = |number: usize| match number < words {
            // SAFETY: within the bitmap; the lock is held.
            true => unsafe { *self.word(number) },
            false => 0,
        };
        let mut number = from_word;
        let mut bits = word(number) & (u64::MAX << (from % 64));
        while bits == 0 {
            number += 1;
            if number >= words {
                return None;
            }
            bits = word(number);
        }
        let bit = bits.trailing_zeros();
        let first = number * 64 + bit as usize;
        let mut count = (bits >> bit).trailing_ones() as usize;
        while (first + count).is_multiple_of(64) {
            let more = word((first + count) / 64).trailing_ones() as usize;
            if more == 0 {
                break;
            }
            count += more;
        }
        Some((first, count))
    }

    /// Notes that the base pages of a block become resident. Returns their bytes.
    fn touch(self, block: usize) -> usize {
        let (start, end) = (block * self.size(), (block + 1) * self.size());
        let mut touched = 0;
        for page in start / BASE_BYTES..end.div_ceil(BASE_BYTES) {
            // SAFETY: within the slab.
            let gone = unsafe { &mut (*self.header.add(page / BASES)).gone };
            if *gone & 1 << (page % BASES) != 0 {
                *gone &= !(1 << (page % BASES));
                touched += BASE_BYTES;
            }
        }
        touched
    }

    pub(super) fn is_gone(self, page: usize) -> bool {
        // SAFETY: within the slab.
        unsafe { (*self.header.add(page / BASES)).gone & 1 << (page % BASES) != 0 }
    }

    /// Reports whether all base pages of a block are gone, so that it reads as zeroes.
    fn is_zero(self, block: usize) -> bool {
        let (start, end) = (block * self.size(), (block + 1) * self.size());
        (start / BASE_BYTES..end.div_ceil(BASE_BYTES)).all(|page| self.is_gone(page))
    }

    /// Drops base pages without a block that is taken, through `discard`. Returns their bytes.
    pub(super) fn drop_pages(self, mut discard: impl FnMut(usize, usize) -> bool) -> usize {
        let pages = usize::from(shape_of(self.class()).units) * BASES;
        let mut is_taken = [0_u64; 2];
        let size = self.size();
        for block in 0..self.blocks() {
            let state = self.state(block).load(Ordering::Relaxed);
            if state & state::KIND == state::FREE {
                continue;
            }
            for page in block * size / BASE_BYTES..((block + 1) * size).div_ceil(BASE_BYTES) {
                if let Some(word) = is_taken.get_mut(page / 64) {
                    *word |= 1 << (page % 64);
                }
            }
        }
        let may_go = |page: usize| {
            let taken = is_taken.get(page / 64).copied().unwrap_or(u64::MAX);
            taken & 1 << (page % 64) == 0 && !self.is_gone(page)
        };
        let (mut page, mut dropped) = (0, 0);
        while page < pages {
            if !may_go(page) {
                page += 1;
                continue;
            }
            let first = page;
            while page < pages && may_go(page) {
                page += 1;
            }
            let (at, length) = (
                unit::address_of(self.first) + first * BASE_BYTES,
                (page - first) * BASE_BYTES,
            );
            if !discard(at, length) {
                break;
            }
            dropped += length;
            for page in first..page {
                // SAFETY: within the slab; the lock is held.
                unsafe { (*self.header.add(page / BASES)).gone |= 1 << (page % BASES) };
            }
        }
        if dropped > 0 {
            for block in 0..self.blocks() {
                let state = self.state(block);
                let is_free = state.load(Ordering::Relaxed) & state::KIND == state::FREE;
                if is_free && self.is_zero(block) {
                    state.store(state::FREE, Ordering::Relaxed);
                }
            }
        }
        dropped
    }

    fn class(self) -> usize {
        // SAFETY: `new`.
        usize::from(unsafe { (*self.header).class })
    }
}

impl Slabs {
    /// Returns the list for a slab; [`UNLISTED`] without a free block.
    fn list_of(out: u16, blocks: u16) -> u8 {
        match out >= blocks {
            true => UNLISTED,
            false => {
                let quarter = usize::from(out) * QUARTERS / usize::from(blocks);
                u8::try_from(1 + quarter).unwrap_or(1)
            }
        }
    }

    /// Returns a slab of the fullest list; with an owner the first of its own among a few.
    fn fullest(&self, owner: u32) -> Option<Slab> {
        let mut looks = 0;
        for list in self.lists.iter().rev() {
            let mut first = *list;
            while first != NONE {
                // SAFETY: a listed slab; the caller holds the lock.
                let slab = unsafe { Slab::new(first) };
                // SAFETY: as above.
                let (of, next) = unsafe { ((*slab.header).owner, (*slab.header).next) };
                if owner == ANYONE || of == owner {
                    return Some(slab);
                }
                (first, looks) = (next, looks + 1);
                if looks == MAX_LOOKS {
                    return None;
                }
            }
        }
        None
    }

    /// Moves a slab to the list for its occupancy.
    ///
    /// # Safety
    /// The slab is of this class.
    pub(super) unsafe fn relist(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            let list = Self::list_of((*slab.header).out, (*slab.header).blocks);
            if list != (*slab.header).list {
                self.unlist(slab);
                self.enlist(slab, list);
            }
        }
    }

    unsafe fn unlist(&mut self, slab: Slab) {
        // SAFETY: neighbours of a listed slab are slabs of the class.
        unsafe {
            let (list, next, before) = (
                (*slab.header).list,
                (*slab.header).next,
                (*slab.header).before,
            );
            if list == UNLISTED {
                return;
            }
            (*slab.header).list = UNLISTED;
            if next != NONE {
                (*unit::header(next)).before = before;
            }
            if before != NONE {
                (*unit::header(before)).next = next;
            } else if let Some(head) = self.lists.get_mut(usize::from(list)) {
                *head = next;
            }
        }
    }

    unsafe fn enlist(&mut self, slab: Slab, list: u8) {
        let Some(head) = self.lists.get_mut(usize::from(list)) else {
            return;
        };
        // SAFETY: as above.
        unsafe {
            (*slab.header).list = list;
            (*slab.header).before = NONE;
            (*slab.header).next = *head;
            if *head != NONE {
                (*unit::header(*head)).before = slab.first;
            }
        }
        *head = slab.first;
    }

    /// Makes a slab. `None` without memory.
    fn make(&mut self, class: usize) -> Option<Slab> {
        let shape = shape_of(class);
        let (blocks, units) = (usize::from(shape.blocks), usize::from(shape.units));
        let record = match self.records.is_null() {
            true => meta::fresh(record_bytes(blocks))?,
            false => {
                let record = self.records;
                // SAFETY: a former record begins with the address of the next one.
                self.records = unsafe { record.cast::<*mut u8>().read() };
                record
            }
        };
        let Some(first) = chunks::take(units) else {
            self.keep(record);
            return None;
        };
        let header = unit::header(first);
        // SAFETY: the units are this slab's, and the record has room for bitmap and states.
        unsafe {
            let states = record.add(words(blocks) * 8).cast::<AtomicU8>();
            for number in 0..units {
                let unit = header.add(number);
                (*unit).states = states;
                (*unit).size = shape.size;
                (*unit).factor = shape.factor;
                (*unit).back = u8::try_from(number).unwrap_or(0);
                (*unit).class = u8::try_from(class).unwrap_or(0);
            }
            (*header).blocks = shape.blocks;
            (*header).out = 0;
            (*header).hint = 0;
            (*header).list = UNLISTED;
        }
        let slab = Slab { first, header };
        for number in 0..words(blocks) {
            let left = blocks - number * 64;
            // SAFETY: within the bitmap.
            unsafe { *slab.word(number) = u64::MAX >> (64 - left.min(64)) };
        }
        for block in 0..blocks {
            let dirty = if slab.is_zero(block) { 0 } else { state::DIRTY };
            slab.state(block)
                .store(state::FREE | dirty, Ordering::Relaxed);
        }
        // SAFETY: a slab of this class.
        unsafe { self.enlist(slab, 1) };
        Some(slab)
    }

    /// Keeps the record of a former slab.
    fn keep(&mut self, record: *mut u8) {
        // SAFETY: the record is at least 16 bytes, and nothing uses it.
        unsafe { record.cast::<*mut u8>().write(self.records) };
        self.records = record;
    }

    /// Moves a slab to its list after blocks were freed, or gives its units back.
    ///
    /// # Safety
    /// The slab is of this class.
    pub(super) unsafe fn settle(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            self.relist(slab);
            if (*slab.header).out == 0 {
                self.release_if_empty(slab);
            }
        }
    }

    /// Returns a slab with many free blocks.
    pub(super) fn sparsest(&self) -> Option<Slab> {
        let [_, lists @ ..] = &self.lists;
        let first = lists.iter().find(|list| **list != NONE)?;
        // SAFETY: a listed slab; the caller holds the lock.
        Some(unsafe { Slab::new(*first) })
    }

    /// Moves a slab to the list of those without runs.
    ///
    /// # Safety
    /// The slab is of this class.
    pub(super) unsafe fn set_without_runs(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            self.unlist(slab);
            self.enlist(slab, WITHOUT_RUNS);
        }
    }

    /// Gives the units of a slab back if it has no block that is taken, and others are listed.
    ///
    /// # Safety
    /// The slab is of this class.
    unsafe fn release_if_empty(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            let is_last = (*slab.header).next == NONE
                && (*slab.header).before == NONE
                && self.lists.iter().filter(|list| **list != NONE).count() <= 1;
            if (*slab.header).out != 0 || is_last {
                return;
            }
            self.release(slab);
        }
    }

    unsafe fn release(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            self.unlist(slab);
            let record = slab.word(0).cast::<u8>();
            let units = usize::from(shape_of(slab.class()).units);
            chunks::give(slab.first, units);
            self.keep(record);
        }
    }

    /// Calls `each` with all slabs that have free blocks.
    pub(super) fn each(&mut self, mut each: impl FnMut(Slab)) {
        for list in self.lists {
            let mut first = list;
            while first != NONE {
                // SAFETY: a listed slab; the caller holds the lock.
                let slab = unsafe { Slab::new(first) };
                each(slab);
                // SAFETY: as above.
                first = unsafe { (*slab.header).next };
            }
        }
    }

    /// Gives back all slabs without a block that is taken.
    pub(super) fn release_empty(&mut self) {
        let [without_runs, sparse, ..] = self.lists;
        for list in [without_runs, sparse] {
            self.release_empty_of(list);
        }
    }

    fn release_empty_of(&mut self, list: u32) {
        let mut first = list;
        while first != NONE {
            // SAFETY: as above.
            unsafe {
                let slab = Slab::new(first);
                first = (*slab.header).next;
                if (*slab.header).out == 0 {
                    self.release(slab);
                }
            }
        }
    }
}

/// Takes at most `wanted` blocks of a class, of slabs of an owner, and of new slabs if it `makes`
/// them: writes their addresses, and returns their number, and by how much more memory is idle. 0
/// without memory, and in a handler that interrupted the holder of the lock.
///
/// # Safety
/// `to` has room for so many addresses.
pub(super) unsafe fn take(
    class: usize,
    to: *mut usize,
    wanted: usize,
    owner: u32,
    makes: bool,
) -> (usize, isize) {
    let (mut taken, mut resident) = (0, 0);
    with(class, |slabs| {
        while taken < wanted {
            let mut slab = slabs.fullest(owner);
            if slab.is_none() && makes {
                slab = slabs.make(class);
            }
            let Some(slab) = slab else {
                break;
            };
            // SAFETY: the slab is of this class; the caller's promise.
            unsafe {
                let (more, touched) = slab.take(to.add(taken), wanted - taken);
                (taken, resident) = (taken + more, resident + touched);
                (*slab.header).serves = true;
                (*slab.header).owner = owner;
                slabs.relist(slab);
            }
        }
    });
    touched(resident);
    let bytes = taken * shape_of(class).size as usize;
    (taken, resident.cast_signed() - bytes.cast_signed())
}

/// Puts blocks of a class back, some of which may be pieces of slabs of other classes. Returns by how
/// much more memory is idle.
///
/// # Safety
/// `from` has `count` addresses of blocks of the class, which the caller has and no one uses. They
/// may change.
pub(super) unsafe fn put(class: usize, from: *mut usize, count: usize) -> isize {
    let (mut pieces, mut lost) = (0, 0);
    // Calls `each` with the blocks that are no pieces. A slab keeps its class until the last of them.
    let mut sort = |each: &mut dyn FnMut(Slab, usize)| {
        for number in 0..count {
            // SAFETY: the caller's promise; what was read may change.
            unsafe {
                let address = from.add(number).read();
                let (header, first) = unit::slab_at(address);
                if usize::from((*header).class) == class {
                    each(Slab { first, header }, address);
                } else {
                    from.add(pieces).write(address);
                    pieces += 1;
                }
            }
        }
    };
    let done = with(class, |slabs| {
        let mut last: Option<Slab> = None;
        sort(&mut |slab, address| {
            // SAFETY: the caller's promise; a slab of this class.
            unsafe {
                if let Some(last) = last.filter(|last| last.first != slab.first) {
                    slabs.settle(last);
                }
                slab.free(slab.number_of(address), 1);
            }
            last = Some(slab);
        });
        if let Some(last) = last {
            // SAFETY: as above.
            unsafe { slabs.settle(last) };
        }
    });
    if done.is_none() {
        // A handler interrupted the holder of the lock: they are not used again.
        sort(&mut |slab, address| {
            let state = slab.state(slab.number_of(address));
            state.store(state::LOST, Ordering::Relaxed);
            lost += 1;
        });
    }
    for number in 0..pieces {
        // SAFETY: the caller's promise. Slabs of pieces have other locks.
        unsafe { super::run::put(from.add(number).read()) };
    }
    let bytes = (count - pieces - lost) * shape_of(class).size as usize;
    bytes.cast_signed()
}
