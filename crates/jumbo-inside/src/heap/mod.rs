//! Large allocations and mappings on huge pages; the interface of the preload library.
//!
//! Allocations of at least [`LARGE_BLOCK_BYTES`] live in a window: an address range that the kernel
//! never chooses by itself. So `free` detects its pointers by one comparison ([`is_ours`]).
//! [`crate::slab`] or the program's allocator serves smaller ones.
//!
//! The window is mapped on demand and not reserved: `ulimit -v`, mlockall(2), core dumps and the
//! commit limit count the same memory as without jumbo.
//!
//! - `window` has the blocks, `extents` indexes and `frontier` grows them, `backing` is their
//!   source.
//! - `supply` has the pages of a pool (`--pool`); `warm` makes them resident in advance.
//! - [`maps`] places and advises the program's own anonymous mappings.
//! - `demand` frees memory that was retained for the program's next allocations.
//! - `memory` is the one leaf that touches memory.
//!
//! The code runs inside the wrapped program: no allocation, no thread-local, no re-entrant call, no
//! panic. Where it fails, the program's allocator serves the request.

mod advised;
mod backing;
mod change;
mod demand;
mod extents;
mod frontier;
pub mod maps;
mod memory;
pub mod supply;
pub(crate) mod warm;
mod window;

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::density;
use crate::events::{Held, Mapping, Mechanism, Side};
use crate::gather::{self, PendingFree};
use crate::keep::Keep;
use crate::ledger::{Ledger, Slot, stats};
use crate::orders::{MaxWaste, PoolOrder};
use crate::sync::{Apart, Lock};
use crate::{sandbox, watch};
use backing::Backing;
pub use demand::{about_to_fill, end as about_to_populate, make_room};
use jumbo_sys as sys;
use memory::Deferred;
use supply::{Before, SUPPLY};
use window::{BlockWindow, Change, Site};

/// Smallest block of the window: glibc's initial M_MMAP_THRESHOLD, from which it maps each block.
pub const LARGE_BLOCK_BYTES: usize = 128 << 10;

/// Largest retained block that is cleared by writes for calloc(3), glibc's maximum M_MMAP_THRESHOLD.
/// glibc maps larger ones anew, and the program may touch little of them.
const MAX_CLEARED_BYTES: usize = 32 << 20;

/// Base page size that this module supports; with another one it stays off.
pub const BASE_PAGE: usize = 4096;

/// Address ranges: 8 TiB of blocks, 7 TiB of mappings, then the records. The kernel places mappings
/// from the top of the address space downwards, and the program break near its bottom. Neither
/// reaches the range of 32 to 48 TiB, and no sanitizer has its shadow there.
const HEAP_BASE: usize = 0x2000_0000_0000;
const HEAP_END: usize = 0x2800_0000_0000;
/// End of the heap's blocks; the pool's blocks follow.
const POOL_BASE: usize = 0x2700_0000_0000;
const MAPS_BASE: usize = HEAP_END;
const MAPS_END: usize = 0x2f00_0000_0000;
/// Page records: each table begins at one of 2^24 random pages, far from the kernel's mappings.
const TABLE_BASE: usize = MAPS_END;
const POOL_TABLE: usize = TABLE_BASE + (256 << 30);
/// End of the records, and start of jumbo's other tables.
const TABLE_END: usize = sys::OWN.start;

/// Configuration of the heap; see [`crate::orders::Orders`].
#[derive(Clone, Copy, Debug)]
pub struct HeapSettings {
    /// Bytes that one PMD maps.
    pub pmd: usize,
    /// Bound on memory that is huge and untouched.
    pub max_waste: MaxWaste,
    /// New memory begins on huge pages also where base pages take less time.
    pub huge_at_once: bool,
    /// Bound on freed memory that stays resident, if the user set one.
    pub keep: Option<Keep>,
    /// Pool of huge pages (`--pool`).
    pub pool: Option<PoolOrder>,
}

