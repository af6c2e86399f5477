//! Memory for an allocator that manages its own addresses (mimalloc): [`reserve`] and [`open`];
//! pages of the pool: [`range`], [`commit`], [`uncommit`].
//!
//! The allocator commits and uncommits parts of at least `SLICE_BYTES`. A page is mapped with its
//! first slice, and while the pool has a surplus, unmapped with its last slice.
//!
//! Invariant: `USED` has a bit for each committed slice of each page.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory::ZeroedTable;
use super::supply::{self, SUPPLY};
use super::{
    LOCKS_FUTURE, MANAGED_BASE, PMD, POOL_IS_WINDOW, RESERVED_BASE, RESERVED_END, demand, memory,
};
use crate::density;
use crate::ledger::{Slot, stats};
use crate::orders::PoolOrder;
use crate::sync::Lock;
use crate::{sandbox, sys};

/// Smallest unit of [`commit`] and [`uncommit`].
const SLICE_BYTES: usize = 64 << 10;
/// Slices of the largest page that is ever unmapped: no allocator uncommits all of a larger one.
const MAX_SLICES: usize = u32::BITS as usize;

/// Start of the reservations, and the address of the next one.
static RESERVED_START: AtomicUsize = AtomicUsize::new(RESERVED_BASE);
static RESERVED_NEXT: AtomicUsize = AtomicUsize::new(RESERVED_BASE);
/// Set once no reservation may be opened any more.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
/// One bit per huge page of the reservations.
type Bits = [AtomicU64; MAX_RESERVED_BYTES >> 27];
crate::one_page::table! {
    /// Reserved and opened huge pages. Untouched parts of the tables take no memory.
    static RESERVED: Bits = [const { AtomicU64::new(0) }; MAX_RESERVED_BYTES >> 27];
    static OPENED: Bits = [const { AtomicU64::new(0) }; MAX_RESERVED_BYTES >> 27];
}
/// Address range of all reservations.
const MAX_RESERVED_BYTES: usize = 512 << 30;
/// Huge pages' worth at the start that is not advised: a small program uses no more.
const UNADVISED_PMDS: usize = 2;
/// Places tried when a mapping of the program is in the way.
const MAX_DETOURS: u32 = 8;

static USED: ZeroedTable<AtomicU32> = ZeroedTable::new(supply::MAX_PAGES);

crate::one_page! {
    /// Serializes commits of the same page, and the tables of reservations.
    pub(super) static LOCK: Lock<()> = Lock::new(());
}

/// Returns the addresses to commit: the pool's size, rounded up to `unit`; empty without a pool.
pub fn range(order: PoolOrder, unit: usize) -> Range<usize> {
    if SUPPLY.page() == 0 || !USED.map() {
        return 0..0;
    }
    let end = MANAGED_BASE + (order.size + order.overcommit).next_multiple_of(unit);
    MANAGED_BASE..end
}

/// Makes `length` bytes at `start` usable, with any content; false if the pool has no pages.
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
            // Pages mapped before a failure stay for the next commit.
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
    // A signal handler interrupted a holder of the lock in this thread.
    .unwrap_or(false)
}

/// Records unused bytes; true if they must be committed again before use.
///
/// # Safety
/// The caller committed them, and nothing uses them from now on.
#[expect(unsafe_code, reason = "invalidates pointers to the memory")]
pub unsafe fn uncommit(start: usize, length: usize) -> bool {
    LOCK.with(|()| {
        let page = SUPPLY.page();
        mark(start, length, |used, bits| used & !bits);
        if page > MAX_SLICES * SLICE_BYTES {
            return true;
        }
        let pages = (start & !(page - 1)..start + length).step_by(page);
        for at in pages.filter(|at| SUPPLY.is_present(*at)) {
            if SUPPLY.surplus() >= page {
                unmap_if_unused(at);
            }
        }
        true
    })
    .unwrap_or(false)
}

