//! Blocks at hand of a thread: a [`Cache`] with a magazine for each class.
//!
//! Only its thread uses a cache, without atomic operations. A magazine holds addresses, outside of
//! the blocks. It grows with the misses of its thread, within a budget. A cache outlives its thread:
//! the next thread with the same thread pointer has it, or one that finds its thread dead.
//!
//! A handler may interrupt its thread in here. While a magazine changes it is empty and has no room,
//! so that the handler's calls go to the slabs.
#![expect(unsafe_code, reason = "magazines are reached by address")]

use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicI32, AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence,
};

use rustix::io::Errno;

use super::class::{CLASSES, shape_of};
use super::{central, meta, run, sweep};
use crate::sync::{Apart, Lock, thread_pointer};
use crate::{density, sandbox};
use jumbo_sys as sys;

/// Addresses of blocks of a class.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Magazine {
    pub(super) slots: *mut usize,
    pub(super) count: u32,
    pub(super) room: u32,
}

/// Blocks at hand of a thread.
#[repr(C)]
#[derive(Debug)]
pub struct Cache {
    pub(super) magazines: [Magazine; CLASSES],
    /// Thread pointer and ID of the thread; the ID is 0 if it is unknown.
    owner: AtomicUsize,
    thread: AtomicI32,
    /// Next of all caches.
    next: AtomicPtr<Cache>,
    /// Number of the cache, from 1 on.
    number: u32,
    /// Bytes by which memory became idle since they were added to the heap's.
    idle_bytes: AtomicIsize,
    /// Bytes for which all magazines have room.
    room_bytes: usize,
    /// Class whose magazine is the next to give its room to another one.
    victim: usize,
    /// Misses for which there was no room.
    denied: usize,
}

/// Initial number of slots of a magazine.
const MIN_SLOTS: usize = 8;
/// Bounds of the bytes that the cache of a thread holds.
const MAX_ROOM_BYTES: usize = 4 << 20;
const MIN_ROOM_BYTES: usize = 32 << 10;
/// Part of the memory that the heap may hold which all caches may hold.
const ALLOWANCE_DIVISOR: usize = 2;
/// Misses without room after which one magazine loses its own. Where all classes are in use, the
/// change costs more than the misses.
const DENIED_PER_VICTIM: usize = 64;
/// Memory for which slabs of its own may cost a cache.
const OWN_BYTES: usize = 256 << 10;
/// Caches whose threads are looked for by a new thread.
const MAX_PROBES: usize = 4;

const _: () = assert!(size_of::<Cache>() <= 4096);

/// List of all caches.
struct Caches {
    first: *mut Cache,
    /// Next cache to look at for a dead thread.
    probe: *mut Cache,
}
// SAFETY: the caches belong to no thread.
unsafe impl Send for Caches {}

crate::one_page! {
    static WORD: AtomicU32 = AtomicU32::new(0);
}
static CACHES: Lock<Caches, Apart> = Lock::on(
    &WORD,
    Caches {
        first: null_mut(),
        probe: null_mut(),
    },
);
/// Number of all caches.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Bytes for which all caches have room.
static ROOM_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Idle memory that a cache counts by itself: the heap's count has a cache line that all threads use.
const IDLE_STEP_BYTES: isize = 64 << 10;

/// Notes by how much more memory is idle.
///
/// # Safety
/// The cache is the calling thread's, or null.
unsafe fn note(cache: *mut Cache, idle: isize) {
    if cache.is_null() {
        return central::add_idle(idle);
    }
    // SAFETY: the caller's promise.
    let counted = unsafe { &(*cache).idle_bytes };
    let before = counted.fetch_add(idle, Ordering::Relaxed);
    if (before + idle).abs() >= IDLE_STEP_BYTES {
        central::add_idle(counted.swap(0, Ordering::Relaxed));
    }
}

/// Returns the heap's idle memory with what the caches count by themselves.
pub(super) fn idle() -> isize {
    let mut idle = central::idle();
    CACHES.with(|caches| {
        let mut cache = caches.first;
        while !cache.is_null() {
            // SAFETY: caches are never unmapped.
            unsafe {
                idle += (*cache).idle_bytes.load(Ordering::Relaxed);
                cache = (*cache).next.load(Ordering::Relaxed);
            }
        }
    });
    idle
}

