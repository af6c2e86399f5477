//! Pages of the pool (`jumbo run --pool`): [`PageSupply::map`], [`PageSupply::unmap`].
//!
//! A page comes from the first source that has one:
//! 1. hugetlb: the kernel's pool, with its surplus. The mapping reserves the pages, and
//!    MADV_POPULATE_WRITE makes them resident at once. So a cgroup's hugetlb limit is an error here
//!    instead of a later SIGBUS.
//! 2. THP: advised anonymous memory. One base page is touched, then the range is collapsed, so that
//!    it is certainly huge. Only for PMD-sized pages, and while the memory cgroup and the host have
//!    room: at a cgroup's limit a touch kills, a collapse fails.
//!
//! If neither has enough, nothing changes, and the caller takes memory as without a pool.
//!
//! The rules are those of [`crate::pool`]: persistent pages up to the pool's size, then surplus up
//! to its overcommit. All processes of a run share one bound ([`crate::ledger::Ledger::pool`]),
//! unless each has its own. `evacuate` prepares for a fork.
//!
//! Invariant: `sources` has the source of each page, and `counts` their number. The caller that
//! maps or unmaps a range is its only user, and holds the lock around it.

mod evacuate;

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use rustix::io::{Errno, Result};

use super::memory::ZeroedTable;
use super::{BASE_PAGE, memory, warm};
use crate::density::{self, Policy};
use crate::ledger::{pool_reason as reason, stats};
use crate::orders::PoolOrder;
use crate::pool::{Overcommit, PageCounts, Quota, Room, make_huge};
use crate::sandbox;
use crate::sync::{BackOff, Lock};

pub use evacuate::Before;

/// Address range of the pool, for all of its users.
pub const SPAN_BYTES: usize = 512 << 30;
/// Entries of the table: one per page, of at least 2 MiB.
pub(super) const MAX_PAGES: usize = SPAN_BYTES >> 21;

const ABSENT: u8 = 0;
const HUGETLB: u8 = 1;
const THP: u8 = 2;
/// Flag beside the source: the page is shared with the parent, which mapped it and is charged.
const INHERITED: u8 = 1 << 7;

/// Memory left to others.
const MIN_ROOM_BYTES: usize = 64 << 20;

/// The heap's pool.
pub(super) static SUPPLY: PageSupply = PageSupply::new();

/// Pages of a pool, mapped at addresses that the user chooses.
#[derive(Debug)]
pub struct PageSupply {
    /// Source of each page.
    sources: ZeroedTable<AtomicU8>,
    base: AtomicUsize,
    page: AtomicUsize,
    pmd: AtomicUsize,
    /// Persistent pages at most.
    size: AtomicUsize,
    counts: Lock<(PageCounts, Overcommit)>,
    /// Each process has a bound of its own instead of the ledger's.
    is_per_process: AtomicBool,
    /// End of the entries of `sources` that were ever written.
    end: AtomicUsize,
    /// Hugetlb pages may be taken.
    uses_hugetlb: AtomicBool,
    /// Several threads may fill a range: the pool is being made resident.
    parallel: AtomicBool,
    /// Bits of [`reason`], for the present and later slots.
    reasons: AtomicU32,
    /// Skips some attempts after the kernel's pool had no page.
    back_off: BackOff,
    room: Room,
    moves: evacuate::Moves,
}

impl PageSupply {
    /// Creates a supply without pages.
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

