//! The pool's pages (`jumbo run --pool`): [`bring`] maps some, [`give`] gives them back.
//!
//! A page comes from the first source that has it:
//! 1. hugetlb: the kernel's pool, its surplus included. Mapping them reserves them, and they are made
//!    resident with MADV_POPULATE_WRITE at once, so that a cgroup's hugetlb limit is an error here and not a
//!    SIGBUS later.
//! 2. THP: advised anonymous memory, of which one base page is touched, and which is then collapsed, so
//!    that it is huge and not just asked to be. Asked for only while the memory cgroup and the host have
//!    room: at a cgroup's limit a touch kills, while a collapse fails. Only for a pool in pages of that size: of
//!    larger ones the first block would make a whole page resident, whatever it uses of it.
//!
//! Where neither has enough nothing changes and the caller takes memory as it would without a pool.
//!
//! What must be so before a process forks is in [`settle`].
//!
//! Invariant: [`SOURCES`] says of each page where it came from, and [`HELD`] is their sum. Whoever
//! brings or gives a range is its only user.

mod settle;

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory::Mapped;
use super::{BASE_PAGE, memory, warm};
use crate::headroom::{self, Enough};
use crate::ledger::{pool_reason as reason, stats};
use crate::orders::PoolOrder;
use crate::sandbox;

pub(super) use settle::{Before, about_to_thread, may_settle, settle, will_move};

/// Addresses of the pool, whoever uses it.
pub(super) const SPAN: usize = 512 << 30;
/// One entry a page, which is at least 2 MiB where there are that many.
pub(super) const PAGES: usize = SPAN >> 21;

const NOWHERE: u8 = 0;
const HUGETLB: u8 = 1;
const THP: u8 = 2;

static SOURCES: Mapped<AtomicU8> = Mapped::new(PAGES);
static BASE: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicUsize = AtomicUsize::new(0);
static PMD: AtomicUsize = AtomicUsize::new(0);
/// The pool's size, and the most there may be.
static SIZE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);
/// What there is now.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// Entries of [`SOURCES`] beyond that were never written.
static REACHED: AtomicUsize = AtomicUsize::new(0);
/// Hugetlb pages may be asked for.
static ASKING: AtomicBool = AtomicBool::new(false);
/// Bits of [`reason`], for whatever slot there is.
static REASONS: AtomicU32 = AtomicU32::new(0);
/// After the kernel's pool had nothing, so many takes do not ask it.
static BACKING_OFF: AtomicU32 = AtomicU32::new(0);
const BACK_OFF: u32 = 64;
/// What may still be touched before the headroom is looked at again.
static CREDIT: AtomicUsize = AtomicUsize::new(0);
/// What has room and is being touched: nobody else is to count on that room.
static TOUCHING: AtomicUsize = AtomicUsize::new(0);
/// What is left to others, and how far a look at the headroom is trusted.
const LEFT: usize = 64 << 20;
const TRUSTED: usize = 64 << 20;

/// Sets the pool up, with its addresses from `base` on. Once, while there is one thread. False where there is
/// no memory for its table.
pub(super) fn start(order: PoolOrder, pmd: usize, base: usize) -> bool {
    if !SOURCES.map() {
        return false;
    }
    BASE.store(base, Ordering::Relaxed);
    PAGE.store(order.page, Ordering::Relaxed);
    PMD.store(pmd, Ordering::Relaxed);
    SIZE.store(order.size, Ordering::Relaxed);
    MOST.store(order.size + order.overcommit, Ordering::Relaxed);
    settle::start(order.nofork);
    ASKING.store(true, Ordering::Release);
    true
}

/// The size of a page; 0 where there is no pool.
pub(super) fn page() -> usize {
    PAGE.load(Ordering::Relaxed)
}

/// Whether the page at `address` is there.
pub(super) fn is_there(address: usize) -> bool {
    let source = SOURCES.get().get(index(address));
    source.is_some_and(|source| source.load(Ordering::Relaxed) != NOWHERE)
}

/// The pages that are there, of a pool at `base`.
pub(super) fn there(base: usize) -> impl Iterator<Item = usize> {
    let all = sources().iter().enumerate();
    all.filter(|(_, source)| source.load(Ordering::Relaxed) != NOWHERE)
        .map(move |(at, _)| base + at * page())
}

/// What there is beyond the pool's size, and is to go back as soon as it is free.
pub(super) fn surplus() -> usize {
    HELD.load(Ordering::Relaxed)
        .saturating_sub(SIZE.load(Ordering::Relaxed))
}

