//! Where a range goes when it is unmapped: [`Staging`].
//!
//! The range is moved, page tables and all, to addresses of ours. From then on the old ones fault and can
//! be mapped again by any thread, as munmap(2) has it, while the memory is given back with several threads, or
//! later. Nothing is destroyed before the kernel has accepted the move; where it refuses, the range is as it
//! was, and the caller has the kernel unmap it, with the kernel's own answer. Of several mappings, which advice makes of one,
//! each is moved by itself. Once one has moved there is no way back, since another thread may have mapped what was left;
//! the kernel does not refuse to unmap the rest, which are whole mappings.
//!
//! Old and new address are alike modulo 1 GiB, so that whole page tables change hands: 0.1 ms for 8 GiB.
//! The addresses are between 52 and 64 TiB, where the kernel places nothing by itself and no sanitizer keeps
//! its shadow; each range is reserved before it is used, so that a mapping of the program's is never
//! replaced.
//!
//! Invariant: while this lock is free, each range here that holds memory is kept out of the children of forks.

use core::ops::Range;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::memory;
use crate::sync::Lock;
use crate::sys::{self, Maps, Pagemap};

const BASE: usize = 0x3400_0000_0000;
const END: usize = 0x4000_0000_0000;
/// What one page table of the second highest level maps, with 4 KiB pages.
pub(super) const ALIKE: usize = 1 << 30;
/// How many places are tried.
const TRIES: usize = 4;
/// How many pages of a range are looked at.
const SAMPLES: usize = 8;
/// Spread, since a range is often huge up to some address, and not from there on.
const ORDER: [usize; SAMPLES] = [0, 4, 7, 2, 6, 1, 5, 3];
/// If so many, the first ones, are in huge pages, so are most.
const ENOUGH: usize = 3;
/// Where it cannot be seen how a range is mapped, and it may be huge, the ones from this size on are taken to be on base
/// pages.
const UNSEEN: usize = 1 << 30;

/// The next place, and the lock that keeps forks away from what is half done.
#[derive(Debug)]
pub(super) struct Staging {
    next: usize,
}

crate::one_page! {
    pub(super) static STAGING: Lock<Staging> = Lock::new(Staging { next: BASE });
}

/// The mappings of a range that are all private and have no file behind them: no driver's, and no hugetlb pages.
#[derive(Debug)]
pub(super) struct Plain {
    ends: [usize; MAX_MAPPINGS],
    count: usize,
}

/// The reason why the mappings of a range are not known to be plain.
#[derive(Clone, Copy, Debug)]
pub(super) enum NotPlain {
    /// Some are not, or there are too many of them.
    Other,
    /// A kernel older than 6.11 cannot say, but neither end of the range is a driver's or of hugetlb pages.
    Unknown,
}

/// The most mappings of a range: to ask for one takes a microsecond.
const MAX_MAPPINGS: usize = 64;

