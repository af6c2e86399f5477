//! Large allocations in an address window of their own; what the preload library calls.
//!
//! Allocations of at least [`LARGE_BLOCK_BYTES`] bytes live in a window: a range of addresses that the kernel never
//! chooses by itself, so that `free` knows in one comparison ([`is_ours`]) whether a pointer is ours.
//! Smaller ones are mimalloc's or stay with the program's allocator. The window is not reserved: it is mapped as it is
//! used, so that `ulimit -v`, mlockall(2), core dumps and the commit limit see what they would see
//! without us.
//!
//! - `window` keeps the blocks, `extents` is its index, `frontier` its growing end, `backing` what it is made of;
//! - `supply` has the pages of a pool (`--pool`), which a window of its own is made of, or [`managed`] for an
//!   allocator with addresses of its own; `warm` makes them resident beforehand;
//! - [`maps`] places and advises the program's own anonymous mappings;
//! - [`main_heap`] says which large blocks are left to glibc, [`arena`] advises its thread arenas;
//! - `demand` gives back what stayed for the program's next allocations;
//! - `memory` is the one leaf that touches memory.
//!
//! Blocks are freed through [`gather`], pages counted by the rules of [`crate::pool`], and what was done is counted in
//! the [`crate::ledger`].
//!
//! This code runs inside the wrapped program: no allocation, no thread-local, no call that could
//! come back in, no panic. Where something cannot be done it says so and the program's allocator does it.

pub mod arena;
mod backing;
mod demand;
mod extents;
mod frontier;
pub mod main_heap;
pub mod managed;
pub mod maps;
mod memory;
pub mod supply;
pub(crate) mod warm;
mod window;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::density;
use crate::events::{Held, Mechanism, Side};
use crate::gather::{self, Leaving};
use crate::keep::Keep;
use crate::ledger::{Ledger, Slot, stats};
use crate::orders::{MaxWaste, PoolOrder};
use crate::sync::{Apart, Lock};
use crate::sys;
use crate::watch;
use backing::Backing;
use memory::Deferred;
use supply::{Before, SUPPLY};
use window::{BlockWindow, Site};

/// What counts as large: glibc's initial M_MMAP_THRESHOLD, from which on it would map by itself.
pub const LARGE_BLOCK_BYTES: usize = 128 << 10;

/// The base page that this module is written for. Elsewhere it stays out of the way.
pub const BASE_PAGE: usize = 4096;

/// The window: 8 TiB of blocks, 7 TiB of mappings, then the table. The kernel places mappings from the
/// top of the address space down and the program break at its bottom end; this is in the middle,
/// between 32 and 48 TiB, where neither comes and where no sanitizer keeps its shadow.
const HEAP_BASE: usize = 0x2000_0000_0000;
const HEAP_END: usize = 0x2800_0000_0000;
/// The end of the heap's shared: blocks of the pool.
const POOL_BASE: usize = 0x2700_0000_0000;
const MAPS_BASE: usize = HEAP_END;
const MAPS_END: usize = 0x2f00_0000_0000;
/// Page records: each table begins at a random page of its range (more than 2^24), and no mapping of the kernel's choice comes near.
const TABLE_BASE: usize = MAPS_END;
const POOL_TABLE: usize = TABLE_BASE + (256 << 30);
/// Tables of an allocator with addresses of its own.
const OWN_BASE: usize = TABLE_BASE + (384 << 30);
/// What an allocator with addresses of its own gets: the pool's, and others.
const MANAGED_BASE: usize = 0x2f80_0000_0000;
const RESERVED_BASE: usize = 0x3000_0000_0000;
const RESERVED_END: usize = 0x3800_0000_0000;