/// Maps the pool's pages at `address`: zeroed and resident. Whole pages, none of which is there already.
///
/// # Errors
/// `EEXIST` where something is mapped there; `ENOMEM` where the pool, or its sources, have not enough.
/// Nothing has changed then.
pub(super) fn bring(address: usize, length: usize) -> Result<()> {
    // A filter that the program installed may not let us read files, or populate.
    if sandbox::is_entered_later() || !sandbox::allows_advice() {
        note(reason::CONFINED);
        return Err(Errno::NOMEM);
    }
    let most = MOST.load(Ordering::Relaxed);
    let held = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
        held.checked_add(length).filter(|held| *held <= most)
    });
    if held.is_err() {
        note(if length > most {
            reason::LARGER
        } else {
            reason::FULL
        });
        return Err(Errno::NOMEM);
    }
    settle::keep_spares();
    let brought = warm::in_parallel(address, length, page());
    if brought.is_err() {
        // Pieces of it may be there; what is in the way of the others is not ours.
        let page = page();
        for piece in (address..address + length).step_by(page) {
            if is_there(piece) && memory::unmap(piece, page).is_ok() {
                forget(piece, page);
            }
        }
        HELD.fetch_sub(length, Ordering::Relaxed);
    }
    brought
}

/// Gives pages back to where they came from.
///
/// # Errors
/// munmap(2)'s, where nothing was given.
pub(super) fn give(address: usize, length: usize) -> Result<()> {
    memory::unmap(address, length)?;
    forget(address, length);
    HELD.fetch_sub(length, Ordering::Relaxed);
    Ok(())
}

/// MADV_DONTNEED and MADV_FREE of a range with hugetlb pages in it: zeroes it, and true. The kernel would refuse a
/// part of such a page; and a whole one it would give to whoever comes first, so that the next touch could
/// be SIGBUS.
pub(super) fn discard(address: usize, length: usize) -> bool {
    let (page, offset) = (page(), address.wrapping_sub(BASE.load(Ordering::Relaxed)));
    let is_within = offset < SPAN && (1..=SPAN - offset).contains(&length);
    if page == 0 || !is_within || !address.is_multiple_of(BASE_PAGE) {
        return false;
    }
    let length = length.next_multiple_of(BASE_PAGE);
    let pages = offset / page..=(offset + length - 1) / page;
    let sources = SOURCES.get().get(pages).unwrap_or_default();
    let has = |wanted: u8| {
        let mut sources = sources.iter();
        sources.any(|source| source.load(Ordering::Relaxed) == wanted)
    };
    if has(NOWHERE) || !has(HUGETLB) {
        return false;
    }
    memory::zero(address, length);
    true
}

/// Maps pages from whatever source has them. All or nothing.
pub(super) fn fill(address: usize, length: usize) -> Result<()> {
    let taken = take_hugetlb(address, length)?;
    let rest = length - taken;
    if rest > 0
        && let Err(errno) = take_thp(address + taken, rest)
    {
        if taken > 0 && memory::unmap(address, taken).is_ok() {
            forget(address, taken);
        }
        return Err(errno);
    }
    Ok(())
}

/// As many hugetlb pages as there are for the start of a range, in few mappings; gives their length.
fn take_hugetlb(address: usize, length: usize) -> Result<usize> {
    let refused = BACKING_OFF.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        left.checked_sub(1)
    });
    if !ASKING.load(Ordering::Acquire) || refused.is_ok() {
        return Ok(0);
    }
    if !settle::could_move(length) {
        note(reason::UNMOVABLE);
        BACKING_OFF.store(BACK_OFF, Ordering::Relaxed);
        return Ok(0);
    }
    let page = page();
    let (mut taken, mut ask) = (0, length);
    while taken < length {
        let part = ask.min(length - taken);
        match memory::map_hugetlb(address + taken, part, page) {
            Ok(()) => {
                record(address + taken, part, HUGETLB);
                taken += part;
            }
            // In the way at the start: the caller goes round. Later on the rest finds out.
            Err(memory::NoHugetlb::InTheWay) if taken == 0 => return Err(Errno::EXIST),
            Err(memory::NoHugetlb::InTheWay) => break,
            Err(why) if part <= page => {
                note(match why {
                    memory::NoHugetlb::NoSize => reason::NO_SIZE,
                    memory::NoHugetlb::Limit => reason::HUGETLB_LIMIT,
                    _ => reason::NONE_FREE,
                });
                BACKING_OFF.store(BACK_OFF, Ordering::Relaxed);
                break;
            }
            Err(_) => ask = (part / 2).next_multiple_of(page),
        }
    }
    Ok(taken)
}

fn take_thp(address: usize, length: usize) -> Result<()> {
    if page() > PMD.load(Ordering::Relaxed) {
        return Err(Errno::NOMEM);
    }
    loop {
        // Of a pool that is being warmed several threads ask for room at the same time.
        let others = TOUCHING.fetch_add(length, Ordering::Relaxed);
        let taken = has_room(others + length).then(|| touch(address, length));
        TOUCHING.fetch_sub(length, Ordering::Relaxed);
        match taken {
            Some(taken) => return taken,
            None if others == 0 => {
                note(reason::NO_ROOM);
                return Err(Errno::NOMEM);
            }
            // What the others touch counts twice until they are done.
            None => pause(),
        }
    }
}

