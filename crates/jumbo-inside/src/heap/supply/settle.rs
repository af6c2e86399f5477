//! Hugetlb pages that move to THPs, because a fork is about to be made: [`settle`].
//!
//! After a fork, parent and child share private hugetlb pages copy-on-write, and a copy needs a page of the
//! kernel's pool. Where there is none, the kernel takes the page from the child, which then dies of SIGBUS. So
//! there are no hugetlb pages where a fork can happen: what they hold moves to THPs ([`settle`]) before a fork, and
//! before the first further thread is made, because it can only move while nobody writes to it; and before a
//! seccomp filter or a new root, behind which nothing could be asked any more. From then on the process takes THPs
//! alone; its children begin anew ([`forked`]). And none are taken where the move could be refused later
//! ([`could_move`]). docs/design/heap.md says what was rejected.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{
    ASKING, BASE, BASE_PAGE, HUGETLB, LEFT, SPAN, THP, TRUSTED, count, forget, make_huge, memory,
    note, page, reason, record, sources,
};
use crate::headroom::{self, Enough};
use crate::ledger::{Slot, stats};
use crate::sandbox;
use crate::sys;

/// The program has made a thread, through the C library. Never unset: when the last one of them is gone is not
/// known.
static THREADED: AtomicBool = AtomicBool::new(false);
/// The program promised not to fork while it has threads.
static NOFORK: AtomicBool = AtomicBool::new(false);
/// As [`super::CREDIT`], of hugetlb pages that could still be moved to THPs.
static TWIN_CREDIT: AtomicUsize = AtomicUsize::new(0);
/// There are [`SPARES`].
static SPARED: AtomicBool = AtomicBool::new(false);
/// Mappings that hold nothing, to be given up for those that a move makes, where the program has used up
/// vm.max_map_count. mremap(2) wants six more than it makes.
const SPARES: usize = 16;

/// What hugetlb pages are moved before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::heap) enum Before {
    Fork,
    /// The first further thread.
    Thread,
    /// A seccomp filter, or a new root.
    Confinement,
}

/// The program promised not to fork while it has threads: `nofork`.
pub(super) fn start(nofork: bool) {
    NOFORK.store(nofork, Ordering::Relaxed);
}

/// Whether so many more bytes of hugetlb pages could be moved to THPs, all others included, or will not have to be. Not so in a memory cgroup
/// with a limit, however much room it has now: hugetlb pages are not charged to it, and the program may use
/// up what there is before it forks.
pub(super) fn could_move(length: usize) -> bool {
    if NOFORK.load(Ordering::Relaxed) {
        return true;
    }
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
    let room = headroom::headroom(Enough::for_touching(0)).filter(headroom::Room::is_of_no_group);
    let more = room.and_then(|room| room.least().checked_sub(LEFT + held + length));
    more.inspect(|more| TWIN_CREDIT.store((more / 4).min(TRUSTED), Ordering::Relaxed))
        .is_some()
}

/// Takes [`SPARES`], and address space for a page that moves (`ulimit -v`). With the locks of whoever brings.
pub(super) fn keep_spares() {
    if !ASKING.load(Ordering::Acquire) || SPARED.load(Ordering::Relaxed) {
        return;
    }
    let done = sys::reserve(scratch(), page()).is_ok()
        && (1..SPARES).all(|at| sys::reserve(spare(at), BASE_PAGE).is_ok());
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
pub(in crate::heap) fn will_move(before: Before) -> bool {
    may_settle(before) && stats::slot().pool_hugetlb.load(Ordering::Relaxed) > 0
}

/// Whether hugetlb pages are asked for, and what is about to be done would end that.
pub(in crate::heap) fn may_settle(before: Before) -> bool {
    let keeps = before == Before::Thread && NOFORK.load(Ordering::Relaxed);
    ASKING.load(Ordering::Acquire) && !keeps
}

/// The program is about to make a thread.
pub(in crate::heap) fn about_to_thread() {
    if ASKING.load(Ordering::Relaxed) {
        THREADED.store(true, Ordering::Relaxed);
    }
}

/// Moves what hugetlb pages hold to THPs, and takes no more of them. With the locks of whoever brings and gives.
///
/// What cannot be moved (no room, or another thread that could write to it) stays, and is counted.
pub(in crate::heap) fn settle(before: Before) {
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

/// Puts anonymous memory with the same content in the place of hugetlb pages. Else says why not.
fn move_range(address: usize, length: usize) -> core::result::Result<(), u32> {
    let scratch = scratch();
    // A touch at a cgroup's limit kills somebody. Where the limit is not known there was none when the
    // pages were taken. Under a filter no call is made that the program does not make.
    let room = headroom::headroom(Enough::for_touching(length));
    let room = room.is_none_or(|room| room.least() >= length);
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

/// Whether nobody else could write to the pages.
fn is_alone(before: Before) -> bool {
    // Where we may not look (a filter that the program installed), or cannot, by what the C library made. The
    // thread that is about to be made is the first: another one would have settled.
    let made = before != Before::Thread && THREADED.load(Ordering::Relaxed);
    let seen = (!sandbox::is_entered_later()).then(memory::is_alone);
    seen.flatten().unwrap_or(!made)
}

/// In the child of a fork, which has one thread.
pub(super) fn forked() {
    THREADED.store(false, Ordering::Relaxed);
}