/// How the heap is to behave; see [`crate::orders::Orders`].
#[derive(Clone, Copy, Debug)]
pub struct HeapSettings {
    /// What one PMD maps, in bytes.
    pub pmd: usize,
    /// The memory that may be huge and untouched.
    pub max_waste: MaxWaste,
    /// How much freed memory stays, where the user says so.
    pub keep: Option<Keep>,
    /// Whether the program's malloc is glibc's, with its own defaults.
    pub glibc: bool,
    /// Whether glibc's thread arenas are laid out as [`arena`] knows them, and may grow at once.
    pub arenas: bool,
    /// The pages of a pool.
    pub pool: Option<PoolOrder>,
    /// They are for [`managed`], and not for large allocations.
    pub managed: bool,
}

/// What became of a request to resize a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// The block is this one now.
    Done(usize),
    /// Nothing was changed; the block has room for so many bytes, and the caller copies.
    Copy(usize),
    /// No block begins there.
    Unknown,
}

/// A window, and what was freed into it while its lock was held.
#[derive(Debug)]
struct SharedWindow {
    site: &'static Site,
    window: Lock<BlockWindow, Apart>,
    deferred: Deferred,
}

static SITE: Site = Site {
    backing: Backing::Advised,
    base: HEAP_BASE,
    end: POOL_BASE,
    tables: TABLE_BASE..POOL_TABLE,
    table: AtomicUsize::new(0),
    start: AtomicUsize::new(0),
};
static POOL_SITE: Site = Site {
    backing: Backing::Pool,
    base: POOL_BASE,
    end: POOL_BASE + supply::SPAN_BYTES,
    tables: POOL_TABLE..OWN_BASE,
    table: AtomicUsize::new(0),
    start: AtomicUsize::new(0),
};
crate::one_page! {
    static HEAP_WORD: AtomicU32 = AtomicU32::new(0);
    static POOL_WORD: AtomicU32 = AtomicU32::new(0);
}
static HEAP: SharedWindow = SharedWindow::new(&SITE, &HEAP_WORD);
static POOL: SharedWindow = SharedWindow::new(&POOL_SITE, &POOL_WORD);
/// Large allocations ask the pool first.
static POOL_IS_WINDOW: AtomicBool = AtomicBool::new(false);
/// Set once the window has a place; before that, and where it has none, nothing is taken from it.
static IS_PLACED: AtomicBool = AtomicBool::new(false);
crate::one_page! {
    /// The program locks all future mappings (MCL_FUTURE): what is mapped beyond a request would be
    /// resident at once, so nothing is.
    static LOCKS_FUTURE: AtomicBool = AtomicBool::new(false);
}
/// The program has locked or advised memory inside of blocks. That sticks to the pages, so what is freed
/// is unmapped at once and not handed out again as it is.
static HAS_STICKY_PAGES: AtomicBool = AtomicBool::new(false);
/// glibc's thread arenas are advised.
static ADVISES_ARENAS: AtomicBool = AtomicBool::new(false);
static PMD: AtomicUsize = AtomicUsize::new(0);

/// Gives the window its place; false where it cannot have one here.
///
/// # Safety
/// Once in a process, before the first allocation.
#[expect(unsafe_code, reason = "the records of blocks count from there")]
pub unsafe fn start(settings: HeapSettings) -> bool {
    const WORD: usize = size_of::<usize>();
    let mut bytes = [0u8; 3 * WORD];
    let flags = rustix::rand::GetRandomFlags::NONBLOCK;
    // Early in boot there may be no randomness yet; a fixed place is then better than none.
    let _ = rustix::rand::getrandom(&mut bytes, flags);
    let mut words = bytes.as_chunks::<WORD>().0.iter().copied();
    let mut word = || words.next().map_or(0, usize::from_ne_bytes);
    let (random, table, pool_table) = (word(), word(), word());
    let fits = rustix::param::page_size() == BASE_PAGE
        && settings.pmd.is_power_of_two()
        && (BASE_PAGE..=1 << 30).contains(&settings.pmd);
    if fits {
        HEAP.window.with(|window| {
            window.place(
                settings.pmd,
                settings.max_waste.percent(),
                settings.keep,
                random,
                table,
            );
        });
        maps::place(settings, random >> 32);
        managed::place(settings.pmd, random >> 16);
        density::start(settings.pmd, settings.max_waste);
        if settings.glibc
            && settings.keep.is_none()
            && settings.pool.is_none()
            && density::is_bounded()
        {
            main_heap::start();
        }
        PMD.store(settings.pmd, Ordering::Relaxed);
        ADVISES_ARENAS.store(settings.arenas, Ordering::Relaxed);
        IS_PLACED.store(true, Ordering::Release);
        if let Some(order) = settings.pool {
            start_pool(order, settings, random, pool_table);
        }
    }
    fits
}

