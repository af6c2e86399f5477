//! Slabs of each class, with the blocks that no cache has: [`take`] and [`put`] them in batches.
//!
//! Slabs with free blocks are in lists by their occupancy. A request takes blocks of the fullest, so
//! that others become empty, whose units go back to their chunk.
#![expect(unsafe_code, reason = "headers and states are reached by address")]

use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicIsize, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::blocks::{Slab, record_bytes, words};
use super::chunks::{self, Kind};
use super::class::{CLASSES, shape_of};
use super::unit::{self, NONE, UNLISTED};
use super::{meta, state};
use crate::sync::{Lock, millis, now};
use jumbo_sys as sys;

/// Locks of all classes: the number of a class selects one.
const BANKS: usize = u32::BITS as usize;
/// Lists of slabs by occupancy, in quarters, after those without room for pieces ([`super::run`]): of
/// any size, and of larger ones alone.
const LISTS: usize = FIRST_QUARTER as usize + QUARTERS;
const QUARTERS: usize = 4;
const WITHOUT_RUNS: u8 = 0;
const WITHOUT_LARGE: u8 = 1;
const FIRST_QUARTER: u8 = 2;
/// Largest of the smaller pieces.
const MAX_SMALL_BYTES: usize = 128;

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
    /// Number of slabs.
    count: usize,
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
            count: 0,
        }
    }; CLASSES],
));

/// Banks of classes with blocks that could not be put back ([`state::LOST`]): a bit each.
static LOST_BANKS: AtomicU32 = AtomicU32::new(0);
/// Time of the next search for them, in milliseconds: their lock may still be held.
static SEARCH_MILLIS: AtomicU64 = AtomicU64::new(0);
const SEARCH_INTERVAL_MILLIS: u64 = 1000;

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

