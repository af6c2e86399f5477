//! The pool's pages for an allocator that manages addresses of its own: [`range`], [`commit`], [`uncommit`].
//!
//! The allocator asks for parts of the range before it uses them, and says when it uses them no more, in
//! any pieces of at least `SLICE`. The pages under them are brought when the first piece of them is asked for;
//! while the pool holds more than its size, a page goes back when its last piece is given up.
//!
//! Invariant: of each page `USED` has a bit for each piece that the allocator may use.

use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::io::{Errno, Result};

use super::memory::Mapped;
use super::supply::{self, SUPPLY};
use super::{LOCKED, MANAGED_BASE, PMD, memory};
use crate::ledger::{Slot, stats};
use crate::orders::PoolOrder;
use crate::sync::Lock;

/// What is asked for and given up at a time, at least.
const SLICE: usize = 64 << 10;
/// Pages larger than that many slices are not given back: no user gives up all of one.
const SLICES: usize = u32::BITS as usize;

static USED: Mapped<AtomicU32> = Mapped::new(supply::PAGES);

/// Keeps threads from bringing the same page twice.
pub(super) static LOCK: Lock<()> = Lock::new(());

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
            if missing > 0 && (LOCKED.load(Ordering::Relaxed) || SUPPLY.bring(at, missing).is_err())
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
        if page > SLICES * SLICE {
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
    SUPPLY.in_parallel(|| {
        LOCK.with(|()| {
            let (mut at, end) = (MANAGED_BASE, MANAGED_BASE + order.size);
            let mut ask = order.size;
            while at < end && ask >= order.page {
                let missing = missing(at, end).min(ask);
                match missing {
                    0 => at += order.page,
                    _ if SUPPLY.bring(at, missing).is_ok() => at += missing,
                    _ => ask = (missing / 2) & !(order.page - 1),
                }
            }
        });
    });
}

/// Gives all pages back of which nothing is used.
pub(super) fn give_up() {
    if SUPPLY.page() <= SLICES * SLICE {
        LOCK.with(|()| SUPPLY.there().for_each(give_unused));
    }
}

/// Gives a page back that is there, if nothing of it is used. Called with the lock held, for pages of which that is known.
fn give_unused(at: usize) {
    if used(at).is_some_and(|used| used.load(Ordering::Relaxed) == 0) {
        // A refusal leaves it in the pool.
        #[expect(unsafe_code, reason = "unmaps memory")]
        // SAFETY: no slice of the page is in use, and the lock keeps any from being asked for.
        let _ = unsafe { SUPPLY.give(at, SUPPLY.page()) };
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

/// The allocator has mapped memory for itself, where it has a pool.
pub fn beyond(length: usize) {
    // Tables of its own are no matter.
    if SUPPLY.page() != 0 && length >= PMD.load(Ordering::Relaxed) {
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
    let pool = MANAGED_BASE..MANAGED_BASE + supply::SPAN;
    if SUPPLY.page() != 0 && pool.contains(&address) {
        return Err(Errno::PERM);
    }
    // SAFETY: the caller's promise.
    unsafe { memory::discard(address, length) }
}

/// Advises memory that the allocator has mapped for itself, where a huge page may fit.
pub fn advise(address: usize, length: usize) {
    let pmd = PMD.load(Ordering::Relaxed);
    if pmd != 0 && length >= pmd {
        // A refusal is counted.
        let _ = memory::advise(address, length);
    }
}

/// Changes the bits of the slices that a range touches.
fn mark(start: usize, length: usize, change: impl Fn(u32, u32) -> u32) {
    let page = SUPPLY.page();
    if page > SLICES * SLICE {
        return;
    }
    let (mut at, end) = (start, start + length);
    while at < end {
        let next = (at & !(page - 1)) + page;
        let (first, last) = (at % page / SLICE, (next.min(end) - 1) % page / SLICE);
        let bits = (u32::MAX >> (SLICES - 1 - last)) & (u32::MAX << first);
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
