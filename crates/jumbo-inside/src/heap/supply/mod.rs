//! The pool's pages (`jumbo run --pool`): [`PageSupply::map`] maps some, [`PageSupply::unmap`] gives them back.
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
//! The rules are those of [`crate::pool`]: persistent pages up to the pool's size, then surplus up to its overcommit. All
//! processes of a run share one bound ([`crate::ledger::Ledger::pool`]), unless each has its own. What must be so before a
//! process forks is in `evacuate`.
//!
//! Invariant: `sources` says of each page where it came from, and the counts count them. The caller that brings or gives a
//! range is its only user, and holds the lock of the window (or of the allocator) that the range lies in.

mod evacuate;

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory::ZeroedTable;
use super::{BASE_PAGE, memory, warm};
use crate::density::{self, Policy};
use crate::ledger::{pool_reason as reason, stats};
use crate::orders::PoolOrder;
use crate::pool::{Overcommit, PageCounts, Room, make_huge};
use crate::sandbox;
use crate::sync::{BackOff, Lock};

pub use evacuate::Before;

/// Addresses of the pool, for all of its users.
pub const SPAN_BYTES: usize = 512 << 30;
/// One entry a page, which is at least 2 MiB where there are that many.
pub(super) const MAX_PAGES: usize = SPAN_BYTES >> 21;

const ABSENT: u8 = 0;
const HUGETLB: u8 = 1;
const THP: u8 = 2;
/// Beside the source: the page is shared with the parent that mapped it, and charged to that one.
const INHERITED: u8 = 1 << 7;

/// What is left to others.
const MIN_ROOM_BYTES: usize = 64 << 20;

/// The pool of the heap.
pub(super) static SUPPLY: PageSupply = PageSupply::new();

/// A pool's pages at addresses that its user chooses.
#[derive(Debug)]
pub struct PageSupply {
    /// Where each page came from.
    sources: ZeroedTable<AtomicU8>,
    base: AtomicUsize,
    page: AtomicUsize,
    pmd: AtomicUsize,
    /// What may stay, in pages.
    size: AtomicUsize,
    counts: Lock<(PageCounts, Overcommit)>,
    /// Each process has a bound of its own: none is shared through the ledger.
    is_per_process: AtomicBool,
    /// Entries of `sources` beyond that were never written.
    end: AtomicUsize,
    /// Hugetlb pages may be asked for.
    uses_hugetlb: AtomicBool,
    /// Several threads may fill a range: the pool is being made resident.
    parallel: AtomicBool,
    /// Bits of [`reason`], for whatever slot there is.
    reasons: AtomicU32,
    /// After the kernel's pool had nothing, some takes do not ask it.
    back_off: BackOff,
    room: Room,
    moves: evacuate::Moves,
}

impl PageSupply {
    /// None yet.
    #[expect(clippy::new_without_default, reason = "made once, in a static")]
    pub const fn new() -> Self {
        Self {
            sources: ZeroedTable::new(MAX_PAGES),
            base: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            pmd: AtomicUsize::new(0),
            size: AtomicUsize::new(0),
            counts: Lock::new((PageCounts::new(), Overcommit { max: 0, pending: 0 })),
            is_per_process: AtomicBool::new(true),
            end: AtomicUsize::new(0),
            uses_hugetlb: AtomicBool::new(false),
            parallel: AtomicBool::new(false),
            reasons: AtomicU32::new(0),
            back_off: BackOff::new(),
            room: Room::new(MIN_ROOM_BYTES),
            moves: evacuate::Moves::new(),
        }
    }

    /// Sets the pool up, with its addresses from `base` on. Once, while there is one thread. False where there is
    /// no memory for its table.
    pub fn start(&self, order: PoolOrder, pmd: usize, base: usize) -> bool {
        if !self.sources.map() {
            return false;
        }
        let relaxed = Ordering::Relaxed;
        self.base.store(base, relaxed);
        self.page.store(order.page, relaxed);
        self.pmd.store(pmd, relaxed);
        self.size.store(order.size / order.page, relaxed);
        self.is_per_process.store(order.each, relaxed);
        self.counts
            .with(|(_, overcommit)| overcommit.max = (order.overcommit / order.page) as u64);
        self.moves.start(order.nofork);
        self.uses_hugetlb.store(true, Ordering::Release);
        true
    }

    /// The size of a page in bytes; 0 where there is no pool.
    pub fn page(&self) -> usize {
        self.page.load(Ordering::Relaxed)
    }

    /// Whether the page at `address` is there.
    pub(super) fn is_there(&self, address: usize) -> bool {
        let source = self.sources.get().get(self.index(address));
        source.is_some_and(|source| source.load(Ordering::Relaxed) != ABSENT)
    }

