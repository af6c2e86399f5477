//! Hugetlb pages that move to THPs, because a fork is about to be made: [`PageSupply::evacuate`].
//!
//! After a fork, parent and child share private hugetlb pages copy-on-write, and a copy needs a page of the
//! kernel's pool. Where there is none, the kernel takes the page from the child, which then dies of SIGBUS. So
//! there are no hugetlb pages where a fork can happen: what they hold moves to THPs before a fork, and
//! before the first further thread is made, because it can only move while no thread writes to it; and before a
//! seccomp filter or a new root, behind which nothing could be asked any more. From then on the process takes THPs
//! is_alone; its children begin anew. And none are taken where the move could be refused later
//! ([`PageSupply::could_move`]). docs/design/heap.md says what was rejected.

use core::sync::atomic::{AtomicBool, Ordering};

use super::{
    BASE_PAGE, HUGETLB, MIN_ROOM_BYTES, PageSupply, SPAN_BYTES, THP, memory, reason, source_of,
};
use crate::headroom::{self, Needed};
use crate::ledger::{Slot, stats};
use crate::pool::Credit;
use crate::sys::{self, Blocked};
use crate::{proc, sandbox};

/// Mappings that hold nothing, to be given up for those that a move makes, where the program has used up
/// vm.max_map_count. mremap(2) wants six more than it makes.
const SPARE_MAPPINGS: usize = 16;

/// What hugetlb pages are moved before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// A fork, of a process that has one thread.
    Fork,
    /// The first further thread.
    Thread,
    /// A seccomp filter, or a new root.
    Confinement,
}

/// What [`PageSupply::evacuate`] has to know.
#[derive(Debug)]
pub(super) struct Moves {
    /// The program has made a thread, through the C library. Never unset: when the last one of them is gone is not
    /// known.
    threaded: AtomicBool,
    /// The program promised not to fork while it has threads.
    nofork: AtomicBool,
    /// What is trusted to have room, of hugetlb pages that could still be moved to THPs.
    credit: Credit,
    /// There are [`SPARE_MAPPINGS`].
    spared: AtomicBool,
}

impl Moves {
    pub(super) const fn new() -> Self {
        Self {
            threaded: AtomicBool::new(false),
            nofork: AtomicBool::new(false),
            credit: Credit::new(),
            spared: AtomicBool::new(false),
        }
    }

    pub(super) fn start(&self, nofork: bool) {
        self.nofork.store(nofork, Ordering::Relaxed);
    }

    /// In the child of a fork, which has one thread.
    pub(super) fn forked(&self) {
        self.threaded.store(false, Ordering::Relaxed);
    }
}

impl PageSupply {
    /// Whether so many more bytes of hugetlb pages could be moved to THPs, all others included, or will not have to be. Not so in a memory cgroup
    /// with a limit, however much room it has now: hugetlb pages are not charged to it, and the program may use
    /// up what there is before it forks. What other threads are just about to map is not counted yet.
    pub(super) fn could_move(&self, length: usize) -> bool {
        if self.moves.nofork.load(Ordering::Relaxed) {
            return true;
        }
        if !self.moves.spared.load(Ordering::Relaxed) {
            return false;
        }
        self.moves.credit.spend(length, || {
            let room = headroom::headroom(Needed::for_touching(0));
            let room = room.filter(headroom::Headroom::has_no_group_limit)?.min();
            room.checked_sub(MIN_ROOM_BYTES + self.count(HUGETLB) + length)
        })
    }

    /// Takes [`SPARE_MAPPINGS`], and address space for a page that moves (`ulimit -v`). The caller holds the locks of those who bring.
    pub(super) fn keep_spares(&self) {
        if !self.uses_hugetlb.load(Ordering::Acquire) || self.moves.spared.load(Ordering::Relaxed) {
            return;
        }
        let reserve = |(at, length): &(usize, usize)| sys::reserve(*at, *length).is_ok();
        let made = self.spares().take_while(reserve).count();
        if made < SPARE_MAPPINGS {
            self.give_spares(made);
        }
        self.moves
            .spared
            .store(made == SPARE_MAPPINGS, Ordering::Relaxed);
    }

    /// Gives up the first so many, which were reserved.
    fn give_spares(&self, count: usize) {
        self.moves.spared.store(false, Ordering::Relaxed);
        for (at, length) in self.spares().take(count) {
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: `keep_spares` reserved them, and they hold nothing.
            let _ = unsafe { memory::unmap(at, length) };
        }
    }

    /// Address and length of each: [`PageSupply::scratch`], and base pages before the pool's own addresses, apart from each
    /// other, so that each is a mapping of its own.
    fn spares(&self) -> impl Iterator<Item = (usize, usize)> {
        let base = self.base.load(Ordering::Relaxed);
        let small = (1..SPARE_MAPPINGS).map(move |at| (base - 2 * at * BASE_PAGE, BASE_PAGE));
        core::iter::once((self.scratch(), self.page())).chain(small)
    }

    /// Where content is copied to before it takes a place in the pool: behind the pool's own addresses, and as well
    /// aligned.
    fn scratch(&self) -> usize {
        self.base.load(Ordering::Relaxed) + SPAN_BYTES
    }