/// Result of a request to resize a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// Resized; the block has this address now.
    Done(usize),
    /// Nothing changed. The block has room for this many bytes, and the caller copies.
    Copy(usize),
    /// The address begins no block.
    Unknown,
}

/// Call of the program that works on a window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    /// It may unmap memory, as free(3) of glibc does.
    Free,
    /// It unmaps nothing where the program has installed a seccomp filter, which may forbid
    /// munmap(2): malloc(3), realloc(3) and malloc_trim(3) of glibc do not call it.
    Other,
    /// It waits for no other thread, as mmap(2): the owner of the lock may be suspended until this call
    /// is over (a garbage collector).
    Mapping,
}

/// A window behind its lock, and the blocks that were freed while the lock was held.
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
    tables: POOL_TABLE..TABLE_END,
    table: AtomicUsize::new(0),
    start: AtomicUsize::new(0),
};
crate::one_page! {
    static HEAP_WORD: AtomicU32 = AtomicU32::new(0);
    static POOL_WORD: AtomicU32 = AtomicU32::new(0);
}
static HEAP: SharedWindow = SharedWindow::new(&SITE, &HEAP_WORD);
static POOL: SharedWindow = SharedWindow::new(&POOL_SITE, &POOL_WORD);
/// Large allocations try the pool first.
static POOL_IS_WINDOW: AtomicBool = AtomicBool::new(false);
/// Set once the window has an address; nothing is allocated from it before.
static IS_PLACED: AtomicBool = AtomicBool::new(false);
crate::one_page! {
    /// Future mappings are locked (MCL_FUTURE), resident at once: the heap allocates no blocks.
    static LOCKS_FUTURE: AtomicBool = AtomicBool::new(false);
}
/// The program changed the pages of blocks: the pool serves no more.
static HAS_STICKY_PAGES: AtomicBool = AtomicBool::new(false);
static PMD: AtomicUsize = AtomicUsize::new(0);

/// Places the window; false if the host's page sizes are not supported.
///
/// # Safety
/// Called once in a process, before the first allocation.
#[expect(unsafe_code, reason = "places the records of blocks")]
pub unsafe fn start(settings: HeapSettings) -> bool {
    const WORD: usize = size_of::<usize>();
    let mut bytes = [0u8; 3 * WORD];
    let flags = rustix::rand::GetRandomFlags::NONBLOCK;
    // Early in boot there may be no randomness yet; a fixed address is better than none.
    let _ = rustix::rand::getrandom(&mut bytes, flags);
    let mut words = bytes.as_chunks::<WORD>().0.iter().copied();
    let mut word = || words.next().map_or(0, usize::from_ne_bytes);
    let (random, table, pool_table) = (word(), word(), word());
    sys::place_own(random >> 16);
    let HeapSettings { pmd, keep, .. } = settings;
    if rustix::param::page_size() != BASE_PAGE
        || !pmd.is_power_of_two()
        || !(BASE_PAGE..=1 << 30).contains(&pmd)
    {
        return false;
    }
    let max_waste = settings.max_waste.percent();
    HEAP.window
        .with(|window| window.place(pmd, max_waste, keep, random, table));
    maps::place(settings, random >> 32);
    density::start(pmd, settings.max_waste, settings.huge_at_once);
    PMD.store(pmd, Ordering::Relaxed);
    IS_PLACED.store(true, Ordering::Release);
    if let Some(order) = settings.pool {
        start_pool(order, settings, random, pool_table);
    }
    true
}

fn start_pool(order: PoolOrder, settings: HeapSettings, random: usize, table: usize) {
    POOL.window
        .with(|pool| pool.place(order.page, usize::MAX, None, random, table));
    let is_started = SUPPLY.start(order, settings.pmd, POOL_BASE);
    POOL_IS_WINDOW.store(is_started, Ordering::Release);
}