/// Makes the pool resident from its start on, as far as there are pages.
pub(super) fn warm(order: PoolOrder) {
    if SUPPLY.page() == 0 {
        return;
    }
    SUPPLY.in_parallel(|| {
        LOCK.with(|()| {
            let (mut at, end) = (MANAGED_BASE, MANAGED_BASE + order.size);
            let mut request = order.size;
            while at < end && request >= order.page {
                let missing = missing(at, end).min(request);
                match missing {
                    0 => at += order.page,
                    _ if SUPPLY.map(at, missing).is_ok() => at += missing,
                    _ => request = (missing / 2) & !(order.page - 1),
                }
            }
        });
    });
}

/// Unmaps all pages of which nothing is used.
pub(super) fn unmap_unused() {
    if SUPPLY.page() <= MAX_SLICES * SLICE_BYTES {
        LOCK.with(|()| SUPPLY.present().for_each(unmap_if_unused));
    }
}

/// Unmaps a present page if none of its slices is used. Called with the lock held.
fn unmap_if_unused(at: usize) {
    if used(at).is_some_and(|used| used.load(Ordering::Relaxed) == 0) {
        // A page that cannot be unmapped stays in the pool.
        #[expect(unsafe_code, reason = "unmaps memory")]
        // SAFETY: no slice of the page is in use, and the lock prevents a commit.
        let _ = unsafe { SUPPLY.unmap(at, SUPPLY.page()) };
    }
}

/// Returns the bytes of absent pages from `at` on, up to the first present page.
fn missing(at: usize, end: usize) -> usize {
    let page = SUPPLY.page();
    let missing = (at..end)
        .step_by(page)
        .take_while(|page| !SUPPLY.is_present(*page));
    missing.count() * page
}

/// Counts memory that the allocator mapped itself although the pool is for it.
pub fn count_beyond_pool(length: usize) {
    // Smaller mappings are the allocator's own tables.
    let is_pooled = SUPPLY.page() != 0 && !POOL_IS_WINDOW.load(Ordering::Relaxed);
    if is_pooled && length >= PMD.load(Ordering::Relaxed) && isize::try_from(length).is_ok() {
        Slot::add(&stats::slot().pool_beyond, length as u64);
    }
}

/// Discards the content of memory that the allocator mapped itself.
///
/// # Errors
/// Those of madvise(2), with nothing changed. EPERM: pages of the pool.
///
/// # Safety
/// The allocator mapped the range, readable and writable, and nothing needs its content.
#[expect(unsafe_code, reason = "discards memory content")]
pub unsafe fn discard(address: usize, length: usize) -> Result<()> {
    let pool = MANAGED_BASE..MANAGED_BASE + supply::SPAN_BYTES;
    if SUPPLY.page() != 0 && pool.contains(&address) {
        return Err(Errno::PERM);
    }
    // SAFETY: the caller's promise.
    unsafe { memory::discard(address, length) }
}

/// Reports whether an address is in the pool, the reservations or jumbo's [own](sys::OWN).
#[inline(always)]
pub const fn may_hold(address: usize) -> bool {
    address.wrapping_sub(sys::OWN.start) < RESERVED_END - sys::OWN.start
}

pub(super) fn place(pmd: usize, random: usize) {
    let chunks = (RESERVED_END - RESERVED_BASE) / 2 / pmd;
    let begin = RESERVED_BASE + random % chunks * pmd;
    RESERVED_START.store(begin, Ordering::Relaxed);
    RESERVED_NEXT.store(begin, Ordering::Relaxed);
}

/// Advises huge pages for the allocator's memory.
///
/// # Errors
/// EPERM: a filter; else those of madvise(2).
pub fn advise(address: usize, length: usize) -> Result<()> {
    memory::advise(address, length)
}

/// Notes that the allocator is about to discard a range of its memory. `is_sparse`: it holds more
/// free memory than it may.
pub fn dropped(address: usize, length: usize, is_sparse: bool) {
    let range = address..address + length;
    match is_sparse {
        true => density::dropped_by_sparse(&range),
        false => density::dropped(&range),
    }
}