    /// Sets up the pool at `base`, once and single-threaded; false if its table cannot be mapped.
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
        self.moves.nofork.store(order.nofork, relaxed);
        self.uses_hugetlb.store(true, Ordering::Release);
        true
    }

    /// Returns the size of a page in bytes; 0 without a pool.
    pub fn page(&self) -> usize {
        self.page.load(Ordering::Relaxed)
    }

    /// Reports whether the page at `address` is present.
    pub(super) fn is_present(&self, address: usize) -> bool {
        let source = self.sources.get().get(self.index(address));
        source.is_some_and(|source| source.load(Ordering::Relaxed) != ABSENT)
    }

    /// Reports whether the range consists of whole, absent pages of the pool.
    fn is_free(&self, address: usize, length: usize) -> bool {
        let page = self.page();
        let whole = address.is_multiple_of(page) && length.is_multiple_of(page);
        let first = address.checked_sub(self.base.load(Ordering::Relaxed));
        let pages = first.filter(|_| whole && page > 0).and_then(|offset| {
            let first = offset / page;
            self.sources.get().get(first..first + length / page)
        });
        let is_absent = |source: &AtomicU8| source.load(Ordering::Relaxed) == ABSENT;
        pages.is_some_and(|pages| pages.iter().all(is_absent))
    }

    /// Returns the page counts.
    pub fn counts(&self) -> PageCounts {
        self.counts.with(|(counts, _)| *counts).unwrap_or_default()
    }

    /// Returns the bytes beyond the pool's size, of this process or of all that share its bound,
    /// that return to their source as soon as they are free.
    pub(super) fn surplus(&self) -> usize {
        let counts = self.counts();
        let run = self.shared_ledger().map_or(0, |ledger| {
            let size = (self.size.load(Ordering::Relaxed) * self.page()) as u64;
            let beyond = ledger.pool.charged().saturating_sub(size);
            usize::try_from(beyond).unwrap_or(usize::MAX)
        });
        let held = usize::try_from(counts.total()).unwrap_or(0) * self.page();
        let own = usize::try_from(counts.surplus()).unwrap_or(0) * self.page();
        own.max(run.min(held))
    }

    /// Maps pages of the pool at `address`, zeroed and resident.
    ///
    /// # Errors
    /// `EINVAL`: not whole, absent pages; `EEXIST`: something is mapped there; `ENOMEM`: the pool
    /// or its sources have too few pages. Nothing has changed then.
    pub fn map(&self, address: usize, length: usize) -> Result<()> {
        if !self.is_free(address, length) {
            return Err(Errno::INVAL);
        }
        // A filter of the program may forbid reading files or populating.
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
            self.uncount(pages);
            self.add_reason(reason::FULL);
            return Err(Errno::NOMEM);
        }
        self.reserve_spares();
        let mapped = if self.parallel.load(Ordering::Relaxed) {
            let fill = |at, length| self.fill(at, length);
            warm::in_parallel(&fill, self.page(), (address, length))
        } else {
            self.fill(address, length)
        };
        if mapped.is_err() {
            // Parts may be present; mappings in the way of the others are not ours.
            let page = self.page();
            for piece in (address..address + length).step_by(page) {
                #[expect(unsafe_code, reason = "unmaps memory")]
                // SAFETY: no page of the range was present before, so this call mapped it.
                let unmap = || unsafe { memory::unmap(piece, page) };
                if self.is_present(piece) && unmap().is_ok() {
                    self.forget(piece, page);
                }
            }
            self.uncount(pages);
            self.uncharge(length, Quota::revert);
        }
        mapped
    }

    /// Counts new pages, persistent ones before surplus; false if the pool may not have so many.
    fn admit(&self, pages: u64) -> bool {
        let size = self.size.load(Ordering::Relaxed) as u64;
        let admitted = self.counts.with(|(counts, overcommit)| {
            let stay = size.saturating_sub(counts.persistent()).min(pages);
            let admitted = overcommit.admits(counts.surplus(), pages - stay);
            if admitted {
                counts.add_persistent(stay);
                counts.add_surplus(pages - stay);
            }
            admitted
        });
        admitted == Some(true)
    }

    fn uncount(&self, pages: u64) {
        let _ = self.counts.with(|(counts, _)| counts.remove(pages));
    }

    /// Returns pages to their source.
    ///
    /// # Errors
    /// Those of munmap(2), with nothing changed.
    ///
    /// # Safety
    /// [`PageSupply::map`] mapped the pages, and nothing uses their content.
    #[expect(unsafe_code, reason = "unmaps memory")]
    pub unsafe fn unmap(&self, address: usize, length: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { memory::unmap(address, length)? };
        let own = self.forget(address, length);
        self.uncount((length / self.page()) as u64);
        self.uncharge(own, Quota::uncharge);
        Ok(())
    }

    /// Returns the ledger with the shared bound, if this process counts in it.
    fn shared_ledger(&self) -> Option<&'static crate::ledger::Ledger> {
        if self.is_per_process.load(Ordering::Relaxed) {
            return None;
        }
        stats::ledger()
    }

    /// Charges pages to the run; false beyond its bound, or without a slot in the ledger.
    fn charge(&self, length: usize) -> bool {
        if self.is_per_process.load(Ordering::Relaxed) {
            return true;
        }
        self.shared_ledger()
            .is_some_and(|ledger| ledger.charge(stats::slot(), length as u64))
    }

    fn uncharge(&self, length: usize, by: fn(&Quota, u64)) {
        if let Some(ledger) = self.shared_ledger() {
            ledger.uncharge(stats::slot(), length as u64, by);
        }
    }

    /// Handles MADV_DONTNEED and MADV_FREE of a range with hugetlb pages: zeroes it and returns
    /// true. The kernel refuses a part of a hugetlb page. A whole one it would return to its pool,
    /// from which another process may take it, and the next touch could be SIGBUS.
    ///
    /// # Safety
    /// The content of the range is the caller's to lose.
    #[expect(unsafe_code, reason = "discards memory content")]
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
        // SAFETY: its pages are present, and the caller's promise.
        unsafe { memory::zero(address, length) };
        true
    }

    /// Maps pages from any source, all or nothing.
    pub(super) fn fill(&self, address: usize, length: usize) -> Result<()> {
        let taken = self.take_hugetlb(address, length)?;
        let rest = length - taken;
        if rest > 0
            && let Err(errno) = self.take_thp(address + taken, rest)
        {
            #[expect(unsafe_code, reason = "unmaps memory")]
            // SAFETY: `take_hugetlb` mapped it for this call.
            let unmap = || unsafe { memory::unmap(address, taken) };
            if taken > 0 && unmap().is_ok() {
                self.forget(address, taken);
            }
            return Err(errno);
        }
        Ok(())
    }

    /// Maps free hugetlb pages at the start of a range, in few mappings; returns their length.
    fn take_hugetlb(&self, address: usize, length: usize) -> Result<usize> {
        if self.back_off.holds() || !self.uses_hugetlb.load(Ordering::Acquire) {
            return Ok(0);
        }
        if !self.could_move(length) {
            self.add_reason(reason::UNMOVABLE);
            self.back_off.begin(BackOff::SKIPPED_ATTEMPTS);
            return Ok(0);
        }
        let page = self.page();
        let (mut taken, mut request) = (0, length);
        while taken < length {
            let part = request.min(length - taken);
            match memory::map_hugetlb(address + taken, part, page) {
                Ok(()) => {
                    self.record(address + taken, part, HUGETLB);
                    taken += part;
                }
                // At the start: the caller tries other addresses. Later, the rest fails by itself.
                Err(Errno::EXIST) if taken == 0 => return Err(Errno::EXIST),
                Err(Errno::EXIST) => break,
                Err(errno) if part <= page => {
                    self.add_reason(match errno {
                        Errno::INVAL | Errno::NODEV | Errno::NOSYS => reason::NO_SIZE,
                        Errno::FAULT => reason::HUGETLB_LIMIT,
                        _ => reason::NONE_FREE,
                    });
                    self.back_off.begin(BackOff::SKIPPED_ATTEMPTS);
                    break;
                }
                Err(_) => request = (part / 2).next_multiple_of(page),
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
        // SAFETY: mapped above, for this call. After a refusal (too many mappings) it stays unused.
        let _ = unsafe { memory::unmap(address, length) };
        Err(Errno::NOMEM)
    }

    /// Makes fresh anonymous memory resident in huge pages, by fault or by collapse.
    fn make_huge(&self, address: usize, length: usize) -> bool {
        // If the advice is refused (no THP in the kernel), the collapse fails too.
        let _ = density::advise(&(address..address + length), Policy::Pool);
        let pmd = self.pmd.load(Ordering::Relaxed);
        make_huge(address, length, pmd, |address, length| {
            density::collapse(&(address..address + length), Policy::Pool)
        })
        .is_ok()
    }

    /// Lets [`PageSupply::map`] use several threads in `work`, while the process has one.
    pub(super) fn in_parallel(&self, work: impl FnOnce()) {
        self.parallel.store(true, Ordering::Relaxed);
        work();
        self.parallel.store(false, Ordering::Relaxed);
    }

    /// Updates the state in the child of a fork. The child has one thread and may never fork, so it
    /// may take hugetlb pages, unless it shares some with its parent, which is charged for them.
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
        self.moves.threaded.store(false, Ordering::Relaxed);
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

    /// Marks a range as absent; returns the bytes that this process was charged for.
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

    /// Counts the present pages into a new slot: of a forked child, or of a joined ledger.
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

    /// Returns the bytes from a source.
    fn count(&self, wanted: u8) -> usize {
        let there = self.entries().iter();
        there.filter(|source| source_of(source) == wanted).count() * self.page()
    }

    /// Returns the entries that were ever written.
    fn entries(&self) -> &'static [AtomicU8] {
        let sources = self.sources.get();
        let end = self.end.load(Ordering::Relaxed).min(sources.len());
        &sources[..end]
    }

    fn index(&self, address: usize) -> usize {
        (address - self.base.load(Ordering::Relaxed)) / self.page()
    }

    /// Records a reason for missing or smaller pages.
    fn add_reason(&self, reason: u32) {
        let all = self.reasons.fetch_or(reason, Ordering::Relaxed) | reason;
        stats::slot().pool_reasons.store(all, Ordering::Relaxed);
    }
}

fn source_of(entry: &AtomicU8) -> u8 {
    entry.load(Ordering::Relaxed) & !INHERITED
}