fn start_pool(order: PoolOrder, settings: HeapSettings, random: usize, table: usize) {
    if settings.managed {
        let _ = SUPPLY.start(order, settings.pmd, MANAGED_BASE);
        return;
    }
    POOL.window
        .with(|pool| pool.place(order.page, usize::MAX, None, random, table));
    POOL_IS_WINDOW.store(
        SUPPLY.start(order, settings.pmd, POOL_BASE),
        Ordering::Release,
    );
}

/// Makes the pool resident (`--warm`), as far as there are pages. Before the program starts.
pub fn warm(order: PoolOrder) {
    if !POOL_IS_WINDOW.load(Ordering::Acquire) {
        return managed::warm(order);
    }
    SUPPLY.in_parallel(|| {
        POOL.with(|pool, leaving| {
            let (mut warmed, mut ask) = (0, order.size);
            let mut blocks = [0; 64];
            let mut free = blocks.iter_mut();
            while warmed < order.size && ask >= order.page {
                let Some(block) = free.next() else { break };
                match pool.take(ask.min(order.size - warmed), order.page) {
                    Ok((address, _)) => {
                        *block = address;
                        warmed += ask.min(order.size - warmed);
                    }
                    Err(_) => ask = (ask / 2) & !(order.page - 1),
                }
            }
            for block in blocks.into_iter().filter(|block| *block != 0) {
                #[expect(unsafe_code, reason = "frees blocks")]
                // SAFETY: they were taken above, for nothing else.
                unsafe {
                    pool.release(block, true, leaving);
                }
            }
        });
    });
}

/// Counts into `ledger` from now on, as process `pid`. Before [`start`], where the ledger has a bound for the pool.
pub fn count_in(ledger: &'static Ledger, pid: u32) {
    stats::attach(ledger, pid);
    SUPPLY.recount();
}

/// Adds to the flags of this process.
pub fn add_flags(flags: u32) {
    stats::slot().flags.fetch_or(flags, Ordering::Relaxed);
}

/// True where `address` lies in the shared of the window that blocks are in.
#[inline(always)]
pub const fn is_ours(address: usize) -> bool {
    address.wrapping_sub(HEAP_BASE) < HEAP_END - HEAP_BASE
}

/// A block of `size` bytes at a multiple of `align` (a power of two), all zeroes if `zeroed`. `None` where
/// the window cannot serve: the caller asks the program's allocator.
pub fn allocate(size: usize, align: usize, zeroed: bool) -> Option<usize> {
    let slot = stats::slot();
    if let Some(block) = take_from_pool(size, align, zeroed) {
        return Some(block);
    }
    gather::about_to_allocate(size);
    let take = || {
        (IS_PLACED.load(Ordering::Acquire) && !LOCKS_FUTURE.load(Ordering::Relaxed))
            .then(|| HEAP.with(|window, _| window.take_aligned(size, align)))
            .flatten()
    };
    let mut taken = take();
    if matches!(taken, Some(Err(_))) && gather::is_pending() && gather::drain() {
        taken = take();
    }
    let Some(Ok(taken)) = taken else {
        Slot::add(&slot.large_fallback, size as u64);
        return None;
    };
    Some(hand_out(taken, size, zeroed))
}

/// Counts a block that was taken, of which is known whether it is zero, and gives its address; zeroed if it is to be.
fn hand_out((address, zero): (usize, bool), size: usize, zeroed: bool) -> usize {
    Slot::add(&stats::slot().large_calls, 1);
    if zeroed && !zero {
        #[expect(unsafe_code, reason = "writes by address")]
        // SAFETY: the block has room for so many bytes, and its user does not know of it yet.
        unsafe {
            memory::zero(address, size);
        }
    }
    address
}