/// Returns a cache for the calling thread. Null without memory, and in a handler that interrupted
/// the holder of the lock.
pub(super) fn adopt() -> *mut Cache {
    let me = thread_pointer();
    let adopted = sys::guarded(|| {
        CACHES.with(|caches| {
            let cache = caches.former(me).or_else(|| caches.dead());
            let cache = cache.or_else(|| caches.make())?;
            let thread = match sandbox::is_entered() || sandbox::is_entered_later() {
                true => 0,
                false => rustix::thread::gettid().as_raw_nonzero().get(),
            };
            // SAFETY: a cache of the list, whose thread is gone.
            unsafe {
                (*cache).owner.store(me, Ordering::Relaxed);
                (*cache).thread.store(thread, Ordering::Relaxed);
            }
            Some(cache)
        })
    });
    adopted.flatten().unwrap_or(null_mut())
}

impl Caches {
    /// Returns the cache of a former thread with this thread pointer.
    fn former(&self, me: usize) -> Option<*mut Cache> {
        let mut cache = self.first;
        while !cache.is_null() {
            // SAFETY: caches are never unmapped.
            unsafe {
                if (*cache).owner.load(Ordering::Relaxed) == me {
                    return Some(cache);
                }
                cache = (*cache).next.load(Ordering::Relaxed);
            }
        }
        None
    }

    /// Returns a cache whose thread has ended, of a few.
    fn dead(&mut self) -> Option<*mut Cache> {
        if sandbox::is_entered() || sandbox::is_entered_later() {
            return None;
        }
        for _ in 0..MAX_PROBES.min(COUNT.load(Ordering::Relaxed)) {
            let cache = match self.probe.is_null() {
                true => self.first,
                false => self.probe,
            };
            // SAFETY: as above; signal 0 is not sent.
            unsafe {
                self.probe = (*cache).next.load(Ordering::Relaxed);
                let thread = (*cache).thread.load(Ordering::Relaxed);
                let ids = [sys::process(), thread].map(|id| id.unsigned_abs() as usize);
                let arguments = [ids[0], ids[1], 0, 0, 0, 0];
                if thread != 0 && sys::request(libc::SYS_tgkill, arguments) == Err(Errno::SRCH) {
                    return Some(cache);
                }
            }
        }
        None
    }

    fn make(&mut self) -> Option<*mut Cache> {
        let cache = meta::take(size_of::<Cache>())?.cast::<Cache>();
        // SAFETY: the piece is large enough, and aligned to a base page.
        unsafe {
            for number in 0..CLASSES {
                let magazine = Magazine {
                    slots: null_mut(),
                    count: 0,
                    room: 0,
                };
                (&raw mut (*cache).magazines)
                    .cast::<Magazine>()
                    .add(number)
                    .write(magazine);
            }
            (&raw mut (*cache).owner).write(AtomicUsize::new(0));
            (&raw mut (*cache).thread).write(AtomicI32::new(0));
            (&raw mut (*cache).next).write(AtomicPtr::new(self.first));
            (&raw mut (*cache).number)
                .write(u32::try_from(COUNT.load(Ordering::Relaxed) + 1).ok()?);
            (&raw mut (*cache).idle_bytes).write(AtomicIsize::new(0));
            (&raw mut (*cache).room_bytes).write(0);
            (&raw mut (*cache).victim).write(0);
            (&raw mut (*cache).denied).write(0);
        }
        self.first = cache;
        COUNT.fetch_add(1, Ordering::Relaxed);
        Some(cache)
    }
}

/// Magazine that changes: it is empty and has no room meanwhile.
struct Opened {
    magazine: *mut Magazine,
    count: usize,
    room: usize,
}