    /// Whether these are whole pages of the pool's addresses, and none of them is there.
    fn is_free(&self, address: usize, length: usize) -> bool {
        let page = self.page();
        let whole = address.is_multiple_of(page) && length.is_multiple_of(page);
        let first = address.checked_sub(self.base.load(Ordering::Relaxed));
        let pages = first.filter(|_| whole && page > 0).and_then(|offset| {
            let first = offset / page;
            self.sources.get().get(first..first + length / page)
        });
        let nowhere = |source: &AtomicU8| source.load(Ordering::Relaxed) == ABSENT;
        pages.is_some_and(|pages| pages.iter().all(nowhere))
    }

    /// The pages that are there.
    pub(super) fn there(&self) -> impl Iterator<Item = usize> {
        let (base, page) = (self.base.load(Ordering::Relaxed), self.page());
        let all = self.entries().iter().enumerate();
        all.filter(|(_, source)| source.load(Ordering::Relaxed) != ABSENT)
            .map(move |(at, _)| base + at * page)
    }

    /// What there is, in pages.
    pub fn counts(&self) -> PageCounts {
        self.counts.with(|(counts, _)| *counts).unwrap_or_default()
    }

    /// What there is beyond the pool's size in bytes, and is to go back as soon as it is free: of this process, and of all
    /// that share its bound.
    pub(super) fn surplus(&self) -> usize {
        let counts = self.counts();
        let run = self.run().map_or(0, |ledger| {
            let size = (self.size.load(Ordering::Relaxed) * self.page()) as u64;
            let beyond = ledger.pool.charged().saturating_sub(size);
            usize::try_from(beyond).unwrap_or(usize::MAX)
        });
        let held = usize::try_from(counts.total()).unwrap_or(0) * self.page();
        let own = usize::try_from(counts.surplus()).unwrap_or(0) * self.page();
        own.max(run.min(held))
    }

    /// Maps the pool's pages at `address`: zeroed and resident. Whole pages, none of which is there already.
    ///
    /// # Errors
    /// `EINVAL` where that is not so; `EEXIST` where something is mapped there; `ENOMEM` where the pool, or its sources, have
    /// not enough. Nothing has changed then.
    pub fn map(&self, address: usize, length: usize) -> Result<()> {
        if !self.is_free(address, length) {
            return Err(Errno::INVAL);
        }
        // A filter that the program installed may not let us read files, or populate.
        if sandbox::is_entered_later() || !sandbox::allows_advice() {
            self.add_reason(reason::CONFINED);
            return Err(Errno::NOMEM);
        }
        let pages = (length / self.page()) as u64;
        if !self.admit(pages) {
            let (size, page) = (self.size.load(Ordering::Relaxed) as u64, self.page() as u64);
            let max = self.counts.with(|(_, overcommit)| size + overcommit.max);
            self.add_reason(if max.is_some_and(|max| length as u64 > max * page) {
                reason::LARGER
            } else {
                reason::FULL
            });
            return Err(Errno::NOMEM);
        }
        if !self.charge(length) {
            self.leave(pages);
            self.add_reason(reason::FULL);
            return Err(Errno::NOMEM);
        }
        self.keep_spares();
        let mapped = if self.parallel.load(Ordering::Relaxed) {
            let fill = |at, length| self.fill(at, length);
            warm::in_parallel(&fill, self.page(), (address, length))
        } else {
            self.fill(address, length)
        };
        if mapped.is_err() {
            // Pieces of it may be there; what is in the way of the others is not ours.
            let page = self.page();
            for piece in (address..address + length).step_by(page) {
                #[expect(unsafe_code, reason = "unmaps memory")]
                // SAFETY: none of the range was there before, so this call mapped the piece.
                let unmap = || unsafe { memory::unmap(piece, page) };
                if self.is_there(piece) && unmap().is_ok() {
                    self.forget(piece, page);
                }
            }
            self.leave(pages);
            self.uncharge(length);
        }
        mapped
    }

    /// Counts pages in that are being asked for: persistent ones up to the pool's size, then surplus. False where so many
    /// may not join.
    fn admit(&self, pages: u64) -> bool {
        let size = self.size.load(Ordering::Relaxed) as u64;
        let admitted = self.counts.with(|(counts, overcommit)| {
            let stay = size.saturating_sub(counts.persistent()).min(pages);
            let admitted = overcommit.admits(counts.surplus(), pages - stay);
            if admitted {
                counts.join(stay);
                counts.join_surplus(pages - stay);
            }
            admitted
        });
        admitted == Some(true)
    }

    fn leave(&self, pages: u64) {
        let _ = self.counts.with(|(counts, _)| counts.leave(pages));
    }

