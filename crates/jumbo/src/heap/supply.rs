//! The pool's pages (`jumbo run --pool`): [`bring`] maps some, [`give`] gives them back.
//!
//! A page comes from the first source that has it:
//! 1. hugetlb: the kernel's pool, its surplus included. Mapping them reserves them, and they are made
//!    resident with MADV_POPULATE_WRITE at once, so that a cgroup's hugetlb limit is an error here and not a
//!    SIGBUS later.
//! 2. THP: advised anonymous memory, of which one base page is touched, and which is then collapsed, so
//!    that it is huge and not just asked to be. Asked for only while the memory cgroup and the host have
//!    room: at a cgroup's limit a touch kills, while a collapse fails.
//!
//! Where neither has enough nothing changes and the caller takes memory as it would without a pool.
//!
//! **Hugetlb and fork.** After a fork, parent and child share private hugetlb pages copy-on-write, and a
//! copy needs a page of the kernel's pool. Where there is none, the kernel takes the page from the child,
//! which then dies of SIGBUS. So there are no hugetlb pages where a fork can happen: what they hold moves to
//! THPs ([`settle`]) before a fork, and before the first further thread is made, because it can
//! only move while nobody writes to it; and before a seccomp filter or a new root, behind which nothing could be
//! asked any more. From then on the process takes THPs alone; its children begin anew
//! ([`forked`]). And none are taken where the move could be refused later ([`could_move`]). docs/design/heap.md
//! says what was rejected.
//!
//! Invariant: [`SOURCES`] says of each page where it came from, and [`HELD`] is their sum. Whoever
//! brings or gives a range is its only user.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory::Mapped;
use super::{BASE_PAGE, memory, warm};
use crate::kernel::{headroom, sandbox};
use crate::ledger::{Slot, pool_reason as reason, stats};
use crate::policy::PoolOrder;

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
/// The program has made a thread, through the C library. Never unset: when the last one of them is gone is not
/// known.
static THREADED: AtomicBool = AtomicBool::new(false);
/// The program promised not to fork while it has threads.
static NOFORK: AtomicBool = AtomicBool::new(false);
/// Bits of [`reason`], for whatever slot there is.
static REASONS: AtomicU32 = AtomicU32::new(0);
/// After the kernel's pool had nothing, so many takes do not ask it.
static BACKING_OFF: AtomicU32 = AtomicU32::new(0);
const BACK_OFF: u32 = 64;
/// What may still be touched before the headroom is looked at again.
static CREDIT: AtomicUsize = AtomicUsize::new(0);
/// As [`CREDIT`], of hugetlb pages that could still be moved to THPs.
static TWIN_CREDIT: AtomicUsize = AtomicUsize::new(0);
/// There are [`SPARES`].
static SPARED: AtomicBool = AtomicBool::new(false);
/// Mappings that hold nothing, to be given up for those that a move makes, where the program has used up
/// vm.max_map_count. mremap(2) wants six more than it makes.
const SPARES: usize = 16;
/// What is left to others, and how far a look at the headroom is trusted.
const LEFT: usize = 64 << 20;
const TRUSTED: usize = 64 << 20;

/// What hugetlb pages are moved before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    Fork,
    /// The first further thread.
    Thread,
    /// A seccomp filter, or a new root.
    Confinement,
}

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
    NOFORK.store(order.nofork, Ordering::Relaxed);
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
    let most = MOST.load(Ordering::Relaxed);
    let held = HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
        held.checked_add(length).filter(|held| *held <= most)
    });
    if held.is_err() {
        note(reason::FULL);
        return Err(Errno::NOMEM);
    }
    keep_spares();
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
    if !NOFORK.load(Ordering::Relaxed) && !could_move(length) {
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
    if !has_room(length) {
        note(reason::NO_ROOM);
        return Err(Errno::NOMEM);
    }
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
    // A filter that the program installed may not let us read files.
    if sandbox::is_entered_later() {
        return false;
    }
    let credit = CREDIT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
        credit.checked_sub(length)
    });
    if credit.is_ok() {
        return true;
    }
    let Some(room) = headroom::headroom().and_then(|room| room.least().checked_sub(LEFT)) else {
        return false;
    };
    let Some(more) = room.checked_sub(length) else {
        return false;
    };
    CREDIT.store((more / 4).min(TRUSTED), Ordering::Relaxed);
    true
}

/// Whether so many more bytes of hugetlb pages could be moved to THPs, all others included. Not so in a memory cgroup
/// with a limit, however much room it has now: hugetlb pages are not charged to it, and the program may use
/// up what there is before it forks.
fn could_move(length: usize) -> bool {
    if !SPARED.load(Ordering::Relaxed) {
        return false;
    }
    let credit = TWIN_CREDIT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
        credit.checked_sub(length)
    });
    if credit.is_ok() {
        return true;
    }
    let held = count(HUGETLB);
    let room = headroom::headroom().filter(headroom::Room::is_of_no_group);
    let more = room.and_then(|room| room.least().checked_sub(LEFT + held + length));
    more.inspect(|more| TWIN_CREDIT.store((more / 4).min(TRUSTED), Ordering::Relaxed))
        .is_some()
}

/// Takes [`SPARES`], and address space for a page that moves (`ulimit -v`). With the locks of whoever brings.
fn keep_spares() {
    if !ASKING.load(Ordering::Acquire) || SPARED.load(Ordering::Relaxed) {
        return;
    }
    let done = memory::reserve(scratch(), page()).is_ok()
        && (1..SPARES).all(|at| memory::reserve(spare(at), BASE_PAGE).is_ok());
    if !done {
        give_spares();
    }
    SPARED.store(done, Ordering::Relaxed);
}