/// A block from the pool, if there is one and it has room.
fn take_from_pool(size: usize, align: usize, zeroed: bool) -> Option<usize> {
    if !POOL_IS_WINDOW.load(Ordering::Acquire) {
        return None;
    }
    // A program that asks for whole base pages may protect or drop some of them, which hugetlb pages refuse. What
    // sticks to pages would stick to those of the pool.
    let is_excluded = align >= BASE_PAGE || HAS_STICKY_PAGES.load(Ordering::Relaxed);
    let taken = (!is_excluded && !LOCKS_FUTURE.load(Ordering::Relaxed))
        .then(|| POOL.with(|pool, _| pool.take(size, align)))
        .flatten();
    let Some(Ok(taken)) = taken else {
        Slot::add(&stats::slot().pool_beyond, size as u64);
        return None;
    };
    Some(hand_out(taken, size, zeroed))
}

/// Frees the block at `address`; false where no block begins there (a bug of the program's).
///
/// # Safety
/// `address` is in the window ([`is_ours`]). Where a block begins there, nothing uses it from now on.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn release(address: usize) -> bool {
    let shared = window_of(address);
    let keep = shared.keeps();
    // SAFETY: the caller's promise.
    shared
        .with(|window, leaving| unsafe { window.release(address, keep, leaving) })
        .unwrap_or_else(|| {
            // This thread holds the lock: we are in a signal handler. The thread that takes the lock next frees it.
            // SAFETY: the caller's promise.
            unsafe { shared.deferred.push(address) };
            true
        })
}

/// How many bytes the block at `address` has room for; `None` where no block begins there.
///
/// # Safety
/// In a signal handler, where the lock may not be had: a block begins at `address`.
#[expect(unsafe_code, reason = "reads the block's record without the lock")]
pub unsafe fn room(address: usize) -> Option<usize> {
    let shared = window_of(address);
    // SAFETY: the caller's promise.
    shared
        .with(|window, _| window.room(address))
        .unwrap_or_else(|| unsafe { window::peek(shared.site, address) })
}

/// Resizes the block at `address` without copying, where that can be done.
///
/// # Safety
/// As for [`release`]: it may be elsewhere afterwards, or end earlier. In a signal handler a block begins there.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn resize(address: usize, size: usize) -> Resize {
    let shared = window_of(address);
    // SAFETY: the caller's promise.
    shared
        .with(|window, leaving| unsafe { window.resize(address, size, leaving) })
        .unwrap_or_else(|| {
            // In a signal handler that interrupted us.
            // SAFETY: the caller's promise.
            let room = unsafe { window::peek(shared.site, address) };
            room.map_or(Resize::Unknown, Resize::Copy)
        })
}

/// Copies what a block holds into another one, for [`Resize::Copy`].
///
/// # Safety
/// Both were allocated and not freed, and are not one; each has room for `length` bytes. No other thread uses them
/// meanwhile.
#[expect(unsafe_code, reason = "writes by address")]
pub unsafe fn copy(from: usize, to: usize, length: usize) {
    // SAFETY: the caller's promise; different blocks never overlap.
    unsafe { memory::copy(from, to, length) };
}

/// Bytes in blocks that are now handed out.
pub fn live() -> u64 {
    stats::slot().large_live.load(Ordering::Relaxed)
}

/// Gives all free memory back to the kernel: what malloc_trim(3) asks for. True if there was any.
pub fn trim() -> bool {
    let pool =
        POOL_IS_WINDOW.load(Ordering::Acquire) && POOL.with(BlockWindow::trim).unwrap_or(false);
    HEAP.with(BlockWindow::give_up).unwrap_or(false) || pool
}

/// The program changed something about the pages at `address` that outlives what they hold: mlock(2),
/// madvise(2).
fn changed(address: usize) {
    // Programs that choose addresses at random (V8) have mappings of their own beyond the blocks.
    let holds = |shared: &SharedWindow| shared.window.with(|window| window.holds(address));
    if is_ours(address) && holds(window_of(address)).unwrap_or(true) {
        HAS_STICKY_PAGES.store(true, Ordering::Relaxed);
    }
}