impl Opened {
    /// # Safety
    /// The cache is the calling thread's.
    unsafe fn new(cache: *mut Cache, class: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let magazine = (&raw mut (*cache).magazines).cast::<Magazine>().add(class);
            let (count, room) = ((*magazine).count, (*magazine).room);
            (&raw mut (*magazine).room).write_volatile(0);
            compiler_fence(Ordering::SeqCst);
            (&raw mut (*magazine).count).write_volatile(0);
            compiler_fence(Ordering::SeqCst);
            Self {
                magazine,
                count: count as usize,
                room: room as usize,
            }
        }
    }

    /// Gives the magazine more room: twice as much, within the budget, from the others in turn.
    unsafe fn grow(&mut self, cache: *mut Cache, class: usize) {
        let shape = shape_of(class);
        let max = usize::from(shape.cached);
        let room = (self.room * 2).max(MIN_SLOTS).min(max);
        let more = room_bytes(class, room.saturating_sub(self.room));
        // SAFETY: the caller's promise.
        unsafe {
            if more == 0 || !has_budget(cache, class, more) {
                return;
            }
            let Some(slots) = meta::take(room * size_of::<usize>()) else {
                return;
            };
            let slots = slots.cast::<usize>();
            let before = (*self.magazine).slots;
            if !before.is_null() {
                slots.copy_from_nonoverlapping(before, self.count);
                meta::give(before.cast(), self.room * size_of::<usize>());
            }
            (*self.magazine).slots = slots;
            (*cache).room_bytes += more;
            ROOM_BYTES.fetch_add(more, Ordering::Relaxed);
        }
        self.room = room;
    }

    fn slots(&self) -> *mut usize {
        // SAFETY: the magazine is the calling thread's.
        unsafe { (*self.magazine).slots }
    }

    /// Makes the magazine usable again.
    fn close(self) {
        // SAFETY: as above. A handler sees no room until the count is right.
        unsafe {
            #[expect(clippy::cast_possible_truncation, reason = "at most 1024 slots")]
            let (count, room) = (self.count as u32, self.room as u32);
            (&raw mut (*self.magazine).count).write_volatile(count);
            compiler_fence(Ordering::SeqCst);
            (&raw mut (*self.magazine).room).write_volatile(room);
        }
    }
}

/// Returns the bytes of `room` blocks of a class, and of their slots.
fn room_bytes(class: usize, room: usize) -> usize {
    room * (shape_of(class).size as usize + size_of::<usize>())
}

/// Reports whether the magazines may have room for `more` bytes: a share of what all caches may
/// have, and what others leave of theirs. Now and then another magazine than that of `class` loses
/// its room for it.
///
/// # Safety
/// The cache is the calling thread's.
#[inline(never)]
unsafe fn has_budget(cache: *mut Cache, class: usize, more: usize) -> bool {
    let all = density::allowance() / ALLOWANCE_DIVISOR;
    let share = all / COUNT.load(Ordering::Relaxed).max(1);
    let left = all.saturating_sub(ROOM_BYTES.load(Ordering::Relaxed));
    // SAFETY: the caller's promise.
    unsafe {
        let budget = share.max((*cache).room_bytes.saturating_add(left));
        let budget = budget.clamp(MIN_ROOM_BYTES, MAX_ROOM_BYTES);
        if (*cache).room_bytes + more <= budget {
            return true;
        }
        (*cache).denied += 1;
        if (*cache).room_bytes <= budget && !(*cache).denied.is_multiple_of(DENIED_PER_VICTIM) {
            return false;
        }
        take_room(cache, class);
        (*cache).room_bytes + more <= budget
    }
}

/// Takes the room of the next magazine that has any, except that of `class`.
unsafe fn take_room(cache: *mut Cache, class: usize) {
    for _ in 0..CLASSES {
        // SAFETY: the caller's promise; the slots are the magazine's, of its room.
        unsafe {
            let victim = ((*cache).victim + 1) % CLASSES;
            (*cache).victim = victim;
            if victim == class {
                continue;
            }
            let mut opened = Opened::new(cache, victim);
            let has_room = opened.room > 0;
            if has_room {
                note(cache, central::put(victim, opened.slots(), opened.count));
                meta::give(opened.slots().cast(), opened.room * size_of::<usize>());
                let bytes = room_bytes(victim, opened.room);
                (*cache).room_bytes -= bytes;
                ROOM_BYTES.fetch_sub(bytes, Ordering::Relaxed);
                (opened.count, opened.room) = (0, 0);
                (*opened.magazine).slots = null_mut();
            }
            opened.close();
            if has_room {
                return;
            }
        }
    }
}