/// Makes the pool resident (`--warm`), as far as it has pages. Called before the program starts.
pub fn warm(order: PoolOrder) {
    if !POOL_IS_WINDOW.load(Ordering::Acquire) {
        return;
    }
    SUPPLY.in_parallel(|| {
        POOL.with(|pool, leaving| {
            let (mut warmed, mut request) = (0, order.size);
            let mut blocks = [0; 64];
            let mut free = blocks.iter_mut();
            while warmed < order.size && request >= order.page {
                let Some(block) = free.next() else { break };
                match pool.take(request.min(order.size - warmed), order.page) {
                    Ok((address, _)) => {
                        *block = address;
                        warmed += request.min(order.size - warmed);
                    }
                    Err(_) => request = (request / 2) & !(order.page - 1),
                }
            }
            for block in blocks.into_iter().filter(|block| *block != 0) {
                #[expect(unsafe_code, reason = "frees blocks")]
                // SAFETY: the blocks were allocated above, and have no other user.
                unsafe {
                    pool.release(block, leaving);
                }
            }
        });
    });
}

/// Counts into `ledger` as process `pid`. Precedes [`start`] if the ledger bounds the pool.
pub fn count_in(ledger: &'static Ledger, pid: u32) {
    stats::attach(ledger, pid);
    SUPPLY.recount();
}

/// Reports whether future mappings are locked, and resident at once.
pub fn locks_future() -> bool {
    LOCKS_FUTURE.load(Ordering::Relaxed)
}

/// Sets flags of this process in the ledger.
pub fn add_flags(flags: u32) {
    stats::slot().flags.fetch_or(flags, Ordering::Relaxed);
}

/// Reports whether `address` lies in the address range of blocks.
#[inline(always)]
pub const fn is_ours(address: usize) -> bool {
    address.wrapping_sub(HEAP_BASE) < HEAP_END - HEAP_BASE
}

/// Reports whether `address` lies in an address range of blocks, of mappings, or of the slabs.
#[inline(always)]
pub const fn may_hold(address: usize) -> bool {
    address.wrapping_sub(HEAP_BASE) < sys::SLABS.end - HEAP_BASE
}

/// Allocates `size` bytes at a multiple of `align` (a power of two), zeroed on request. `None`: the
/// caller asks the program's allocator.
pub fn allocate(size: usize, align: usize, zeroed: bool) -> Option<usize> {
    allocate_filled(size, align, zeroed, size)
}

/// Variant of [`allocate`] for a block that grows, of which the first `filled` bytes are written now.
pub fn allocate_filled(size: usize, align: usize, zeroed: bool, filled: usize) -> Option<usize> {
    let slot = stats::slot();
    if let Some(block) = take_from_pool(size, align, zeroed) {
        return Some(block);
    }
    gather::about_to_allocate(size);
    let take = || {
        (IS_PLACED.load(Ordering::Acquire) && !LOCKS_FUTURE.load(Ordering::Relaxed))
            .then(|| {
                HEAP.with_as(Caller::Other, |window, _| {
                    let taken = window.take_aligned(size, align);
                    if let Ok((address, false)) = taken {
                        let end = address + size.next_multiple_of(BASE_PAGE);
                        let tail = (address + filled).next_multiple_of(BASE_PAGE);
                        window.leave_tail(tail..end);
                    }
                    taken.map(|taken| (taken, window.may_drop()))
                })
            })
            .flatten()
    };
    let mut taken = take();
    if matches!(taken, Some(Err(_))) && gather::is_pending() && gather::drain() {
        taken = take();
    }
    let Some(Ok((taken, may_drop))) = taken else {
        Slot::add(&slot.large_fallback, 1);
        return None;
    };
    // Memory of the kernel's, which the program had before perhaps, and gave back.
    if taken.1 {
        crate::slab::about_to_fill(size);
    }
    Some(hand_out(taken, size, zeroed, may_drop))
}

