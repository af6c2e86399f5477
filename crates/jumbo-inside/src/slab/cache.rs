//! Blocks at hand of a thread: a [`Cache`] with a magazine for each class.
//!
//! Only its thread uses a cache, without atomic operations. A magazine holds addresses, outside of
//! the blocks. It grows with the misses of its thread, within a budget. A cache outlives its thread:
//! the next thread with the same thread pointer has it, or one that finds its thread dead.
//!
//! A handler may interrupt its thread in here. A cache in use is busy, so that the handler's calls go
//! to the slabs.
#![expect(unsafe_code, reason = "magazines are reached by address")]

use core::ptr::null_mut;
use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicIsize, AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence,
};

use rustix::io::Errno;

use super::class::{CLASSES, shape_of};
use super::{central, chunks, meta, run, sweep};
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
    /// Its thread uses it. Only that thread, and handlers that interrupt it, look.
    is_busy: AtomicBool,
    /// Thread pointer and ID of the thread, and its process; the IDs are 0 if they are unknown.
    owner: AtomicUsize,
    thread: AtomicI32,
    process: AtomicI32,
    /// Next of all caches, and of those in the bucket of its thread pointer.
    next: AtomicPtr<Cache>,
    next_of_bucket: *mut Cache,
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

/// Initial number of slots of a magazine, and that where there are many caches: half of them are filled.
const MIN_SLOTS: u32 = 8;
const MIN_SLOTS_OF_MANY: u32 = 2;
const MANY_CACHES: usize = 256;
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

const LINE_BYTES: usize = 64;
const _: () = assert!(size_of::<Cache>() <= 4096 && align_of::<Cache>() <= LINE_BYTES);

/// Buckets of thread pointers.
const BUCKETS: usize = 256;

/// List of all caches.
struct Caches {
    first: *mut Cache,
    buckets: [*mut Cache; BUCKETS],
    /// Next cache to look at for a dead thread.
    probe: *mut Cache,
}
// SAFETY: the caches belong to no thread.
unsafe impl Send for Caches {}