    /// Whether [`PageSupply::evacuate`] would move anything: then threads of ours have to be gone before.
    pub(in crate::heap) fn will_move(&self, before: Before) -> bool {
        self.may_evacuate(before) && stats::slot().pool_hugetlb.load(Ordering::Relaxed) > 0
    }

    /// Whether hugetlb pages are asked for, and what is about to be done would end that.
    pub(in crate::heap) fn may_evacuate(&self, before: Before) -> bool {
        let keeps = before == Before::Thread && self.moves.nofork.load(Ordering::Relaxed);
        self.uses_hugetlb.load(Ordering::Acquire) && !keeps
    }

    /// The program is about to make a thread.
    pub(in crate::heap) fn about_to_thread(&self) {
        if self.uses_hugetlb.load(Ordering::Relaxed) {
            self.moves.threaded.store(true, Ordering::Relaxed);
        }
    }

    /// Moves what hugetlb pages hold to THPs, and takes no more of them. The caller holds the locks of those who bring and give.
    ///
    /// What cannot be moved (no room, or another thread that could write to it) stays, and is counted.
    pub fn evacuate(&self, before: Before) {
        if !self.may_evacuate(before) {
            return;
        }
        // Another thread would write to the pages while they move. Where the program kept its promise there is
        // none, but for one made by a bare clone(2).
        let is_alone = self.is_alone(before);
        if !is_alone && self.moves.nofork.load(Ordering::Relaxed) {
            return;
        }
        self.uses_hugetlb.store(false, Ordering::Release);
        if self.moves.spared.load(Ordering::Relaxed) {
            self.give_spares(SPARE_MAPPINGS);
        }
        let blocked = Blocked::all();
        let (base, page) = (self.base.load(Ordering::Relaxed), self.page());
        let sources = self.entries();
        let is_hugetlb = |at: usize| {
            let source = sources.get(at);
            source.is_some_and(|source| source_of(source) == HUGETLB)
        };
        let mut at = 0;
        while at < sources.len() {
            let pages = (at..).take_while(|at| is_hugetlb(*at)).count();
            if pages > 0 {
                self.move_pages(base + at * page, pages * page, is_alone);
            }
            at += pages.max(1);
        }
        drop(blocked);
        self.add_reason(match before {
            Before::Fork => reason::FORK,
            Before::Thread => reason::THREADS,
            Before::Confinement => reason::CONFINED,
        });
    }

    /// Moves as many pages of a range at a time as there is room for. All of it is best: then there are no more mappings
    /// than before.
    fn move_pages(&self, address: usize, length: usize, is_alone: bool) {
        let moved = if is_alone {
            self.move_range(address, length)
        } else {
            Err(reason::STUCK_THREADS)
        };
        let page = self.page();
        match moved {
            Ok(()) => {
                self.forget(address, length);
                self.record(address, length, THP);
                Slot::add(&stats::slot().pool_moved, length as u64);
            }
            Err(_) if is_alone && length > page => {
                let first = (length / 2).next_multiple_of(page);
                self.move_pages(address, first, is_alone);
                self.move_pages(address + first, length - first, is_alone);
            }
            Err(why) => {
                self.add_reason(why);
                Slot::add(&stats::slot().pool_stuck, length as u64);
            }
        }
    }

    /// Puts anonymous memory with the same content in the place of hugetlb pages. Else says why not.
    fn move_range(&self, address: usize, length: usize) -> core::result::Result<(), u32> {
        let scratch = self.scratch();
        // A touch at a cgroup's limit kills a process. Where the limit is not known there was none when the
        // pages were taken. Under a filter no call is made that the program does not make.
        let room = headroom::headroom(Needed::for_touching(length));
        let room = room.is_none_or(|room| room.min() >= length);
        if sandbox::is_entered_later() || !room {
            return Err(reason::STUCK_ROOM);
        }
        memory::map(scratch, length).map_err(|_| reason::STUCK_MAPPINGS)?;
        // Whether it is huge is second to its being safe.
        let _ = self.make_huge(scratch, length);
        let populated =
            memory::populate(scratch, length, self.page()).map_err(|_| reason::STUCK_ROOM);
        #[expect(unsafe_code, reason = "moves what memory holds")]
        // SAFETY: the pages at `address` are the pool's, and no other thread writes to them meanwhile; what is at `scratch`
        // was mapped above, and takes their place with the same content.
        unsafe {
            let moved = populated.and_then(|()| {
                memory::copy(address, scratch, length);
                sys::move_mapping(scratch, address, length).map_err(|_| reason::STUCK_MAPPINGS)
            });
            if moved.is_err() {
                let _ = memory::unmap(scratch, length);
            }
            moved
        }
    }

    /// Whether no other thread could write to the pages.
    fn is_alone(&self, before: Before) -> bool {
        // Where we may not look (a filter that the program installed), or cannot, by what the C library made. The
        // thread that is about to be made is the first: another one would have had them moved.
        let made = before != Before::Thread && self.moves.threaded.load(Ordering::Relaxed);
        let seen = (!sandbox::is_entered_later()).then(proc::is_alone);
        seen.flatten().unwrap_or(!made)
    }
}