/// Counts a new block, zeroes it on request unless it is zero already, and returns its address.
/// With `may_drop` a large one is discarded instead of written.
fn hand_out((address, zero): (usize, bool), size: usize, zeroed: bool, may_drop: bool) -> usize {
    Slot::add(&stats::slot().large_calls, 1);
    if zeroed && !zero {
        #[expect(unsafe_code, reason = "writes by address")]
        // SAFETY: the block has `size` bytes, and the caller does not know its address yet.
        unsafe {
            let is_dropped = size > MAX_CLEARED_BYTES
                && may_drop
                && !sandbox::is_entered_later()
                && !sandbox::is_entered()
                && window_of(address)
                    .site
                    .backing
                    .discard(
                        address,
                        size.next_multiple_of(BASE_PAGE),
                        PMD.load(Ordering::Relaxed),
                    )
                    .is_ok();
            if !is_dropped {
                memory::zero(address, size);
            }
        }
    }
    address
}

fn take_from_pool(size: usize, align: usize, zeroed: bool) -> Option<usize> {
    if !POOL_IS_WINDOW.load(Ordering::Acquire) {
        return None;
    }
    // A program that requests page alignment may protect or drop single base pages, which hugetlb
    // pages refuse. Locks and advice would stick to the pool's pages.
    let is_excluded = align >= BASE_PAGE || HAS_STICKY_PAGES.load(Ordering::Relaxed);
    let taken = (!is_excluded && !LOCKS_FUTURE.load(Ordering::Relaxed))
        .then(|| POOL.with(|pool, _| pool.take(size, align)))
        .flatten();
    let Some(Ok(taken)) = taken else {
        Slot::add(&stats::slot().pool_beyond, size as u64);
        return None;
    };
    Some(hand_out(taken, size, zeroed, false))
}

/// Frees the block at `address`; false if no block begins there (a bug of the program).
///
/// # Safety
/// `address` is in the window ([`is_ours`]). Nothing uses a block that begins there from now on.
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn release(address: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { release_by(address, Caller::Free) }
}

/// Variant of [`release`] for realloc(3), which has copied the block.
///
/// # Safety
/// As for [`release`].
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn release_copied(address: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { release_by(address, Caller::Other) }
}

/// # Safety
/// As for [`release`].
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
unsafe fn release_by(address: usize, caller: Caller) -> bool {
    let shared = window_of(address);
    // SAFETY: the caller's promise.
    shared
        .with_as(caller, |window, leaving| unsafe {
            window.release(address, leaving)
        })
        .unwrap_or_else(|| {
            // In a handler that interrupted a holder of the lock: the next holder frees it.
            // SAFETY: the caller's promise.
            unsafe { shared.deferred.push(address) };
            true
        })
}

/// Returns the usable bytes of the block at `address`; `None` if no block begins there.
///
/// # Safety
/// In a signal handler, which may not get the lock, a block begins at `address`.
#[expect(unsafe_code, reason = "reads the block's record without the lock")]
pub unsafe fn room(address: usize) -> Option<usize> {
    let shared = window_of(address);
    // SAFETY: the caller's promise.
    shared
        .with(|window, _| window.room(address))
        .unwrap_or_else(|| unsafe { window::peek(shared.site, address) })
}

/// Resizes the block at `address` without copying, if possible.
///
/// # Safety
/// As for [`release`]. In a signal handler a block begins at `address`.
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn resize(address: usize, size: usize) -> Resize {
    let shared = window_of(address);
    // SAFETY: the caller's promise.
    shared
        .with_as(Caller::Other, |window, leaving| unsafe {
            window.resize(address, size, leaving)
        })
        .unwrap_or_else(|| {
            // In a handler that interrupted a holder of the lock.
            // SAFETY: the caller's promise.
            let room = unsafe { window::peek(shared.site, address) };
            room.map_or(Resize::Unknown, Resize::Copy)
        })
}

/// Copies the content of a block into another one, for [`Resize::Copy`].
///
/// # Safety
/// Both are different live blocks of at least `length` bytes, used by no other thread meanwhile.
#[expect(unsafe_code, reason = "writes by address")]
pub unsafe fn copy(from: usize, to: usize, length: usize) {
    // SAFETY: the caller's promise; different blocks never overlap.
    unsafe { memory::copy(from, to, length) };
}