    /// Gives pages back to where they came from.
    ///
    /// # Errors
    /// munmap(2)'s, where nothing was given.
    ///
    /// # Safety
    /// The pages are ones that [`PageSupply::map`] brought, and no code refers to what they hold.
    #[expect(unsafe_code, reason = "unmaps memory")]
    pub unsafe fn unmap(&self, address: usize, length: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { memory::unmap(address, length)? };
        let own = self.forget(address, length);
        self.leave((length / self.page()) as u64);
        self.uncharge(own);
        Ok(())
    }

    /// The ledger whose bound counts, if one does and this process counts in it.
    fn run(&self) -> Option<&'static crate::ledger::Ledger> {
        if self.is_per_process.load(Ordering::Relaxed) {
            return None;
        }
        stats::ledger()
    }

    /// Charges the run with pages of this process; false where it has used its pool up, or knows nothing of this process.
    fn charge(&self, length: usize) -> bool {
        if self.is_per_process.load(Ordering::Relaxed) {
            return true;
        }
        self.run()
            .is_some_and(|ledger| ledger.charge(stats::slot(), length as u64))
    }

    fn uncharge(&self, length: usize) {
        if let Some(ledger) = self.run() {
            ledger.uncharge(stats::slot(), length as u64);
        }
    }

    /// MADV_DONTNEED and MADV_FREE of a range with hugetlb pages in it: zeroes it, and true. The kernel would refuse a
    /// part of such a page; and a whole one it would give to the process that comes first, so that the next touch could
    /// be SIGBUS.
    ///
    /// # Safety
    /// What the range holds is the caller's to lose.
    #[expect(unsafe_code, reason = "drops what memory holds")]
    pub(super) unsafe fn discard(&self, address: usize, length: usize) -> bool {
        let (page, offset) = (
            self.page(),
            address.wrapping_sub(self.base.load(Ordering::Relaxed)),
        );
        let is_within = offset < SPAN_BYTES && (1..=SPAN_BYTES - offset).contains(&length);
        if page == 0 || !is_within || !address.is_multiple_of(BASE_PAGE) {
            return false;
        }
        let length = length.next_multiple_of(BASE_PAGE);
        let pages = offset / page..=(offset + length - 1) / page;
        let sources = self.sources.get().get(pages).unwrap_or_default();
        if sources.iter().any(|source| source_of(source) == ABSENT)
            || !sources.iter().any(|source| source_of(source) == HUGETLB)
        {
            return false;
        }
        // SAFETY: its pages are there, and the caller's promise.
        unsafe { memory::zero(address, length) };
        true
    }

    /// Maps pages from whatever source has them. All or nothing.
    pub(super) fn fill(&self, address: usize, length: usize) -> Result<()> {
        let taken = self.take_hugetlb(address, length)?;
        let rest = length - taken;
        if rest > 0
            && let Err(errno) = self.take_thp(address + taken, rest)
        {
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: `take_hugetlb` has just mapped it, for this call.
            let unmap = || unsafe { memory::unmap(address, taken) };
            if taken > 0 && unmap().is_ok() {
                self.forget(address, taken);
            }
            return Err(errno);
        }
        Ok(())
    }

    /// As many hugetlb pages as there are for the start of a range, in few mappings; gives their length.
    fn take_hugetlb(&self, address: usize, length: usize) -> Result<usize> {
        if self.back_off.holds() || !self.uses_hugetlb.load(Ordering::Acquire) {
            return Ok(0);
        }
        if !self.could_move(length) {
            self.add_reason(reason::UNMOVABLE);
            self.back_off.begin();
            return Ok(0);
        }
        let page = self.page();
        let (mut taken, mut ask) = (0, length);
        while taken < length {
            let part = ask.min(length - taken);
            match memory::map_hugetlb(address + taken, part, page) {
                Ok(()) => {
                    self.record(address + taken, part, HUGETLB);
                    taken += part;
                }
                // In the way at the start: the caller goes round. Later on the rest finds out.
                Err(Errno::EXIST) if taken == 0 => return Err(Errno::EXIST),
                Err(Errno::EXIST) => break,
                Err(errno) if part <= page => {
                    self.add_reason(match errno {
                        Errno::INVAL | Errno::NODEV | Errno::NOSYS => reason::NO_SIZE,
                        Errno::FAULT => reason::HUGETLB_LIMIT,
                        _ => reason::NONE_FREE,
                    });
                    self.back_off.begin();
                    break;
                }
                Err(_) => ask = (part / 2).next_multiple_of(page),
            }
        }
        Ok(taken)
    }

    fn take_thp(&self, address: usize, length: usize) -> Result<()> {
        if self.page() > self.pmd.load(Ordering::Relaxed) {
            return Err(Errno::NOMEM);
        }
        let Some(_claim) = self.room.claim(length) else {
            self.add_reason(reason::NO_ROOM);
            return Err(Errno::NOMEM);
        };
        memory::map(address, length)?;
        if self.make_huge(address, length) {
            self.record(address, length, THP);
            return Ok(());
        }
        self.add_reason(reason::FRAGMENTED);
        #[expect(unsafe_code, reason = "unmaps memory")]
        // SAFETY: mapped above, for this call. A refusal (too many mappings) leaves advised memory without a user.
        let _ = unsafe { memory::unmap(address, length) };
        Err(Errno::NOMEM)
    }

    /// Makes fresh anonymous memory resident in huge pages. Where a fault brings none, the collapse does.
    fn make_huge(&self, address: usize, length: usize) -> bool {
        // Where the advice is refused (no THP in this kernel) the collapse will be, too.
        let _ = density::advise(&(address..address + length), Policy::Pool);
        let pmd = self.pmd.load(Ordering::Relaxed);
        make_huge(address, length, pmd, |address, length| {
            density::collapse(&(address..address + length), Policy::Pool)
        })
        .is_ok()
    }

    /// Has [`PageSupply::map`] use several threads while `work` runs. Only while the process has one.
    pub(super) fn in_parallel(&self, work: impl FnOnce()) {
        self.parallel.store(true, Ordering::Relaxed);
        work();
        self.parallel.store(false, Ordering::Relaxed);
    }

    /// In the child of a fork, which has one thread and may never fork: it may ask for hugetlb pages of its own,
    /// unless it shares some with its parent. What it shares is charged to the parent.
    pub(super) fn forked(&self) {
        if self.page() == 0 {
            return;
        }
        let shares = self.count(HUGETLB) > 0;
        for source in self.entries() {
            if source_of(source) != ABSENT {
                source.fetch_or(INHERITED, Ordering::Relaxed);
            }
        }
        self.moves.forked();
        self.uses_hugetlb.store(!shares, Ordering::Release);
    }

    fn record(&self, address: usize, length: usize, source: u8) {
        let first = self.index(address);
        let last = first + length / self.page();
        for entry in self.sources.get().get(first..last).into_iter().flatten() {
            let inherited = entry.load(Ordering::Relaxed) & INHERITED;
            entry.store(source | inherited, Ordering::Relaxed);
        }
        self.end.fetch_max(last, Ordering::Relaxed);
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

    /// The pages of a range are not there any more. Gives how many bytes of them this process was charged with.
    fn forget(&self, address: usize, length: usize) -> usize {
        let (first, page) = (self.index(address), self.page());
        let slot = stats::slot();
        let mut own = 0;
        let entries = self.sources.get().get(first..first + length / page);
        for entry in entries.into_iter().flatten() {
            let source = entry.swap(ABSENT, Ordering::Relaxed);
            let now = match source & !INHERITED {
                HUGETLB => &slot.pool_hugetlb,
                THP => &slot.pool_thp,
                _ => continue,
            };
            now.fetch_sub(page as u64, Ordering::Relaxed);
            if source & INHERITED == 0 {
                own += page;
            }
        }
        own
    }

    /// Counts what is there into a slot that knows nothing of it: of a forked child, or when the ledger is joined.
    pub(super) fn recount(&self) {
        let slot = stats::slot();
        for (now, peak, source) in [
            (&slot.pool_hugetlb, &slot.pool_hugetlb_peak, HUGETLB),
            (&slot.pool_thp, &slot.pool_thp_peak, THP),
        ] {
            let bytes = self.count(source) as u64;
            now.store(bytes, Ordering::Relaxed);
            peak.fetch_max(bytes, Ordering::Relaxed);
        }
        slot.pool_reasons
            .store(self.reasons.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// How many bytes there are from a source.
    fn count(&self, wanted: u8) -> usize {
        let there = self.entries().iter();
        there.filter(|source| source_of(source) == wanted).count() * self.page()
    }

    /// The entries that may say something.
    fn entries(&self) -> &'static [AtomicU8] {
        let sources = self.sources.get();
        let end = self.end.load(Ordering::Relaxed).min(sources.len());
        &sources[..end]
    }

    fn index(&self, address: usize) -> usize {
        (address - self.base.load(Ordering::Relaxed)) / self.page()
    }

    /// Why a page was not what it could have been.
    fn add_reason(&self, reason: u32) {
        let all = self.reasons.fetch_or(reason, Ordering::Relaxed) | reason;
        stats::slot().pool_reasons.store(all, Ordering::Relaxed);
    }
}

fn source_of(entry: &AtomicU8) -> u8 {
    entry.load(Ordering::Relaxed) & !INHERITED
}