/// The program drops what a range holds: MADV_DONTNEED, MADV_FREE. True where that was done here, because the kernel
/// does not do it as it would without us.
///
/// # Safety
/// What the range holds is the caller's to lose.
#[inline(always)]
#[expect(unsafe_code, reason = "drops what memory holds")]
unsafe fn discard(address: usize, length: usize) -> bool {
    // SAFETY: the caller's promise.
    SUPPLY.page() != 0 && unsafe { SUPPLY.discard(address, length) }
}

/// Ends all threads before hugetlb pages move, and frees the pool's unused pages, which need not move then.
fn prepare_move(before: Before) {
    if !SUPPLY.will_move(before) {
        return;
    }
    gather::end_workers();
    watch::end();
    if POOL_IS_WINDOW.load(Ordering::Acquire) {
        POOL.with(BlockWindow::give_up);
    } else {
        managed::give_up();
    }
}

fn evacuate(before: Before) {
    if !SUPPLY.may_evacuate(before) {
        return;
    }
    prepare_move(before);
    let (pool, managed) = (POOL.window.acquire(), managed::LOCK.acquire());
    // Refused in a handler that interrupted one of them, where no thread should be made. What is there by
    // then cannot move any more.
    if pool && managed {
        SUPPLY.evacuate(before);
    }
    #[expect(unsafe_code, reason = "gives locks back")]
    // SAFETY: this thread took them above.
    unsafe {
        if managed {
            managed::LOCK.release();
        }
        if pool {
            POOL.window.release();
        }
    }
}

crate::one_page! {
    /// The locks that a fork holds, a bit each, in the order in which they are taken: heap, mappings, pool, mimalloc's arenas,
    /// and the two of [`crate::gather`].
    static HELD: Held = Held::new();
}

/// True where this process was told not to use THP.
pub fn thp_disabled() -> bool {
    sys::is_without_thp()
}

/// The shared that an address of ours lies in.
fn window_of(address: usize) -> &'static SharedWindow {
    if address < POOL_BASE { &HEAP } else { &POOL }
}

impl SharedWindow {
    const fn new(site: &'static Site, word: &'static AtomicU32) -> Self {
        Self {
            site,
            window: Lock::on(word, BlockWindow::new(site)),
            deferred: Deferred::new(),
        }
    }

    /// Whether freed memory may stay mapped. The pool's pages stay where they are counted.
    fn keeps(&self) -> bool {
        self.site.backing == Backing::Pool || !HAS_STICKY_PAGES.load(Ordering::Relaxed)
    }

    /// Runs `work` on the window; what it takes out of it is freed afterwards, without the lock. `None` where
    /// this thread is inside of it already.
    fn with<R>(&self, work: impl FnOnce(&mut BlockWindow, &mut Leaving) -> R) -> Option<R> {
        let mut leaving = Leaving::new();
        let mut is_demand = false;
        let result = self.window.with(|window| {
            let keep = self.keeps();
            self.deferred.drain(|address| {
                #[expect(unsafe_code, reason = "frees a block")]
                // SAFETY: its user freed it, in `release`.
                unsafe {
                    window.release(address, keep, &mut leaving);
                }
            });
            let before = window.keeps_by_demand();
            let result = work(window, &mut leaving);
            is_demand = !before && window.keeps_by_demand();
            result
        });
        leaving.finish();
        if is_demand {
            demand::begin();
        }
        result
    }
}

/// The kernel is about to make much memory resident in one call, during which nothing can be given back.
pub fn about_to_populate() {
    demand::end();
}

/// Whether advice changes pages for longer than the call (madvise(2)).
pub fn sticks(advice: i32) -> bool {
    let passing = [
        libc::MADV_DONTNEED,
        libc::MADV_FREE,
        libc::MADV_HUGEPAGE,
        libc::MADV_WILLNEED,
    ];
    !passing.contains(&advice)
}

