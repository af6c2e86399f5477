//! Memory for an allocator that manages addresses of its own: [`reserve`] and [`open`]; and the pool's pages: [`range`],
//! [`commit`], [`uncommit`].
//!
//! The allocator asks for parts of the range before it uses them, and says when it uses them no more, in
//! any pieces of at least `SLICE_BYTES`. The pages under them are brought when the first piece of them is asked for;
//! while the pool holds more than its size, a page goes back when its last piece is given up.
//!
//! Invariant: of each page `USED` has a bit for each piece that the allocator may use.

use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};
use rustix::mm;

use super::memory::ZeroedTable;
use super::supply::{self, SUPPLY};
use super::{
    LOCKS_FUTURE, MANAGED_BASE, OWN_BASE, PMD, POOL_IS_WINDOW, RESERVED_BASE, RESERVED_END, memory,
};
use crate::density;
use crate::ledger::{Slot, stats};
use crate::orders::PoolOrder;
use crate::sandbox;
use crate::sync::Lock;

/// What is asked for and given up at a time, at least.
const SLICE_BYTES: usize = 64 << 10;
/// Pages larger than that many slices are not given back: no user gives up all of one.
const MAX_SLICES: usize = u32::BITS as usize;

/// Where addresses were reserved first, and where the next ones are.
static RESERVED_START: AtomicUsize = AtomicUsize::new(RESERVED_BASE);
static RESERVED_NEXT: AtomicUsize = AtomicUsize::new(RESERVED_BASE);
/// None is opened any more.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
/// A bit for each huge page of them.
type Bits = [AtomicU64; MAX_RESERVED_BYTES >> 27];
crate::one_page::table! {
    /// Those that are reserved here, and those that were opened. Zero pages, but for the first of them.
    static RESERVED: Bits = [const { AtomicU64::new(0) }; MAX_RESERVED_BYTES >> 27];
    static OPENED: Bits = [const { AtomicU64::new(0) }; MAX_RESERVED_BYTES >> 27];
}
/// So many addresses are reserved, at most.
const MAX_RESERVED_BYTES: usize = 512 << 30;
/// Nothing was reserved yet. The first huge pages' worth is not advised.
const BASE_PAGE_PMDS: usize = 2;
/// How often another place is tried when a mapping of the program's is in the way.
const MAX_DETOURS: u32 = 8;

static USED: ZeroedTable<AtomicU32> = ZeroedTable::new(supply::MAX_PAGES);

crate::one_page! {
    /// Keeps threads from bringing the same page twice.
    pub(super) static LOCK: Lock<()> = Lock::new(());
}

/// The addresses that may be asked for: as many as the pool can hold, and a part that it cannot, so that
/// they are whole multiples of `unit`. Empty where there is no pool.
pub fn range(order: PoolOrder, unit: usize) -> Range<usize> {
    if SUPPLY.page() == 0 || !USED.map() {
        return 0..0;
    }
    let end = MANAGED_BASE + (order.size + order.overcommit).next_multiple_of(unit);
    MANAGED_BASE..end
}

/// Makes `length` bytes at `start` usable, with whatever they hold. False where the pool has no pages.
///
/// # Safety
/// They lie in the [`range`].
#[expect(unsafe_code, reason = "maps by address")]
pub unsafe fn commit(start: usize, length: usize) -> bool {
    LOCK.with(|()| {
        let page = SUPPLY.page();
        let (mut at, last) = (start & !(page - 1), start + length);
        while at < last {
            let missing = missing(at, last);
            // What was brought before a failure stays for the next one who asks.
            if missing > 0
                && (LOCKS_FUTURE.load(Ordering::Relaxed) || SUPPLY.map(at, missing).is_err())
            {
                return false;
            }
            at += missing.max(page);
        }
        mark(start, length, |used, bits| used | bits);
        true
    })
    // In a signal handler that interrupted us.
    .unwrap_or(false)
}

/// Takes note that `length` bytes at `start` are not used any more. True where some of them may not be used
/// before they are asked for again.
///
/// # Safety
/// The caller was given them by [`commit`], and nothing uses them from now on.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn uncommit(start: usize, length: usize) -> bool {
    LOCK.with(|()| {
        let page = SUPPLY.page();
        mark(start, length, |used, bits| used & !bits);
        if page > MAX_SLICES * SLICE_BYTES {
            return true;
        }
        let pages = (start & !(page - 1)..start + length).step_by(page);
        for at in pages.filter(|at| SUPPLY.is_there(*at)) {
            if SUPPLY.surplus() >= page {
                give_unused(at);
            }
        }
        true
    })
    .unwrap_or(false)
}