/// The mappings of a range without a hole. If there are several, they are as advice makes them: writable, and not sealed.
pub(super) fn mappings(
    _held: &mut Staging,
    address: usize,
    length: usize,
) -> Result<Plain, NotPlain> {
    let end = address + length;
    // With the lock held, so that no fork(2) copies the descriptor.
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
        // The kernel may refuse to cut the last one, after others have moved.
        let is_cut = is_last && mapping.range.end > end;
        if is_several && (is_cut || !mapping.is_writable || !memory::may_change(at)) {
            return Err(NotPlain::Other);
        }
        if is_last {
            return Ok(Plain {
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

/// True where it pays to free a range with several threads: most of it is there, on base pages, which are
/// to be anonymous or not. Huge-mapped memory is freed by one thread in no time.
pub(super) fn pays(_held: &mut Staging, address: usize, length: usize, anonymous: bool) -> bool {
    let page = rustix::param::page_size();
    // With the lock held, so that no fork(2) copies the descriptor.
    let unseen = length >= UNSEEN || super::unmap::are_pages_small();
    let Ok(pagemap) = Pagemap::open() else {
        return unseen;
    };
    let step = length / SAMPLES;
    let mut base = 0;
    for (sample, place) in ORDER.into_iter().enumerate() {
        let at = (address + place * step + step / 2) & !(page - 1);
        match pagemap.is_base(at, page, anonymous) {
            Ok(true) => base += 1,
            Ok(false) => {}
            Err(Errno::NOTTY) => return unseen,
            Err(_) => return false,
        }
        // Half of them is reached, or cannot be any more, or is not to be expected: each look takes microseconds.
        let left = SAMPLES - 1 - sample;
        if base >= SAMPLES / 2 {
            return true;
        }
        if base + left < SAMPLES / 2 || base == 0 && sample + 1 >= ENOUGH {
            return false;
        }
    }
    false
}

/// Moves a range out of the program's reach, if it pays and the kernel lets it. Gives its new place, which
/// is the caller's to unmap; `Some(None)` where nothing has changed, and `None` where it was not even looked at.
///
/// # Safety
/// The caller may unmap the range.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub(super) unsafe fn take(address: usize, length: usize) -> Option<Option<Range<usize>>> {
    if length > (END - BASE) / 4 {
        return None;
    }
    // In a signal handler that interrupted us here the kernel unmaps it.
    // SAFETY: the caller's promise.
    let take = |staging: &mut Staging| unsafe { staging.take(address, length) };
    STAGING.with(take)
}

/// Whether a staging range may be among those addresses.
pub(super) const fn overlaps(address: usize, length: usize) -> bool {
    address < END && address.saturating_add(length) > BASE
}

impl Staging {
    /// The program will have these addresses: the next ranges are beyond them.
    pub(super) fn avoid(&mut self, address: usize, length: usize) {
        let beyond = address
            .saturating_add(length)
            .checked_next_multiple_of(ALIKE);
        self.next = beyond.filter(|beyond| *beyond < END).unwrap_or(BASE);
    }

    /// # Safety
    /// As for [`take`].
    #[expect(unsafe_code, reason = "takes memory away from under its pointers")]
    unsafe fn take(&mut self, address: usize, length: usize) -> Option<Range<usize>> {
        // First what most ranges fail. A kernel that cannot say moves one mapping or none.
        let suits = pays(self, address, length, true)
            && memory::is_whole_and_unlocked(address, length).is_ok();
        let Plain { ends, count } = match suits.then(|| mappings(self, address, length))? {
            Ok(plain) => plain,
            Err(NotPlain::Unknown) => Plain {
                ends: [address + length; MAX_MAPPINGS],
                count: 1,
            },
            Err(NotPlain::Other) => return None,
        };
        // Until the memory is free, the staging range counts as the range did. Where that is limited, another
        // thread could be refused what it was not refused before.
        let is_limited = |resource| getrlimit(resource).current.is_some();
        if [Resource::As, Resource::Data].into_iter().any(is_limited) {
            return None;
        }
        let place = self.reserve(address % ALIKE, length)?;
        let mut at = address;
        for end in ends.into_iter().take(count) {
            // SAFETY: the caller's promise; the place is a reservation of our own.
            let moved = unsafe { sys::move_mapping(at, place + at - address, end - at) };
            if moved.is_err() && at == address {
                // SAFETY: the place is ours, and nothing has come there.
                let _ = unsafe { memory::unmap(place, length) };
                return None;
            }
            if moved.is_err() {
                // SAFETY: the caller's promise.
                let _ = unsafe { memory::unmap(at, end - at) };
            }
            at = end;
        }
        // SAFETY: only this module knows the place, and in a child nothing of it is freed.
        if unsafe { memory::keep_from_children(place, length) }.is_err() {
            // The children of a fork would keep it: then there is no later.
            // SAFETY: as above.
            let _ = unsafe { memory::unmap(place, length) };
            return Some(place..place);
        }
        Some(place..place + length)
    }

    /// Addresses for `length` bytes, `offset` beyond a multiple of [`ALIKE`].
    fn reserve(&mut self, offset: usize, length: usize) -> Option<usize> {
        for _ in 0..TRIES {
            let mut place = self.next + offset;
            if place + length > END {
                place = BASE + offset;
            }
            self.next = (place + length).next_multiple_of(ALIKE);
            match sys::reserve(place, length) {
                Ok(()) => return Some(place),
                // A mapping of the program's, or a staging range that is not empty yet.
                Err(Errno::EXIST) => {}
                Err(_) => return None,
            }
        }
        None
    }
}
