//! Address range for memory that is being unmapped: [`StagingArea`].
//!
//! The range moves here with its page tables. Then the old addresses fault and can be mapped again,
//! as after munmap(2), while several threads free the memory, or later. If the kernel refuses the
//! move, the range is unchanged, and the kernel unmaps it for the caller. Advice splits a mapping;
//! each part moves separately. After the first part there is no way back, since another thread may
//! have mapped its addresses. The kernel always unmaps the others, which are whole mappings.
//!
//! Old and new address are equal modulo 1 GiB, so that whole page tables move: 0.1 ms for 8 GiB.
//! The addresses are between 52 and 64 TiB, which the kernel and sanitizers do not use. Each range
//! is reserved first, so that no mapping of the program is replaced.
//!
//! Invariant: while this lock is free, no range here with memory is inherited by a forked child.

use core::ops::Range;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::memory;
use crate::sync::Lock;
use jumbo_sys::{self as sys, Maps, Pagemap};

const START_ADDRESS: usize = 0x3400_0000_0000;
const END_ADDRESS: usize = 0x4000_0000_0000;
/// Alignment of a move: the span of a page table of the second highest level.
pub(super) const ALIGN_BYTES: usize = 1 << 30;
const MAX_ATTEMPTS: usize = 4;
const SAMPLE_COUNT: usize = 8;
/// Sample order: spread out, since a range is often huge up to some address only.
const SAMPLE_ORDER: [usize; SAMPLE_COUNT] = [0, 4, 7, 2, 6, 1, 5, 3];
/// Number of first samples on huge pages that decide for all.
const MIN_HUGE_SAMPLES: usize = 3;
/// Minimum length of a range that counts as base pages where pagemap cannot tell.
const MIN_UNKNOWN_BYTES: usize = 1 << 30;

/// Next place; its lock keeps forks away from incomplete moves.
#[derive(Debug)]
pub(super) struct StagingArea {
    next: usize,
}

crate::one_page! {
    pub(super) static STAGING: Lock<StagingArea> = Lock::new(StagingArea { next: START_ADDRESS });
}

/// Mappings of a range, all private and anonymous: no driver's, no hugetlb pages.
#[derive(Debug)]
pub(super) struct PlainMappings {
    ends: [usize; MAX_MAPPINGS],
    count: usize,
}

/// Reason why the mappings are not known to be plain.
#[derive(Clone, Copy, Debug)]
pub(super) enum NotPlain {
    /// Other mappings, or too many.
    Other,
    /// Kernel before 6.11; but neither end of the range is a driver's or of hugetlb pages.
    Unknown,
}

/// Maximum mappings of a range: each query takes a microsecond.
const MAX_MAPPINGS: usize = 64;

/// Returns the mappings of a range without a hole. Several must be writable and not sealed.
pub(super) fn mappings(
    _held: &mut StagingArea,
    address: usize,
    length: usize,
) -> Result<PlainMappings, NotPlain> {
    let end = address + length;
    // The lock is held, so no fork(2) copies the descriptor.
    let Ok(maps) = Maps::open() else {
        return Err(NotPlain::Other);
    };
    let mut ends = [end; MAX_MAPPINGS];
    let mut at = address;
    for count in 0..MAX_MAPPINGS {
        let mapping = match maps.mapping(at) {
            Ok(mapping) if mapping.is_private_anonymous => mapping,
            Err(Errno::NOTTY) => {
                let page = rustix::param::page_size();
                let are_ordinary = [address, end - page]
                    .iter()
                    .all(|at| memory::is_ordinary(*at, page).is_ok());
                return match are_ordinary {
                    true => Err(NotPlain::Unknown),
                    false => Err(NotPlain::Other),
                };
            }
            _ => return Err(NotPlain::Other),
        };
        let is_last = mapping.range.end >= end;
        let is_several = count > 0 || !is_last;
        // The kernel may refuse to split the last one, after others have moved.
        let is_cut = is_last && mapping.range.end > end;
        if is_several && (is_cut || !mapping.is_writable || !memory::may_change(at)) {
            return Err(NotPlain::Other);
        }
        if is_last {
            return Ok(PlainMappings {
                ends,
                count: count + 1,
            });
        }
        at = mapping.range.end;
        if let Some(end) = ends.get_mut(count) {
            *end = at;
        }
    }
    Err(NotPlain::Other)
}