/// Makes the pool resident, from its start on and as far as there are pages.
pub(super) fn warm(order: PoolOrder) {
    if SUPPLY.page() == 0 {
        // The pool could not start.
        return;
    }
    SUPPLY.in_parallel(|| {
        LOCK.with(|()| {
            let (mut at, end) = (MANAGED_BASE, MANAGED_BASE + order.size);
            let mut ask = order.size;
            while at < end && ask >= order.page {
                let missing = missing(at, end).min(ask);
                match missing {
                    0 => at += order.page,
                    _ if SUPPLY.map(at, missing).is_ok() => at += missing,
                    _ => ask = (missing / 2) & !(order.page - 1),
                }
            }
        });
    });
}

/// Gives all pages back of which nothing is used.
pub(super) fn give_up() {
    if SUPPLY.page() <= MAX_SLICES * SLICE_BYTES {
        LOCK.with(|()| SUPPLY.there().for_each(give_unused));
    }
}

/// Gives a page back that is there, if nothing of it is used. Called with the lock held, for pages of which that is known.
fn give_unused(at: usize) {
    if used(at).is_some_and(|used| used.load(Ordering::Relaxed) == 0) {
        // A refusal leaves it in the pool.
        #[expect(unsafe_code, reason = "unmaps memory")]
        // SAFETY: no slice of the page is in use, and the lock keeps any from being asked for.
        let _ = unsafe { SUPPLY.unmap(at, SUPPLY.page()) };
    }
}

/// How many bytes of pages from `at` on are not there, up to the first that is.
fn missing(at: usize, end: usize) -> usize {
    let page = SUPPLY.page();
    let missing = (at..end)
        .step_by(page)
        .take_while(|page| !SUPPLY.is_there(*page));
    missing.count() * page
}

/// The allocator has taken memory for itself, where the pool is its own.
pub fn beyond(length: usize) {
    // Tables of its own are no matter.
    let is_pooled = SUPPLY.page() != 0 && !POOL_IS_WINDOW.load(Ordering::Relaxed);
    // More than there can be is no matter of the pool's.
    if is_pooled && length >= PMD.load(Ordering::Relaxed) && isize::try_from(length).is_ok() {
        Slot::add(&stats::slot().pool_beyond, length as u64);
    }
}

/// Drops what memory holds that the allocator has mapped for itself and does not use.
///
/// # Errors
/// The kernel's, where nothing has changed.
///
/// # Safety
/// The allocator mapped the range for itself, readable and writable, and nothing uses what it holds.
#[expect(unsafe_code, reason = "drops what memory holds")]
pub unsafe fn renew(address: usize, length: usize) -> Result<()> {
    let pool = MANAGED_BASE..MANAGED_BASE + supply::SPAN_BYTES;
    if SUPPLY.page() != 0 && pool.contains(&address) {
        return Err(Errno::PERM);
    }
    // SAFETY: the caller's promise.
    unsafe { memory::discard(address, length) }
}

/// The number of addresses that hold tables of the allocator's own, at most, from a random place on.
const OWN_TABLE_BYTES: usize = (MANAGED_BASE - OWN_BASE) / 2;
static NEXT_TABLE: AtomicUsize = AtomicUsize::new(OWN_BASE);

/// The address at which the allocator's next mapping of its own is to be, which may not be free. The kernel's choice is the
/// next place below the program's mappings: there a stack of the program's may be about to grow (MAP_GROWSDOWN).
pub fn own_place(length: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed);
    if pmd == 0 || length > OWN_TABLE_BYTES {
        return None;
    }
    // Side by side, so that they are one mapping.
    let at = NEXT_TABLE.fetch_add(length.next_multiple_of(SLICE_BYTES), Ordering::Relaxed);
    (at + length <= MANAGED_BASE).then_some(at)
}