/// Discards base pages of the allocator's memory, whose huge pages must be earned again.
///
/// # Errors
/// EPERM: a filter; else those of madvise(2), with nothing changed (EINVAL: locked memory).
///
/// # Safety
/// They were [opened](open) for the caller, and nothing needs their content.
#[expect(unsafe_code, reason = "discards memory content")]
pub unsafe fn discard_base_pages(address: usize, length: usize) -> Result<()> {
    if !sandbox::allows_advice() || sandbox::is_entered_later() || sandbox::is_entered() {
        return Err(Errno::PERM);
    }
    let pmd = PMD.load(Ordering::Relaxed).max(1);
    let start = address & !(pmd - 1);
    dropped(
        start,
        (address + length).next_multiple_of(pmd) - start,
        true,
    );
    // The kernel splits the huge page only once memory is short; MADV_COLD splits it now.
    // SAFETY: advice changes the backing of memory, never its content.
    let _ = unsafe { sys::advise(address, rustix::param::page_size(), libc::MADV_COLD) };
    // SAFETY: the caller's promise.
    unsafe { memory::discard(address, length) }
}

/// Reserves whole huge pages for [`open`], which count as no memory yet (RLIMIT_DATA,
/// vm.overcommit_memory, core dumps). `None` for other lengths or without free addresses.
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

/// Reserves the next addresses. Called with the lock held.
fn reserve_next(length: usize) -> Option<usize> {
    let (begin, address) = (
        RESERVED_START.load(Ordering::Relaxed),
        RESERVED_NEXT.load(Ordering::Relaxed),
    );
    let end = address
        .checked_add(length)
        .filter(|end| *end <= begin + MAX_RESERVED_BYTES)?;
    let reserved = sys::reserve(address, length);
    if reserved.is_ok() || reserved == Err(Errno::EXIST) {
        RESERVED_NEXT.store(end, Ordering::Relaxed);
    }
    reserved.ok()?;
    set(&RESERVED, address..end);
    Some(address)
}

/// Unmaps a part of a [reservation](reserve).
///
/// # Errors
/// Those of munmap(2); EAGAIN: a signal handler interrupted a holder of the lock.
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

/// Makes a part of a [reservation](reserve) accessible, in whole huge pages.
///
/// # Errors
/// Those of mmap(2), mostly ENOMEM.
///
/// # Safety
/// The range was reserved for the caller, who relies on no fault there.
#[expect(unsafe_code, reason = "makes memory accessible by address")]
pub unsafe fn open(address: usize, length: usize) -> Result<()> {
    let pmd = PMD.load(Ordering::Relaxed);
    let (start, end) = (
        address & !(pmd - 1),
        (address + length).next_multiple_of(pmd),
    );
    // Opened memory stays open. The allocator requests much less at a time.
    let closed = || {
        (start..end)
            .step_by(pmd)
            .filter(|page| !is_set(&OPENED, *page))
    };
    if closed().next().is_none() {
        return Ok(());
    }
    demand::about_to_fill_in_mimalloc(end - start);
    LOCK.with(|()| {
        let first = closed().next().unwrap_or(end);
        if IS_CLOSED.load(Ordering::Relaxed) {
            return Err(Errno::NOMEM);
        }
        for page in closed() {
            // SAFETY: the caller's promise; reservations are whole huge pages, and this is closed.
            unsafe { sys::map_anew(page, pmd)? };
            set(&OPENED, page..page + pmd);
        }
        // A program that needs little memory has it on base pages.
        let advised =
            (RESERVED_START.load(Ordering::Relaxed) + UNADVISED_PMDS * pmd).clamp(first, end);
        density::begin_on_base_pages(&(first..advised));
        let _ = memory::advise(advised, end - advised);
        count_beyond_pool(end - first);
        Ok(())
    })
    // A signal handler interrupted a holder of the lock in this thread.
    .unwrap_or(Err(Errno::NOMEM))
}

/// Returns the bit of the huge page at an address.
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

/// Unmaps all reserved addresses that are not opened, because mlockall(2) would count them.
/// [`open`] fails from now on.
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
            // SAFETY: it was reserved here, never accessible, and is not opened any more.
            let _ = unsafe { memory::unmap(page, pmd) };
        }
    });
}

/// Reports whether an address is [reserved](reserve).
pub fn is_reserved(address: usize) -> bool {
    (RESERVED_BASE..RESERVED_END).contains(&address)
}

/// Changes the bits of the slices in a range.
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