/// Returns the bytes in live blocks.
pub fn live() -> u64 {
    stats::slot().large_live.load(Ordering::Relaxed)
}

/// Returns the bytes in live blocks, those of the pool included. It takes the locks.
pub fn allocated() -> usize {
    let windows = [&HEAP, &POOL].into_iter();
    windows.fold(0, |sum, window| {
        sum + window.with(|it, _| it.live()).unwrap_or(0)
    })
}

/// Returns all free memory to the kernel, for malloc_trim(3); reports whether there was any.
pub fn trim() -> bool {
    let pool =
        POOL_IS_WINDOW.load(Ordering::Acquire) && POOL.with(BlockWindow::trim).unwrap_or(false);
    // glibc's unmaps nothing.
    let heap = HEAP.with_as(Caller::Other, BlockWindow::purge_all);
    heap.unwrap_or(false) || pool
}

/// Discards a range of the program as [`supply::PageSupply::discard`] does.
///
/// # Safety
/// The content of the range is the caller's to lose.
#[inline(always)]
#[expect(unsafe_code, reason = "discards memory content")]
unsafe fn discard(address: usize, length: usize) -> bool {
    // SAFETY: the caller's promise.
    SUPPLY.page() != 0 && unsafe { SUPPLY.discard(address, length) }
}

/// Ends jumbo's threads and frees unused pages of the pool, before hugetlb pages move.
fn prepare_move(before: Before) {
    if !SUPPLY.will_move(before) {
        return;
    }
    gather::end_workers();
    watch::end();
    POOL.with(BlockWindow::purge_all);
}

fn evacuate(before: Before) {
    if !SUPPLY.may_evacuate(before) {
        return;
    }
    prepare_move(before);
    // Refused in a handler that interrupted a holder: no thread should be created there, and no
    // page can move any more.
    let _ = (POOL.window).with(|_| SUPPLY.evacuate(before));
}

crate::one_page! {
    /// Locks that a fork holds, one bit each, in lock order: heap, mappings, pool, and the
    /// two of [`crate::gather`].
    static HELD: Held = Held::new();
}

/// Reports whether THP is disabled for this process (PR_SET_THP_DISABLE).
pub fn thp_disabled() -> bool {
    sys::is_without_thp()
}

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

    /// Runs `work` on the window; memory that `work` removes from it is freed afterwards, without
    /// the lock. `None` if this thread holds the lock already.
    fn with<R>(&self, work: impl FnOnce(&mut BlockWindow, &mut PendingFree) -> R) -> Option<R> {
        self.with_as(Caller::Free, work)
    }

    /// Variant of [`SharedWindow::with`] for a call of the program.
    fn with_as<R>(
        &self,
        caller: Caller,
        work: impl FnOnce(&mut BlockWindow, &mut PendingFree) -> R,
    ) -> Option<R> {
        let mut leaving = PendingFree::new();
        let mut is_demand = false;
        let run = |window: &mut BlockWindow| {
            window.confine(caller == Caller::Other && sandbox::is_entered_later());
            self.deferred.drain(|address| {
                #[expect(unsafe_code, reason = "frees a block")]
                // SAFETY: its user freed it, in `release`.
                unsafe {
                    window.release(address, &mut leaving);
                }
            });
            let before = window.keeps_by_demand();
            let result = work(window, &mut leaving);
            is_demand = !before && window.keeps_by_demand();
            window.confine(false);
            result
        };
        let result = match caller {
            Caller::Mapping => self.window.with_soon(run),
            Caller::Free | Caller::Other => self.window.with(run),
        };
        leaving.finish();
        if is_demand {
            demand::begin();
        }
        result
    }
}

/// Events that concern the heap.
#[derive(Debug)]
pub struct Events;

impl Mechanism for Events {
    fn mapped(mapping: &Mapping) {
        let is_made = mapping.address != libc::MAP_FAILED.addr();
        if is_made && mapping.protection & libc::PROT_WRITE != 0 {
            demand::mapped(mapping.length);
        }
    }

