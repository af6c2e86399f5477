//! Moves hugetlb pages to THPs before a fork: [`PageSupply::evacuate`].
//!
//! After a fork, parent and child share private hugetlb pages copy-on-write, and a copy needs a
//! page of the kernel's pool. Without a free one the child loses its page, and dies of SIGBUS. So
//! the content moves to THPs before a fork. It also moves before the first further thread, which
//! could write to it, and before a seccomp filter or a new root, which could forbid the move.
//!
//! From then on the process takes THPs only; its children start again. Hugetlb pages are not taken
//! where a later move could fail ([`PageSupply::could_move`]). Rejected: see docs/design/heap.md.

use core::sync::atomic::{AtomicBool, Ordering};

use super::{
    BASE_PAGE, HUGETLB, MIN_ROOM_BYTES, PageSupply, SPAN_BYTES, THP, memory, reason, source_of,
};
use crate::headroom::{self, Needed};
use crate::ledger::{Slot, stats};
use crate::pool::Credit;
use crate::sandbox;
use jumbo_sys::{self as sys, Blocked, proc};

/// Empty mappings that are unmapped to make room for those of a move, when the program has reached
/// vm.max_map_count. mremap(2) needs six more than it creates.
const SPARE_MAPPINGS: usize = 16;

/// Events before which hugetlb pages move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// A fork of a process that has one thread.
    Fork,
    /// Creation of the first further thread.
    Thread,
    /// A seccomp filter, or a new root.
    Confinement,
}

/// State of [`PageSupply::evacuate`].
#[derive(Debug)]
pub(super) struct Moves {
    /// The program created a thread, maybe gone by now, through the C library.
    pub(super) threaded: AtomicBool,
    /// The user promised that the program does not fork while it has threads.
    pub(super) nofork: AtomicBool,
    /// Checked room for moving hugetlb pages to THPs.
    credit: Credit,
    /// The [`SPARE_MAPPINGS`] are reserved.
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
}

impl PageSupply {
    /// Reports whether `length` more bytes of hugetlb pages could move to THPs, or never need to.
    /// False in a memory cgroup with a limit: hugetlb pages are not charged to it, so the program
    /// may use up its room before a fork. Pages that other threads map now do not count yet.
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

    /// Reserves [`SPARE_MAPPINGS`] and the scratch addresses (`ulimit -v`). The lock is held.
    pub(super) fn reserve_spares(&self) {
        if !self.uses_hugetlb.load(Ordering::Acquire) || self.moves.spared.load(Ordering::Relaxed) {
            return;
        }
        let reserve = |(at, length): &(usize, usize)| sys::reserve(*at, *length).is_ok();
        let made = self.spares().take_while(reserve).count();
        if made < SPARE_MAPPINGS {
            self.unmap_spares(made);
        }
        self.moves
            .spared
            .store(made == SPARE_MAPPINGS, Ordering::Relaxed);
    }

    /// Unmaps the first `count` spare mappings.
    fn unmap_spares(&self, count: usize) {
        self.moves.spared.store(false, Ordering::Relaxed);
        for (at, length) in self.spares().take(count) {
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: `reserve_spares` reserved them, and they have no content.
            let _ = unsafe { memory::unmap(at, length) };
        }
    }

    /// Returns address and length of each spare mapping: [`PageSupply::scratch`], and base pages
    /// before the pool. Gaps keep each a mapping of its own.
    fn spares(&self) -> impl Iterator<Item = (usize, usize)> {
        let base = self.base.load(Ordering::Relaxed);
        let small = (1..SPARE_MAPPINGS).map(move |at| (base - 2 * at * BASE_PAGE, BASE_PAGE));
        core::iter::once((self.scratch(), self.page())).chain(small)
    }

    /// Returns the address of copies: behind the pool, and as well aligned.
    fn scratch(&self) -> usize {
        self.base.load(Ordering::Relaxed) + SPAN_BYTES
    }

    /// Reports whether [`PageSupply::evacuate`] would move pages. Jumbo's threads must end first.
    pub(in crate::heap) fn will_move(&self, before: Before) -> bool {
        self.may_evacuate(before) && stats::slot().pool_hugetlb.load(Ordering::Relaxed) > 0
    }

    /// Reports whether the process uses hugetlb pages and `before` would end that.
    pub(in crate::heap) fn may_evacuate(&self, before: Before) -> bool {
        let keeps = before == Before::Thread && self.moves.nofork.load(Ordering::Relaxed);
        self.uses_hugetlb.load(Ordering::Acquire) && !keeps
    }

    /// Notes that the program is about to create a thread.
    pub(in crate::heap) fn about_to_thread(&self) {
        if self.uses_hugetlb.load(Ordering::Relaxed) {
            self.moves.threaded.store(true, Ordering::Relaxed);
        }
    }

    /// Moves the content of hugetlb pages to THPs, and takes no more of them. All locks of the pool
    /// are held. Pages that cannot move (no room, another thread) stay and are counted.
    pub fn evacuate(&self, before: Before) {
        if !self.may_evacuate(before) {
            return;
        }
        // Another thread would write to moving pages. If the user's promise holds, only a bare
        // clone(2) has created one.
        let is_alone = self.is_alone(before);
        if !is_alone && self.moves.nofork.load(Ordering::Relaxed) {
            return;
        }
        self.uses_hugetlb.store(false, Ordering::Release);
        if self.moves.spared.load(Ordering::Relaxed) {
            self.unmap_spares(SPARE_MAPPINGS);
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

    /// Moves a range in the largest parts that have room. One part adds no mapping.
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

    /// Replaces hugetlb pages by a copy in anonymous memory, or returns the reason of the failure.
    fn move_range(&self, address: usize, length: usize) -> core::result::Result<(), u32> {
        let scratch = self.scratch();
        // A touch at a cgroup's limit kills a process. An unknown limit was absent when the pages
        // were taken. Under a filter jumbo makes no calls that the program does not make.
        let room = headroom::headroom(Needed::for_touching(length));
        let room = room.is_none_or(|room| room.min() >= length);
        if sandbox::is_entered_later() || !room {
            return Err(reason::STUCK_ROOM);
        }
        memory::map(scratch, length).map_err(|_| reason::STUCK_MAPPINGS)?;
        // The move must succeed even without huge pages.
        let _ = self.make_huge(scratch, length);
        let populated =
            memory::populate(scratch, length, self.page()).map_err(|_| reason::STUCK_ROOM);
        #[expect(unsafe_code, reason = "moves memory content")]
        // SAFETY: the pages at `address` are the pool's, and no other thread writes to them
        // meanwhile. `scratch` was mapped above, and replaces them with the same content.
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

    /// Reports whether no other thread could write to the pages.
    fn is_alone(&self, before: Before) -> bool {
        // Without /proc (missing, or a filter of the program) the C library's threads count. A
        // thread about to be created is the first: an earlier one would have moved the pages.
        let made = before != Before::Thread && self.moves.threaded.load(Ordering::Relaxed);
        let seen = sys::unfiltered(proc::is_alone);
        seen.flatten().unwrap_or(!made)
    }
}