/// Reports whether several threads free a range faster than one: most of it is resident on base
/// pages. One thread frees huge pages fast enough.
pub(super) fn is_worthwhile(
    _held: &mut StagingArea,
    address: usize,
    length: usize,
    anonymous: bool,
) -> bool {
    let page = rustix::param::page_size();
    // The lock is held, so no fork(2) copies the descriptor.
    let is_base_assumed = length >= MIN_UNKNOWN_BYTES || super::unmap::are_pages_small();
    let Ok(pagemap) = Pagemap::open() else {
        return is_base_assumed;
    };
    let step = length / SAMPLE_COUNT;
    let mut base = 0;
    for (sample, place) in SAMPLE_ORDER.into_iter().enumerate() {
        let at = (address + place * step + step / 2) & !(page - 1);
        match pagemap.is_base(at, page, anonymous) {
            Ok(true) => base += 1,
            Ok(false) => {}
            Err(Errno::NOTTY) => return is_base_assumed,
            Err(_) => return false,
        }
        // Each sample takes microseconds: stop once the majority is certain or likely.
        let left = SAMPLE_COUNT - 1 - sample;
        if base >= SAMPLE_COUNT / 2 {
            return true;
        }
        if base + left < SAMPLE_COUNT / 2 || base == 0 && sample + 1 >= MIN_HUGE_SAMPLES {
            return false;
        }
    }
    false
}

/// Moves a range out of the program's reach, if that is worthwhile and the kernel allows it.
/// Returns the new place; `Some(None)` if nothing has changed, `None` without an examination.
///
/// # Safety
/// The caller may unmap the range.
#[expect(unsafe_code, reason = "unmaps memory that pointers may refer to")]
pub(super) unsafe fn take(address: usize, length: usize) -> Option<Option<Range<usize>>> {
    if length > (END_ADDRESS - START_ADDRESS) / 4 {
        return None;
    }
    // In a signal handler that interrupted this function the kernel unmaps it.
    // SAFETY: the caller's promise.
    let take = |staging: &mut StagingArea| unsafe { staging.take(address, length) };
    STAGING.with(take)
}

/// Reports whether a range overlaps the staging area.
pub(super) const fn overlaps(address: usize, length: usize) -> bool {
    address < END_ADDRESS && address.saturating_add(length) > START_ADDRESS
}

impl StagingArea {
    /// Places the next ranges beyond these addresses, which the program will map.
    pub(super) fn avoid(&mut self, address: usize, length: usize) {
        let beyond = address
            .saturating_add(length)
            .checked_next_multiple_of(ALIGN_BYTES);
        self.next = beyond
            .filter(|beyond| *beyond < END_ADDRESS)
            .unwrap_or(START_ADDRESS);
    }

    /// Moves a range to a new place.
    ///
    /// # Safety
    /// As for [`take`].
    #[expect(unsafe_code, reason = "unmaps memory that pointers may refer to")]
    unsafe fn take(&mut self, address: usize, length: usize) -> Option<Range<usize>> {
        // Cheapest checks first. A kernel that cannot tell moves one mapping or none.
        let suits = is_worthwhile(self, address, length, true)
            && memory::is_whole_and_unlocked(address, length).is_ok();
        let PlainMappings { ends, count } = match suits.then(|| mappings(self, address, length))? {
            Ok(plain) => plain,
            Err(NotPlain::Unknown) => PlainMappings {
                ends: [address + length; MAX_MAPPINGS],
                count: 1,
            },
            Err(NotPlain::Other) => return None,
        };
        // A staging range counts against the limit, and another thread's mmap(2) could fail.
        let is_limited = |resource| getrlimit(resource).current.is_some();
        if [Resource::As, Resource::Data].into_iter().any(is_limited) {
            return None;
        }
        let place = self.reserve(address % ALIGN_BYTES, length)?;
        let mut at = address;
        for end in ends.into_iter().take(count) {
            // SAFETY: the caller's promise; the place is a reservation of this module.
            let moved = unsafe { sys::move_mapping(at, place + at - address, end - at) };
            if moved.is_err() && at == address {
                // SAFETY: the place is reserved, and still empty.
                let _ = unsafe { memory::unmap(place, length) };
                return None;
            }
            if moved.is_err() {
                // SAFETY: the caller's promise.
                let _ = unsafe { memory::unmap(at, end - at) };
            }
            at = end;
        }
        // SAFETY: only this module knows the place, and a child frees nothing of it.
        if unsafe { memory::keep_from_children(place, length) }.is_err() {
            // Forked children would keep it, so free it at once.
            // SAFETY: as above.
            let _ = unsafe { memory::unmap(place, length) };
            return Some(place..place);
        }
        Some(place..place + length)
    }

    /// Reserves `length` bytes at `offset` beyond a multiple of [`ALIGN_BYTES`].
    fn reserve(&mut self, offset: usize, length: usize) -> Option<usize> {
        for _ in 0..MAX_ATTEMPTS {
            let mut place = self.next + offset;
            if place + length > END_ADDRESS {
                place = START_ADDRESS + offset;
            }
            self.next = (place + length).next_multiple_of(ALIGN_BYTES);
            match sys::reserve(place, length) {
                Ok(()) => return Some(place),
                // A mapping of the program, or a staging range in use.
                Err(Errno::EXIST) => {}
                Err(_) => return None,
            }
        }
        None
    }
}