/// Whether an address is where the allocator's memory is, as a rule: its pool, its reservations, and
/// [own places](own_place).
#[inline(always)]
pub const fn may_hold(address: usize) -> bool {
    address.wrapping_sub(OWN_BASE) < RESERVED_END - OWN_BASE
}

pub(super) fn place(pmd: usize, random: usize) {
    // Not at the start of a huge page: tables of little more than one would be given one where THP is always on.
    let tables = OWN_BASE + random % (OWN_TABLE_BYTES / pmd) * pmd + pmd / 2;
    NEXT_TABLE.store(tables, Ordering::Relaxed);
    let chunks = (RESERVED_END - RESERVED_BASE) / 2 / pmd;
    let begin = RESERVED_BASE + random % chunks * pmd;
    RESERVED_START.store(begin, Ordering::Relaxed);
    RESERVED_NEXT.store(begin, Ordering::Relaxed);
}

/// Asks for huge pages in memory of the allocator's.
///
/// # Errors
/// EPERM: a filter; else the kernel's.
pub fn advise(address: usize, length: usize) -> Result<()> {
    memory::advise(address, length)
}

/// The allocator is about to drop what a range of its memory holds.
pub fn dropped(address: usize, length: usize) {
    density::dropped(&(address..address + length));
}

/// Drops base pages of the allocator's memory. The huge pages that they are in have to be earned again.
///
/// # Errors
/// EPERM: a filter; else the kernel's, where nothing has changed (EINVAL: locked memory).
///
/// # Safety
/// They were [opened](open) for the caller, and nothing uses what they hold.
#[expect(unsafe_code, reason = "drops what memory holds")]
pub unsafe fn thin(address: usize, length: usize) -> Result<()> {
    if !sandbox::allows_advice() || sandbox::is_entered_later() || sandbox::is_entered() {
        return Err(Errno::PERM);
    }
    let pmd = PMD.load(Ordering::Relaxed).max(1);
    let start = address & !(pmd - 1);
    dropped(start, (address + length).next_multiple_of(pmd) - start);
    // The kernel frees a part of a huge page only once it splits it, which it puts off until memory is short. Advice for
    // one base page of it has it split now.
    let first = with_exposed_provenance_mut(address);
    // SAFETY: it changes how memory is backed, never what it holds.
    let _ = unsafe { mm::madvise(first, rustix::param::page_size(), mm::Advice::LinuxCold) };
    // SAFETY: the caller's promise.
    unsafe { memory::discard(address, length) }
}

/// Addresses for the allocator to [`open`]: whole huge pages, which count as memory nowhere yet
/// (RLIMIT_DATA, vm.overcommit_memory, core dumps). `None` where less is asked for, or none can be
/// had.
pub fn reserve(length: usize) -> Option<usize> {
    let pmd = PMD.load(Ordering::Relaxed);
    if pmd == 0 || !length.is_multiple_of(pmd) {
        return None;
    }
    let find = || (0..MAX_DETOURS).find_map(|_| reserve_next(length));
    let is_closed = || IS_CLOSED.load(Ordering::Relaxed);
    LOCK.with(|()| if is_closed() { None } else { find() })
        .flatten()
}

/// Called with the lock held.
fn reserve_next(length: usize) -> Option<usize> {
    let (begin, address) = (
        RESERVED_START.load(Ordering::Relaxed),
        RESERVED_NEXT.load(Ordering::Relaxed),
    );
    let end = address
        .checked_add(length)
        .filter(|end| *end <= begin + MAX_RESERVED_BYTES)?;
    let reserved = memory::reserve(address, length);
    if reserved.is_ok() || reserved == Err(Errno::EXIST) {
        RESERVED_NEXT.store(end, Ordering::Relaxed);
    }
    reserved.ok()?;
    set(&RESERVED, address..end);
    Some(address)
}