/// Puts the lost blocks back: whoever had them was refused the lock, in a handler that interrupted its
/// holder, or because the holder was slow.
fn find_lost() {
    let now = millis(now());
    if now < SEARCH_MILLIS.load(Ordering::Relaxed) {
        return;
    }
    SEARCH_MILLIS.store(now + SEARCH_INTERVAL_MILLIS, Ordering::Relaxed);
    let mut banks = LOST_BANKS.swap(0, Ordering::Acquire);
    for number in unit::all() {
        let header = unit::header(number);
        // SAFETY: chunks have headers. Without the lock the class may be a former one.
        let class = usize::from(unsafe { (&raw const (*header).class).read_volatile() });
        let bank = 1 << (class % BANKS);
        if class == 0 || banks & bank == 0 {
            continue;
        }
        let found = with(class, |slabs| {
            // SAFETY: the lock of the class is held, which its slabs keep for as long.
            unsafe {
                match usize::from((*header).class) == class && (*header).back == 0 {
                    true => slabs.find_lost(Slab::new(number)),
                    false => 0,
                }
            }
        });
        match found {
            Some(found) => {
                let bytes = found * shape_of(class).size as usize;
                add_idle(bytes.cast_signed());
            }
            None => {
                banks &= !bank;
                LOST_BANKS.fetch_or(bank, Ordering::Relaxed);
            }
        }
    }
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

impl Slabs {
    /// Returns the list for a slab; [`UNLISTED`] without a free block.
    fn list_of(out: u16, blocks: u16) -> u8 {
        match out >= blocks {
            true => UNLISTED,
            false => {
                let quarter = usize::from(out) * QUARTERS / usize::from(blocks);
                FIRST_QUARTER + u8::try_from(quarter).unwrap_or(0)
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

    /// Takes at most `wanted` blocks of a slab for an owner. Returns their number, and the bytes that
    /// have become resident.
    ///
    /// # Safety
    /// The slab is of this class; `to` has room for so many addresses.
    unsafe fn hand(
        &mut self,
        slab: Slab,
        to: *mut usize,
        wanted: usize,
        owner: u32,
    ) -> (usize, usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let taken = slab.take(to, wanted);
            (*slab.header).serves = true;
            (*slab.header).owner = owner;
            self.relist(slab);
            taken
        }
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
        let Some(first) = chunks::take(units, Kind::of(self.count == 0)) else {
            self.keep(record);
            return None;
        };
        self.count += 1;
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
            (*header).grains = null_mut();
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
        unsafe { self.enlist(slab, FIRST_QUARTER) };
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

    /// Returns a slab with many free blocks, which may have room for pieces of that size.
    pub(super) fn sparsest(&self, bytes: usize) -> Option<Slab> {
        let [_, without_large, quarters @ ..] = &self.lists;
        let small = (bytes <= MAX_SMALL_BYTES).then_some(without_large);
        let first = quarters.iter().chain(small).find(|list| **list != NONE)?;
        // SAFETY: a listed slab; the caller holds the lock.
        Some(unsafe { Slab::new(*first) })
    }

    /// Moves a slab to the list of those without room for pieces of that size.
    ///
    /// # Safety
    /// The slab is of this class.
    pub(super) unsafe fn set_without_runs(&mut self, slab: Slab, bytes: usize) {
        let list = match bytes <= MAX_SMALL_BYTES {
            true => WITHOUT_RUNS,
            false => WITHOUT_LARGE,
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.unlist(slab);
            self.enlist(slab, list);
        }
    }

    /// Variant of [`Slabs::settle`] after a piece was put back: its room serves others, although no
    /// block may be free.
    ///
    /// # Safety
    /// The slab is of this class.
    pub(super) unsafe fn settle_piece(&mut self, slab: Slab) {
        // SAFETY: the caller's promise.
        unsafe {
            if (*slab.header).out == 0 {
                return self.settle(slab);
            }
            self.relist(slab);
            if (*slab.header).list == UNLISTED {
                self.enlist(slab, FIRST_QUARTER);
            }
        }
    }

    /// Frees the lost blocks of a slab; returns their number.
    ///
    /// # Safety
    /// The slab is of this class.
    unsafe fn find_lost(&mut self, slab: Slab) -> usize {
        let mut found = 0;
        // SAFETY: no one uses a lost block; the caller's promise.
        unsafe {
            slab.each_taken(|block, state| {
                if state == state::LOST {
                    slab.free(block, 1);
                    found += 1;
                }
            });
            if found > 0 {
                // After the last writes of those who had them.
                fence(Ordering::Acquire);
                self.settle(slab);
            }
        }
        found
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
            super::run::forget(slab);
            let record = slab.word(0).cast::<u8>();
            let units = usize::from(shape_of(slab.class()).units);
            if !chunks::give(slab.first, units) {
                // For the next sweep.
                return self.enlist(slab, FIRST_QUARTER);
            }
            self.count -= 1;
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
        let [without_runs, without_large, sparse, ..] = self.lists;
        for list in [without_runs, without_large, sparse] {
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

/// Takes at most `wanted` blocks of a class, of slabs of an owner: writes their addresses, and returns
/// their number, and by how much more memory is idle. 0 without such slabs, and in a handler that
/// interrupted the holder of the lock.
///
/// # Safety
/// `to` has room for so many addresses.
#[inline(never)]
pub(super) unsafe fn take(
    class: usize,
    to: *mut usize,
    wanted: usize,
    owner: u32,
) -> (usize, isize) {
    let (mut taken, mut resident) = (0, 0);
    with(class, |slabs| {
        while taken < wanted
            && let Some(slab) = slabs.fullest(owner)
        {
            // SAFETY: the slab is of this class; the caller's promise.
            let (more, touched) = unsafe { slabs.hand(slab, to.add(taken), wanted - taken, owner) };
            (taken, resident) = (taken + more, resident + touched);
        }
    });
    account(class, taken, resident)
}

/// Reports whether no slab of a class can be made.
pub(super) fn is_exhausted(class: usize) -> bool {
    chunks::is_exhausted(usize::from(shape_of(class).units))
}

/// Maps memory for a slab of a class, unless there is some; false without memory.
pub(super) fn grow(class: usize) -> bool {
    let units = usize::from(shape_of(class).units);
    let is_first = with(class, |slabs| slabs.count == 0).unwrap_or(true);
    chunks::grow(units, Kind::of(is_first))
}

/// Takes blocks as [`take`] does, of a new slab. 0 without memory.
///
/// # Safety
/// As for [`take`].
#[cold]
#[inline(never)]
pub(super) unsafe fn make(
    class: usize,
    to: *mut usize,
    wanted: usize,
    owner: u32,
) -> (usize, isize) {
    if is_exhausted(class) {
        return (0, 0);
    }
    // Deeper than the caller's stack may be.
    let made = sys::apart(|| {
        let made = with(class, |slabs| {
            let slab = slabs.make(class)?;
            // SAFETY: the slab is of this class; the caller's promise.
            Some(unsafe { slabs.hand(slab, to, wanted, owner) })
        });
        let (taken, resident) = made.flatten().unwrap_or((0, 0));
        account(class, taken, resident)
    });
    made.unwrap_or((0, 0))
}

/// Counts blocks that were taken; returns them, and by how much more memory is idle.
fn account(class: usize, taken: usize, resident: usize) -> (usize, isize) {
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
        sort(&mut |slab, address| {
            let state = slab.state(slab.number_of(address));
            state.store(state::LOST, Ordering::Release);
            lost += 1;
        });
        LOST_BANKS.fetch_or(1 << (class % BANKS), Ordering::Release);
    } else if LOST_BANKS.load(Ordering::Relaxed) != 0 {
        // Deeper than the caller's stack may be.
        sys::apart(find_lost);
    }
    for number in 0..pieces {
        // SAFETY: the caller's promise. Slabs of pieces have other locks.
        let _ = unsafe { super::run::put(from.add(number).read()) };
    }
    let bytes = (count - pieces - lost) * shape_of(class).size as usize;
    bytes.cast_signed()
}