crate::one_page! {
    static WORD: AtomicU32 = AtomicU32::new(0);
    /// This process: that of [`begin`]. A child of vfork(2) or of a bare clone(2) has another ID.
    static PROCESS: AtomicI32 = AtomicI32::new(0);
    /// Cache of the thread with the ID of this process, whatever the cache says: a child of a fork leaves
    /// the page of the cache as it is.
    static FIRST: AtomicPtr<Cache> = AtomicPtr::new(null_mut());
}
static CACHES: Lock<Caches, Apart> = Lock::on(
    &WORD,
    Caches {
        first: null_mut(),
        buckets: [null_mut(); BUCKETS],
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

/// Gives the calling thread a cache, at `place`. Null without memory, and in a handler that interrupted
/// the holder of the lock.
pub(super) fn adopt(place: &mut *mut Cache) {
    let me = thread_pointer();
    let adopted = sys::guarded(|| {
        CACHES.with(|caches| {
            let cache = caches.former(me).or_else(|| caches.dead());
            let cache = cache.or_else(|| caches.make())?;
            // SAFETY: a cache of the list, whose thread is gone.
            unsafe {
                abandon(cache);
                caches.assign(cache, me);
                (*cache).identify();
            }
            Some(cache)
        })
    });
    let Some(Some(cache)) = adopted else { return };
    *place = cache;
    compiler_fence(Ordering::SeqCst);
    // A handler forked meanwhile, before the child could find the cache here.
    // SAFETY: the caller's own cache.
    unsafe {
        let process = (*cache).process.load(Ordering::Relaxed);
        if process != 0 && process != PROCESS.load(Ordering::Relaxed) {
            sys::guarded(|| (*cache).identify());
        }
    }
}

/// Reports whether a filter may kill for the calls that tell about threads.
fn is_filtered() -> bool {
    sandbox::is_entered() || sandbox::is_entered_later()
}

/// Begins in a process, at the start or as the child of a fork. Of its threads only the calling one, of
/// the same ID, has a cache.
pub(super) fn begin(process: i32, cache: *mut Cache) {
    PROCESS.store(process, Ordering::Relaxed);
    FIRST.store(cache, Ordering::Relaxed);
}

impl Cache {
    /// Notes the calling thread.
    fn identify(&self) {
        let here = PROCESS.load(Ordering::Relaxed);
        let (process, thread) = match is_filtered() || sys::process() != here {
            true => (0, 0),
            false => (here, rustix::thread::gettid().as_raw_nonzero().get()),
        };
        self.process.store(process, Ordering::Relaxed);
        self.thread.store(thread, Ordering::Relaxed);
        let _ = FIRST.compare_exchange(
            (&raw const *self).cast_mut(),
            null_mut(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Begins to use the cache; false in a handler that interrupted its use.
    #[inline(always)]
    pub(super) fn enter(&self) -> bool {
        if self.is_busy.load(Ordering::Relaxed) {
            return false;
        }
        self.is_busy.store(true, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        true
    }

    /// Ends the use of the cache.
    #[inline(always)]
    pub(super) fn leave(&self) {
        compiler_fence(Ordering::SeqCst);
        self.is_busy.store(false, Ordering::Relaxed);
    }
}

impl Caches {
    /// Returns the bucket of a thread pointer: those of threads are a stack apart.
    fn bucket(&mut self, me: usize) -> Option<&mut *mut Cache> {
        self.buckets.get_mut((me >> 12 ^ me >> 20) % BUCKETS)
    }

    /// Returns the cache of a former thread with this thread pointer.
    fn former(&mut self, me: usize) -> Option<*mut Cache> {
        let mut cache = *self.bucket(me)?;
        // SAFETY: caches are never unmapped.
        unsafe {
            while !cache.is_null() && (*cache).owner.load(Ordering::Relaxed) != me {
                cache = (*cache).next_of_bucket;
            }
        }
        (!cache.is_null()).then_some(cache)
    }

    /// Makes a thread pointer the owner of a cache.
    ///
    /// # Safety
    /// The cache is one of the list.
    unsafe fn assign(&mut self, cache: *mut Cache, me: usize) {
        // SAFETY: the caller's promise; caches are never unmapped.
        unsafe {
            let before = (*cache).owner.swap(me, Ordering::Relaxed);
            if before == me {
                return;
            }
            let mut link = self
                .bucket(before)
                .map_or(null_mut(), |first| &raw mut *first);
            while !link.is_null() && !(*link).is_null() {
                if *link == cache {
                    *link = (*cache).next_of_bucket;
                    break;
                }
                link = &raw mut (**link).next_of_bucket;
            }
            if let Some(first) = self.bucket(me) {
                (*cache).next_of_bucket = core::mem::replace(first, cache);
            }
        }
    }

    /// Returns a cache whose thread has ended, of a few.
    fn dead(&mut self) -> Option<*mut Cache> {
        let probes = MAX_PROBES.min(COUNT.load(Ordering::Relaxed));
        (0..probes).find_map(|_| self.probe())
    }

    /// Returns the next cache if its thread has ended.
    fn probe(&mut self) -> Option<*mut Cache> {
        let here = PROCESS.load(Ordering::Relaxed);
        if is_filtered() || sys::process() != here {
            return None;
        }
        let cache = match self.probe.is_null() {
            true => self.first,
            false => self.probe,
        };
        if cache.is_null() {
            return None;
        }
        // SAFETY: as above; signal 0 is not sent.
        let is_dead = unsafe {
            self.probe = (*cache).next.load(Ordering::Relaxed);
            let ids = match FIRST.load(Ordering::Relaxed) == cache {
                true => [here; 2],
                false => [&(*cache).process, &(*cache).thread].map(|id| id.load(Ordering::Relaxed)),
            };
            let [process, thread] = ids.map(|id| id.unsigned_abs() as usize);
            match ids[0] {
                0 => false,
                // A fork left the threads of another process behind.
                of if of != here => true,
                _ => {
                    let arguments = [process, thread, 0, 0, 0, 0];
                    sys::request(libc::SYS_tgkill, arguments) == Err(Errno::SRCH)
                }
            }
        };
        is_dead.then_some(cache)
    }

    fn make(&mut self) -> Option<*mut Cache> {
        // Threads write to their own cache lines alone.
        let piece = meta::fresh(size_of::<Cache>() + LINE_BYTES)?;
        let cache = piece
            .map_addr(|at| at.next_multiple_of(LINE_BYTES))
            .cast::<Cache>();
        // SAFETY: the piece is large enough, and aligned.
        unsafe {
            for class in 0..CLASSES {
                magazine_of(cache, class).write(Magazine::EMPTY);
            }
            (&raw mut (*cache).is_busy).write(AtomicBool::new(false));
            (&raw mut (*cache).owner).write(AtomicUsize::new(0));
            (&raw mut (*cache).thread).write(AtomicI32::new(0));
            (&raw mut (*cache).process).write(AtomicI32::new(0));
            (&raw mut (*cache).next).write(AtomicPtr::new(self.first));
            (&raw mut (*cache).next_of_bucket).write(null_mut());
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

/// Gives up the magazines of a cache whose thread has ended while it used them: another thread forked
/// meanwhile, or a handler jumped out. Their state is unknown, so their blocks are lost.
///
/// # Safety
/// The cache is of a thread that is gone.
unsafe fn abandon(cache: *mut Cache) {
    // SAFETY: the caller's promise.
    unsafe {
        if !(*cache).is_busy.load(Ordering::Relaxed) {
            return;
        }
        for class in 0..CLASSES {
            magazine_of(cache, class).write(Magazine::EMPTY);
        }
        ROOM_BYTES.fetch_sub((*cache).room_bytes, Ordering::Relaxed);
        (*cache).room_bytes = 0;
        (*cache).leave();
    }
}

/// Returns the magazine of a class.
///
/// # Safety
/// The address is that of a cache; the class is below [`CLASSES`].
#[inline(always)]
pub(super) unsafe fn magazine_of(cache: *mut Cache, class: usize) -> *mut Magazine {
    // SAFETY: the caller's promise.
    unsafe { (&raw mut (*cache).magazines).cast::<Magazine>().add(class) }
}

impl Magazine {
    const EMPTY: Self = Self {
        slots: null_mut(),
        count: 0,
        room: 0,
    };
}

/// Gives a magazine more room: twice as much, within the budget, from the others in turn.
///
/// # Safety
/// The cache is the calling thread's, and busy.
unsafe fn grow(cache: *mut Cache, class: usize) {
    let max = u32::from(shape_of(class).cached);
    // SAFETY: the caller's promise.
    unsafe {
        let magazine = &mut *magazine_of(cache, class);
        let least = match COUNT.load(Ordering::Relaxed) > MANY_CACHES {
            true => MIN_SLOTS_OF_MANY,
            false => MIN_SLOTS,
        };
        let room = (magazine.room * 2).max(least).min(max);
        let more = room_bytes(class, room.saturating_sub(magazine.room));
        if more == 0 || !has_budget(cache, class, more) {
            return;
        }
        let Some(slots) = meta::take(slot_bytes(room)) else {
            return;
        };
        let slots = slots.cast::<usize>();
        let before = (magazine.slots, slot_bytes(magazine.room));
        if !before.0.is_null() {
            slots.copy_from_nonoverlapping(before.0, magazine.count as usize);
        }
        (magazine.slots, magazine.room) = (slots, room);
        (*cache).room_bytes += more;
        ROOM_BYTES.fetch_add(more, Ordering::Relaxed);
        if !before.0.is_null() {
            meta::give(before.0.cast(), before.1);
        }
    }
}

/// Returns the bytes of the slots of a magazine.
const fn slot_bytes(room: u32) -> usize {
    room as usize * size_of::<usize>()
}

/// Returns the bytes of `room` blocks of a class, and of their slots.
fn room_bytes(class: usize, room: u32) -> usize {
    room as usize * shape_of(class).size as usize + slot_bytes(room)
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
///
/// # Safety
/// The cache is the calling thread's, and busy.
unsafe fn take_room(cache: *mut Cache, class: usize) {
    for _ in 0..CLASSES {
        // SAFETY: the caller's promise; the slots are the magazine's, of its room.
        unsafe {
            let victim = ((*cache).victim + 1) % CLASSES;
            (*cache).victim = victim;
            let magazine = magazine_of(cache, victim);
            if victim == class || (*magazine).room == 0 {
                continue;
            }
            let Magazine { slots, count, room } = magazine.replace(Magazine::EMPTY);
            let bytes = room_bytes(victim, room);
            (*cache).room_bytes -= bytes;
            ROOM_BYTES.fetch_sub(bytes, Ordering::Relaxed);
            note(cache, central::put(victim, slots, count as usize));
            meta::give(slots.cast(), slot_bytes(room));
            return;
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
        let cache = entered(cache);
        let filled = (!cache.is_null()).then(|| fill(cache, class)).flatten();
        let block = filled.or_else(|| (take(cache, class, &raw mut one, 1) == 1).then_some(one));
        left(cache);
        block
    }
}

/// Returns the block that is next in a magazine, after it was filled if it is empty. `None` without
/// memory, and for a class that is not cached.
///
/// # Safety
/// The cache is the calling thread's, and busy.
unsafe fn fill(cache: *mut Cache, class: usize) -> Option<usize> {
    // SAFETY: the caller's promise; the slots have that room.
    unsafe {
        let magazine = magazine_of(cache, class);
        // A handler may have filled it.
        if (*magazine).count == 0 {
            if (*magazine).room == 0 || !chunks::is_refused() {
                grow(cache, class);
            }
            let Magazine { slots, room, .. } = *magazine;
            if room == 0 {
                return None;
            }
            let taken = take(cache, class, slots, (room as usize / 2).max(1));
            // In descending order, so that blocks are taken in the order of their addresses.
            core::slice::from_raw_parts_mut(slots, taken).reverse();
            (*magazine).count = u32::try_from(taken).unwrap_or(0);
        }
        (*magazine).count = (*magazine).count.checked_sub(1)?;
        Some((*magazine).slots.add((*magazine).count as usize).read())
    }
}

/// Puts a block into a magazine without room, whose older half goes to the slabs.
///
/// # Safety
/// The cache is the calling thread's, or null; the block is of the class and has no user.
pub(super) unsafe fn flush(cache: *mut Cache, class: usize, mut block: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let cache = entered(cache);
        if cache.is_null() || !push(cache, class, block) {
            note(cache, central::put(class, &raw mut block, 1));
        }
        left(cache);
    }
}

/// Puts a block into a magazine; false without slots, and for a class that is not cached.
///
/// # Safety
/// The cache is the calling thread's, and busy.
unsafe fn push(cache: *mut Cache, class: usize, block: usize) -> bool {
    // SAFETY: the caller's promise; the slots have that room.
    unsafe {
        let magazine = magazine_of(cache, class);
        if (*magazine).count == (*magazine).room {
            grow(cache, class);
        }
        let Magazine { slots, count, room } = *magazine;
        if room == 0 {
            return false;
        }
        if count == room {
            let half = count.div_ceil(2) as usize;
            note(cache, central::put(class, slots, half));
            slots.copy_from(slots.add(half), count as usize - half);
            (*magazine).count = count / 2;
        }
        slots.add((*magazine).count as usize).write(block);
        (*magazine).count += 1;
        true
    }
}

/// Returns the cache, busy; null in a handler that interrupted its use.
///
/// # Safety
/// The cache is the calling thread's, or null.
unsafe fn entered(cache: *mut Cache) -> *mut Cache {
    // SAFETY: the caller's promise.
    match !cache.is_null() && unsafe { (*cache).enter() } {
        true => cache,
        false => null_mut(),
    }
}

/// Ends the use of a cache of [`entered`].
///
/// # Safety
/// As for [`entered`].
unsafe fn left(cache: *mut Cache) {
    if !cache.is_null() {
        // SAFETY: the caller's promise.
        unsafe { (*cache).leave() };
    }
}

/// Puts the blocks of threads back that have ended, of at most `probes` caches.
pub(super) fn drain_ended(probes: usize) {
    let probes = probes.min(COUNT.load(Ordering::Relaxed));
    sys::guarded(|| {
        CACHES.with(|caches| {
            for _ in 0..probes {
                if let Some(cache) = caches.probe() {
                    // SAFETY: no thread has it, nor takes it while the lock is held.
                    unsafe {
                        abandon(cache);
                        drain(cache);
                    }
                }
            }
        })
    });
}

/// Puts all blocks of a cache back.
///
/// # Safety
/// The cache is the calling thread's, or null, or that of a thread that has ended.
pub(super) unsafe fn drain(cache: *mut Cache) {
    // SAFETY: the caller's promise.
    unsafe {
        if cache.is_null() || !(*cache).enter() {
            return;
        }
        for class in 1..CLASSES {
            let magazine = &mut *magazine_of(cache, class);
            let count = core::mem::take(&mut magazine.count) as usize;
            if count > 0 {
                note(cache, central::put(class, magazine.slots, count));
            }
        }
        // A sweep looks at the heap's count.
        central::add_idle((*cache).idle_bytes.swap(0, Ordering::Relaxed));
        (*cache).leave();
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