/// Gives up a part of what was [reserved](reserve).
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// It was reserved for the caller, and nothing uses it from now on.
#[expect(unsafe_code, reason = "unmaps memory")]
pub unsafe fn unreserve(address: usize, length: usize) -> Result<()> {
    LOCK.with(|()| {
        let pmd = PMD.load(Ordering::Relaxed);
        for (word, bit) in (address..address + length)
            .step_by(pmd)
            .filter_map(|page| bit(&RESERVED, page))
        {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { memory::unmap(address, length) }
    })
    .unwrap_or(Err(Errno::AGAIN))
}

/// Makes a part of what was [reserved](reserve) accessible, in whole huge pages.
///
/// # Errors
/// The kernel's: ENOMEM mostly.
///
/// # Safety
/// The range was reserved for the caller, who counts on no fault there.
#[expect(unsafe_code, reason = "makes memory accessible by address")]
pub unsafe fn open(address: usize, length: usize) -> Result<()> {
    let pmd = PMD.load(Ordering::Relaxed);
    let (start, end) = (
        address & !(pmd - 1),
        (address + length).next_multiple_of(pmd),
    );
    // What was opened stays so. The allocator asks for much less at a time.
    let closed = || {
        (start..end)
            .step_by(pmd)
            .filter(|page| !is_set(&OPENED, *page))
    };
    if closed().next().is_none() {
        return Ok(());
    }
    LOCK.with(|()| {
        let first = closed().next().unwrap_or(end);
        if IS_CLOSED.load(Ordering::Relaxed) {
            return Err(Errno::NOMEM);
        }
        // SAFETY: the caller's promise; reservations are of whole huge pages.
        unsafe { memory::unprotect(first, end - first)? };
        set(&OPENED, first..end);
        // A program that needs little has it on base pages.
        let advised =
            (RESERVED_START.load(Ordering::Relaxed) + BASE_PAGE_PMDS * pmd).clamp(first, end);
        density::begin_on_base_pages(&(first..advised));
        let _ = memory::advise(advised, end - advised);
        beyond(end - first);
        Ok(())
    })
    // In a signal handler that interrupted us.
    .unwrap_or(Err(Errno::NOMEM))
}

/// The bit of the huge page at an address.
fn bit(of: &'static Bits, page: usize) -> Option<(&'static AtomicU64, u64)> {
    let number =
        page.checked_sub(RESERVED_START.load(Ordering::Relaxed))? / PMD.load(Ordering::Relaxed);
    Some((of.get(number / 64)?, 1 << (number % 64)))
}

fn set(of: &'static Bits, pages: Range<usize>) {
    let pages = pages.step_by(PMD.load(Ordering::Relaxed));
    for (word, bit) in pages.filter_map(|page| bit(of, page)) {
        word.fetch_or(bit, Ordering::Release);
    }
}

fn is_set(of: &'static Bits, page: usize) -> bool {
    bit(of, page).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// Gives addresses up that were not opened, for the allocator is not asked any more, and mlockall(2) would count them. To open
/// them fails from now on.
pub fn close() {
    let pmd = PMD.load(Ordering::Relaxed);
    LOCK.with(|()| {
        if pmd == 0 || IS_CLOSED.swap(true, Ordering::Relaxed) {
            return;
        }
        let pages = RESERVED_START.load(Ordering::Relaxed)..RESERVED_NEXT.load(Ordering::Relaxed);
        let is_closed = |page: &usize| is_set(&RESERVED, *page) && !is_set(&OPENED, *page);
        for page in pages.step_by(pmd).filter(is_closed) {
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: it was reserved here and never accessible, and is not opened any more.
            let _ = unsafe { memory::unmap(page, pmd) };
        }
    });
}

/// Whether an address is one that was [reserved](reserve).
pub fn is_reserved(address: usize) -> bool {
    (RESERVED_BASE..RESERVED_END).contains(&address)
}

/// Changes the bits of the slices that a range touches.
fn mark(start: usize, length: usize, change: impl Fn(u32, u32) -> u32) {
    let page = SUPPLY.page();
    if page > MAX_SLICES * SLICE_BYTES {
        return;
    }
    let (mut at, end) = (start, start + length);
    while at < end {
        let next = (at & !(page - 1)) + page;
        let (first, last) = (
            at % page / SLICE_BYTES,
            (next.min(end) - 1) % page / SLICE_BYTES,
        );
        let bits = (u32::MAX >> (MAX_SLICES - 1 - last)) & (u32::MAX << first);
        if let Some(used) = used(at) {
            used.store(
                change(used.load(Ordering::Relaxed), bits),
                Ordering::Relaxed,
            );
        }
        at = next;
    }
}

fn used(address: usize) -> Option<&'static AtomicU32> {
    USED.get().get((address - MANAGED_BASE) / SUPPLY.page())
}