/// The events that concern the heap.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    fn protected(address: usize, _length: usize, protection: i32) {
        // As advice does, it sticks to the pages of a block when that is freed.
        let all = libc::PROT_READ | libc::PROT_WRITE;
        if protection & all != all {
            changed(address);
        }
    }

    fn advising(address: usize, _length: usize, advice: i32) {
        if advice == libc::MADV_POPULATE_WRITE {
            about_to_populate();
        }
        // It sticks to the pages of a block when that is freed.
        if sticks(advice) {
            changed(address);
        }
    }

    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn advise(address: usize, length: usize, advice: i32) -> Option<Result<(), i32>> {
        let drops = [libc::MADV_DONTNEED, libc::MADV_FREE].contains(&advice);
        // SAFETY: the caller's promise.
        (drops && unsafe { discard(address, length) }).then_some(Ok(()))
    }

    fn locking(address: usize, _length: usize) {
        // The lock would stick to the pages of a block when it is freed.
        changed(address);
    }

    fn locked_all(future: bool) {
        LOCKS_FUTURE.store(future, Ordering::Relaxed);
    }

    // The last moment at which what hugetlb pages hold can move.
    fn before_thread() {
        SUPPLY.about_to_thread();
        evacuate(Before::Thread);
    }

    // Behind a filter nothing can be asked, and so nothing can move.
    fn before_confinement() {
        evacuate(Before::Confinement);
    }

    // No thread of ours is left where what hugetlb pages hold has to move.
    fn about_to_fork() {
        prepare_move(Before::Fork);
        demand::end();
        gather::end_idle_workers();
    }

    // No other thread is inside the heap or [`crate::gather`] while the address space is copied.
    fn lock_for_fork() {
        // In this order, always. Refused where a signal handler forks that interrupted us: the interrupted
        // call goes on in both processes, and gives the lock back in each.
        let (heap, maps) = (HEAP.window.acquire(), maps::PACK.acquire());
        let (pool, managed) = (POOL.window.acquire(), managed::LOCK.acquire());
        let [staging, queue] = gather::before_fork();
        // Where they are refused, pages are being brought: then nothing can be said about them.
        if pool && managed {
            SUPPLY.evacuate(Before::Fork);
        }
        let held = [heap, maps, pool, managed, staging, queue];
        let bits = held
            .iter()
            .rev()
            .fold(0, |bits, held| bits << 1 | u32::from(*held));
        HELD.took(bits);
    }

    #[expect(unsafe_code, reason = "gives locks back")]
    #[inline(always)]
    unsafe fn unlock_after_fork(_side: Side) {
        let bits = HELD.give_back();
        let [heap, maps, pool, managed, staging, queue] =
            core::array::from_fn(|at| bits >> at & 1 != 0);
        // SAFETY: the caller's promise: this thread holds what the bits say.
        unsafe {
            gather::after_fork([staging, queue]);
            if managed {
                managed::LOCK.release();
            }
            if pool {
                POOL.window.release();
            }
            if maps {
                maps::PACK.release();
            }
            if heap {
                HEAP.window.release();
            }
        }
    }

    // Its memory is not locked, whatever the parent did (mlockall(2)); it counts as a process of its own from now on, with what
    // it inherited.
    #[expect(unsafe_code, reason = "the caller's promise is passed on")]
    unsafe fn is_forked(pid: u32) {
        // SAFETY: the caller's promise.
        unsafe { gather::forked(pid.cast_signed()) };
        SUPPLY.forked();
        LOCKS_FUTURE.store(false, Ordering::Relaxed);
        demand::is_forked();
        let Some(ledger) = stats::ledger() else {
            return;
        };
        let parent = stats::slot();
        let (flags, live) = (
            parent.flags.load(Ordering::Relaxed),
            parent.large_live.load(Ordering::Relaxed),
        );
        stats::attach(ledger, pid);
        stats::slot().flags.store(flags, Ordering::Relaxed);
        stats::live(live);
        SUPPLY.recount();
    }
}