fn give_spares() {
    SPARED.store(false, Ordering::Relaxed);
    // Refused only where nothing is mapped, which is no matter.
    let _ = memory::unmap(scratch(), page());
    for at in 1..SPARES {
        let _ = memory::unmap(spare(at), BASE_PAGE);
    }
}

/// Where content is copied to before it takes a place in the pool: behind the pool's own addresses, and as well
/// aligned.
fn scratch() -> usize {
    BASE.load(Ordering::Relaxed) + SPAN
}

/// Before the pool's own addresses, and apart from each other, so that each is a mapping of its own.
fn spare(at: usize) -> usize {
    BASE.load(Ordering::Relaxed) - 2 * at * BASE_PAGE
}

/// Whether [`settle`] would move anything: then threads of ours have to be gone before.
pub(super) fn will_move(before: Before) -> bool {
    may_settle(before) && stats::slot().pool_hugetlb.load(Ordering::Relaxed) > 0
}

/// Whether hugetlb pages are asked for, and what is about to be done would end that.
pub(super) fn may_settle(before: Before) -> bool {
    let keeps = before == Before::Thread && NOFORK.load(Ordering::Relaxed);
    ASKING.load(Ordering::Acquire) && !keeps
}

/// The program is about to make a thread.
pub(super) fn about_to_thread() {
    if ASKING.load(Ordering::Relaxed) {
        THREADED.store(true, Ordering::Relaxed);
    }
}

/// Moves what hugetlb pages hold to THPs, and takes no more of them. With the locks of whoever brings and gives.
///
/// What cannot be moved (no room, or another thread that could write to it) stays, and is counted.
pub(super) fn settle(before: Before) {
    if !may_settle(before) {
        return;
    }
    // Another thread would write to the pages while they move. Where the program kept its promise there is
    // none, but for one made by a bare clone(2).
    let alone = is_alone(before);
    if !alone && NOFORK.load(Ordering::Relaxed) {
        return;
    }
    ASKING.store(false, Ordering::Release);
    if SPARED.load(Ordering::Relaxed) {
        give_spares();
    }
    memory::without_signals(|| {
        let (base, page) = (BASE.load(Ordering::Relaxed), page());
        let sources = sources();
        let is_hugetlb = |at: usize| {
            let source = sources.get(at);
            source.is_some_and(|source| source.load(Ordering::Relaxed) == HUGETLB)
        };
        let mut at = 0;
        while at < sources.len() {
            let pages = (at..).take_while(|at| is_hugetlb(*at)).count();
            if pages > 0 {
                move_pages(base + at * page, pages * page, alone);
            }
            at += pages.max(1);
        }
    });
    note(match before {
        Before::Fork => reason::FORK,
        Before::Thread => reason::THREADS,
        Before::Confinement => reason::CONFINED,
    });
}

/// Moves as many pages of a range at a time as there is room for. All of it is best: then there are no more mappings
/// than before.
fn move_pages(address: usize, length: usize, alone: bool) {
    let moved = if alone {
        move_range(address, length)
    } else {
        Err(reason::STUCK_THREADS)
    };
    let page = page();
    match moved {
        Ok(()) => {
            forget(address, length);
            record(address, length, THP);
            Slot::add(&stats::slot().pool_moved, length as u64);
        }
        Err(_) if alone && length > page => {
            let first = (length / 2).next_multiple_of(page);
            move_pages(address, first, alone);
            move_pages(address + first, length - first, alone);
        }
        Err(why) => {
            note(why);
            Slot::add(&stats::slot().pool_stuck, length as u64);
        }
    }
}

/// Whether nobody else could write to the pages.
fn is_alone(before: Before) -> bool {
    // Where we may not look (a filter that the program installed), or cannot, by what the C library made. The
    // thread that is about to be made is the first: another one would have settled.
    let made = before != Before::Thread && THREADED.load(Ordering::Relaxed);
    let seen = (!sandbox::is_entered_later()).then(memory::is_alone);
    seen.flatten().unwrap_or(!made)
}

/// In the child of a fork, which has one thread and may never fork: it may ask for hugetlb pages of its own,
/// unless it shares some with its parent.
pub(super) fn forked() {
    let shares = count(HUGETLB) > 0;
    THREADED.store(false, Ordering::Relaxed);
    ASKING.store(page() != 0 && !shares, Ordering::Release);
}

/// Puts anonymous memory with the same content in the place of hugetlb pages. Else says why not.
fn move_range(address: usize, length: usize) -> std::result::Result<(), u32> {
    let scratch = scratch();
    // A touch at a cgroup's limit kills somebody. Where the limit is not known there was none when the
    // pages were taken. Under a filter no call is made that the program does not make.
    let room = headroom::headroom().is_none_or(|room| room.least() >= length);
    if sandbox::is_entered_later() || !room {
        return Err(reason::STUCK_ROOM);
    }
    memory::map(scratch, length).map_err(|_| reason::STUCK_MAPPINGS)?;
    // Whether it is huge is second to its being safe.
    let _ = make_huge(scratch, length);
    let moved = memory::populate(scratch, length)
        .map_err(|_| reason::STUCK_ROOM)
        .and_then(|()| {
            memory::copy(address, scratch, length);
            memory::relocate(scratch, address, length).map_err(|_| reason::STUCK_MAPPINGS)
        });
    if moved.is_err() {
        let _ = memory::unmap(scratch, length);
    }
    moved
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