    #[inline(always)]
    fn unmapping(address: usize, length: usize) {
        advised::forget(&(address..address.saturating_add(length)));
        demand::unmapped(length);
        change::note(address, length, Change::Mapping);
    }

    // What is known of the range is still needed ([`maps::is_split`]).
    fn moving(address: usize, old: usize, _new: usize) {
        change::note(address, old, Change::Mapping);
    }

    fn moved(address: usize, old: usize, to: usize, new: usize) {
        advised::moved(address, old, to, new);
    }

    fn protected(address: usize, length: usize, protection: i32) {
        let all = libc::PROT_READ | libc::PROT_WRITE;
        if protection & libc::PROT_WRITE != 0 {
            demand::made_writable(address, length);
        }
        if protection & all != all {
            change::note(address, length, Change::Mapping);
        }
    }

    fn advising(address: usize, length: usize, advice: i32) {
        advised::record(address, length, advice);
        if advice == libc::MADV_POPULATE_WRITE {
            demand::end();
        }
        if change::is_sticky(advice) {
            change::note(address, length, Change::Pages);
        }
    }

    #[expect(unsafe_code, reason = "forwards the caller's promise")]
    unsafe fn advise(address: usize, length: usize, advice: i32) -> Option<Result<(), i32>> {
        let drops = [libc::MADV_DONTNEED, libc::MADV_FREE].contains(&advice);
        // SAFETY: the caller's promise.
        (drops && unsafe { discard(address, length) }).then_some(Ok(()))
    }

    fn locking(address: usize, length: usize) {
        change::note(address, length, Change::Pages);
    }

    fn locked_all(future: bool) {
        LOCKS_FUTURE.store(future, Ordering::Relaxed);
    }

    // Hugetlb pages can move only before the first further thread.
    fn before_thread() {
        SUPPLY.about_to_thread();
        evacuate(Before::Thread);
        demand::about_to_thread();
    }

    // Behind a filter no request is possible, so no page can move.
    fn before_confinement() {
        evacuate(Before::Confinement);
    }

    // No thread of jumbo may run while hugetlb pages move.
    fn about_to_fork() {
        prepare_move(Before::Fork);
        demand::end();
        gather::end_idle_workers();
    }

    // No other thread is inside the heap or [`crate::gather`] while the address space is copied.
    fn lock_for_fork() {
        // The lock order. Refused if a signal handler forks that interrupted a holder: the
        // interrupted call continues in both processes, and each releases the lock.
        let (heap, maps) = (HEAP.window.acquire(), maps::PACK.acquire());
        let pool = POOL.window.acquire();
        let [staging, queue] = gather::before_fork();
        // Refused: pages of the pool are being mapped, and their state is unknown.
        if pool {
            SUPPLY.evacuate(Before::Fork);
        }
        let held = [heap, maps, pool, staging, queue];
        let bits = held
            .iter()
            .rev()
            .fold(0, |bits, held| bits << 1 | u32::from(*held));
        HELD.took(bits);
    }

    #[expect(unsafe_code, reason = "releases locks")]
    #[inline(always)]
    unsafe fn unlock_after_fork(_side: Side) {
        let bits = HELD.give_back();
        let [heap, maps, pool, staging, queue] = core::array::from_fn(|at| bits >> at & 1 != 0);
        // SAFETY: the caller's promise: this thread holds the locks in `bits`.
        unsafe {
            gather::after_fork([staging, queue]);
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

    // A child's memory is not locked (mlockall(2)); it has a slot of its own for inherited memory.
    #[expect(unsafe_code, reason = "forwards the caller's promise")]
    unsafe fn is_forked(pid: u32) {
        // SAFETY: the caller's promise.
        unsafe { gather::forked(pid.cast_signed()) };
        SUPPLY.forked();
        advised::forked();
        LOCKS_FUTURE.store(false, Ordering::Relaxed);
        demand::reset_peak();
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