/// Takes blocks of slabs that exist, then runs where freed memory is sparse, then of new slabs.
///
/// While there is memory for it, each cache takes blocks of slabs of its own: threads that change the
/// states of neighbours wait for each other's cache lines.
///
/// # Safety
/// The cache is the calling thread's, or null; `to` has room for so many addresses.
unsafe fn take(cache: *mut Cache, class: usize, to: *mut usize, wanted: usize) -> usize {
    let caches = COUNT.load(Ordering::Relaxed);
    let has_own = caches > 1 && !cache.is_null() && sweep::has_room_for(caches * OWN_BYTES);
    // SAFETY: the caller's promise.
    unsafe {
        let owner = match has_own {
            true => (*cache).number,
            false => central::ANYONE,
        };
        let (mut taken, mut idle) = central::take(class, to, wanted, owner);
        if taken == 0 && has_own {
            (taken, idle) = central::make(class, to, wanted, owner);
            // Without memory, of slabs of others.
            if taken == 0 {
                (taken, idle) = central::take(class, to, wanted, central::ANYONE);
            }
        }
        if taken == 0 {
            let taken = run::take(class, to, wanted);
            if taken > 0 {
                return taken;
            }
        }
        if taken == 0 {
            (taken, idle) = central::make(class, to, wanted, central::ANYONE);
        }
        note(cache, idle);
        taken
    }
}

/// Takes a block of a slab, past the caches.
pub(super) fn take_one(class: usize, to: &mut usize) -> bool {
    // SAFETY: there is room for one address.
    let (mut taken, mut idle) = unsafe { central::take(class, to, 1, central::ANYONE) };
    if taken == 0 {
        // SAFETY: as above.
        (taken, idle) = unsafe { central::make(class, to, 1, central::ANYONE) };
    }
    central::add_idle(idle);
    taken == 1
}

/// Fills a magazine, and returns a block besides; `None` without memory.
///
/// # Safety
/// The cache is the calling thread's, or null.
pub(super) unsafe fn refill(cache: *mut Cache, class: usize) -> Option<usize> {
    let mut one = 0;
    // SAFETY: the caller's promise; the slots have that room.
    unsafe {
        if cache.is_null() || shape_of(class).cached == 0 {
            return (take(cache, class, &raw mut one, 1) == 1).then_some(one);
        }
        let mut opened = Opened::new(cache, class);
        // A handler may have filled it.
        if opened.count == 0 {
            opened.grow(cache, class);
            let wanted = (opened.room / 2).max(1);
            opened.count = match opened.room {
                0 => 0,
                _ => take(cache, class, opened.slots(), wanted),
            };
            if opened.count == 0 {
                opened.close();
                return (take(cache, class, &raw mut one, 1) == 1).then_some(one);
            }
            // In descending order, so that blocks are taken in the order of their addresses.
            core::slice::from_raw_parts_mut(opened.slots(), opened.count).reverse();
        }
        opened.count -= 1;
        let block = opened.slots().add(opened.count).read();
        opened.close();
        Some(block)
    }
}

/// Puts a block into a magazine without room, whose older half goes to the slabs.
///
/// # Safety
/// The cache is the calling thread's, or null; the block is of the class and has no user.
pub(super) unsafe fn flush(cache: *mut Cache, class: usize, mut block: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if cache.is_null() || shape_of(class).cached == 0 {
            return note(cache, central::put(class, &raw mut block, 1));
        }
        let mut opened = Opened::new(cache, class);
        if opened.count == opened.room {
            opened.grow(cache, class);
        }
        if opened.room == 0 {
            opened.close();
            return note(cache, central::put(class, &raw mut block, 1));
        }
        if opened.count == opened.room {
            let half = opened.count.div_ceil(2);
            note(cache, central::put(class, opened.slots(), half));
            opened
                .slots()
                .copy_from(opened.slots().add(half), opened.count - half);
            opened.count -= half;
        }
        opened.slots().add(opened.count).write(block);
        opened.count += 1;
        opened.close();
    }
}

/// Puts all blocks of a cache back.
///
/// # Safety
/// The cache is the calling thread's, or null.
pub(super) unsafe fn drain(cache: *mut Cache) {
    if cache.is_null() {
        return;
    }
    for class in 1..CLASSES {
        // SAFETY: the caller's promise.
        unsafe {
            let mut opened = Opened::new(cache, class);
            if opened.count > 0 {
                note(cache, central::put(class, opened.slots(), opened.count));
                opened.count = 0;
            }
            opened.close();
        }
    }
}

/// Acquires the lock for fork(2); false if this thread holds it.
pub(super) fn lock() -> bool {
    CACHES.acquire()
}

/// Releases the lock after fork(2).
///
/// # Safety
/// [`lock`] acquired it, in this thread or in its original.
pub(super) unsafe fn unlock() {
    // SAFETY: the caller's promise.
    unsafe { CACHES.release() };
}