/// A millisecond.
fn pause() {
    let time = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let _ = rustix::thread::nanosleep(&time);
}

fn touch(address: usize, length: usize) -> Result<()> {
    memory::map(address, length)?;
    if make_huge(address, length) {
        record(address, length, THP);
        return Ok(());
    }
    note(reason::FRAGMENTED);
    // A refusal to unmap (too many mappings) leaves advised memory that nobody uses.
    let _ = memory::unmap(address, length);
    Err(Errno::NOMEM)
}

/// Makes fresh anonymous memory resident in huge pages. Where a fault brings none, the collapse does.
fn make_huge(address: usize, length: usize) -> bool {
    let pmd = PMD.load(Ordering::Relaxed);
    // Where the advice is refused (no THP in this kernel) the collapse will be, too.
    let _ = memory::advise(address, length);
    let touched = (address..address + length)
        .step_by(pmd)
        .all(|chunk| memory::populate_one(chunk).is_ok());
    touched && memory::collapse(address, length)
}

/// Whether so much can be touched without harm to anybody.
fn has_room(length: usize) -> bool {
    let credit = CREDIT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
        credit.checked_sub(length)
    });
    if credit.is_ok() {
        return true;
    }
    let room = headroom::headroom(Enough::for_touching(length.saturating_add(LEFT)));
    let Some(room) = room.and_then(|room| room.least().checked_sub(LEFT)) else {
        return false;
    };
    let Some(more) = room.checked_sub(length) else {
        return false;
    };
    CREDIT.store((more / 4).min(TRUSTED), Ordering::Relaxed);
    true
}

/// In the child of a fork, which has one thread and may never fork: it may ask for hugetlb pages of its own,
/// unless it shares some with its parent.
pub(super) fn forked() {
    let shares = count(HUGETLB) > 0;
    settle::forked();
    ASKING.store(page() != 0 && !shares, Ordering::Release);
}

fn record(address: usize, length: usize, source: u8) {
    let first = index(address);
    let last = first + length / page();
    for entry in SOURCES.get().get(first..last).into_iter().flatten() {
        entry.store(source, Ordering::Relaxed);
    }
    REACHED.fetch_max(last, Ordering::Relaxed);
    let slot = stats::slot();
    let (now, peak) = match source {
        HUGETLB => (&slot.pool_hugetlb, &slot.pool_hugetlb_peak),
        _ => (&slot.pool_thp, &slot.pool_thp_peak),
    };
    let length = length as u64;
    peak.fetch_max(
        now.fetch_add(length, Ordering::Relaxed) + length,
        Ordering::Relaxed,
    );
}

fn forget(address: usize, length: usize) {
    let first = index(address);
    let slot = stats::slot();
    let page = page();
    for entry in SOURCES
        .get()
        .get(first..first + length / page)
        .into_iter()
        .flatten()
    {
        let now = match entry.swap(NOWHERE, Ordering::Relaxed) {
            HUGETLB => &slot.pool_hugetlb,
            THP => &slot.pool_thp,
            _ => continue,
        };
        now.fetch_sub(page as u64, Ordering::Relaxed);
    }
}

/// Counts what is there into a slot that knows nothing of it: of a forked child, or when the ledger is joined.
pub(super) fn recount() {
    let slot = stats::slot();
    for (now, peak, source) in [
        (&slot.pool_hugetlb, &slot.pool_hugetlb_peak, HUGETLB),
        (&slot.pool_thp, &slot.pool_thp_peak, THP),
    ] {
        let bytes = count(source) as u64;
        now.store(bytes, Ordering::Relaxed);
        peak.fetch_max(bytes, Ordering::Relaxed);
    }
    slot.pool_reasons
        .store(REASONS.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// How many bytes there are from a source.
fn count(wanted: u8) -> usize {
    let there = sources()
        .iter()
        .filter(|source| source.load(Ordering::Relaxed) == wanted);
    there.count() * page()
}

/// The entries that may say something.
fn sources() -> &'static [AtomicU8] {
    let sources = SOURCES.get();
    let reached = REACHED.load(Ordering::Relaxed).min(sources.len());
    &sources[..reached]
}

fn index(address: usize) -> usize {
    (address - BASE.load(Ordering::Relaxed)) / page()
}

/// Why a page was not what it could have been.
fn note(reason: u32) {
    let all = REASONS.fetch_or(reason, Ordering::Relaxed) | reason;
    stats::slot().pool_reasons.store(all, Ordering::Relaxed);
}
