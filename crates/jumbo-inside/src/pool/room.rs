//! Memory that may be touched: [`Room`], with [`Claim`]s on it; [`Credit`]: validity of a
//! measurement of the headroom.
//!
//! At the limit of a memory cgroup a touch kills. So the headroom is measured first, and claimed
//! memory counts as used until it is resident. Another process of the cgroup may be faster: a touch
//! can still be fatal within one page fault.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::headroom::{self, Needed};
use crate::sandbox;

/// Maximum credit of one measurement.
const MAX_CREDIT_BYTES: usize = 64 << 20;

/// Bytes that may be used without another measurement of the headroom, and above them its number.
/// An overtaken measurement yields no credit: threads may have used the room that it saw.
#[derive(Debug)]
pub(crate) struct Credit(AtomicU64);

/// Bits of the byte count, which never exceeds [`MAX_CREDIT_BYTES`].
const CREDIT_BITS: u32 = 40;
const GENERATION: u64 = 1 << CREDIT_BITS;

impl Credit {
    /// Creates a credit of zero, before any measurement.
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Spends `bytes`, from the credit or after a `measure`; false if that finds no room. `measure`
    /// returns the room beyond these bytes. Earlier spending is visible to it.
    pub(crate) fn spend(&self, bytes: usize, measure: impl FnOnce() -> Option<usize>) -> bool {
        let bytes = bytes as u64;
        let (ordering, failed) = (Ordering::AcqRel, Ordering::Acquire);
        let less = |credit: u64| (credit % GENERATION >= bytes).then(|| credit - bytes);
        if self.0.fetch_update(ordering, failed, less).is_ok() {
            return true;
        }
        let of_this = self.clear();
        let Some(more) = measure() else {
            return false;
        };
        let trusted = of_this + (more / 4).min(MAX_CREDIT_BYTES) as u64;
        let _ = self.0.compare_exchange(of_this, trusted, ordering, failed);
        true
    }

    /// Resets the credit to zero, and returns the number of the next measurement.
    fn clear(&self) -> u64 {
        let next = |credit: u64| {
            (credit / GENERATION)
                .wrapping_add(1)
                .wrapping_mul(GENERATION)
        };
        let cleared = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |credit| {
                Some(next(credit))
            });
        next(cleared.unwrap_or_else(|credit| credit))
    }
}

/// Room of this process, in bytes.
#[derive(Debug)]
pub struct Room {
    /// Memory left to the rest of the process and to others.
    reserve: usize,
    credit: Credit,
    /// Claimed memory, on which no other thread may count.
    touching: AtomicUsize,
}

/// Room in use: no other thread counts on it until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Claim<'a> {
    room: &'a Room,
    bytes: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: the touches are visible before the claim ends.
        self.room.touching.fetch_sub(self.bytes, Ordering::Release);
    }
}

impl Room {
    /// Creates a room that leaves `reserve` bytes to the rest of the process and to others.
    pub const fn new(reserve: usize) -> Self {
        Self {
            reserve,
            credit: Credit::new(),
            touching: AtomicUsize::new(0),
        }
    }

    /// Forces the next claim to measure.
    pub fn remeasure(&self) {
        self.credit.clear();
    }

    /// Claims room for `bytes`; `None` if there is none, or it is unknown.
    pub fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        loop {
            self.touching.fetch_add(bytes, Ordering::Relaxed);
            let claim = Claim { room: self, bytes };
            let mut counted = 0;
            if self.has(bytes, &mut counted) {
                return Some(claim);
            }
            drop(claim);
            if counted <= bytes {
                return None;
            }
            // Memory that others have touched meanwhile counts twice until their claims end.
            pause();
        }
    }

    /// Sets `counted` to the memory of all claims, this one included, if it measures.
    fn has(&self, bytes: usize, counted: &mut usize) -> bool {
        // A filter of the program may forbid reading files.
        !sandbox::is_entered_later()
            && self.credit.spend(bytes, || {
                *counted = self.touching.load(Ordering::Acquire);
                let needed = counted.saturating_add(self.reserve);
                let room = headroom::headroom(Needed::for_touching(needed))?.min();
                room.checked_sub(needed)
            })
    }
}

/// Sleeps for a millisecond.
fn pause() {
    let time = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    let _ = rustix::thread::nanosleep(&time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_yields_a_quarter_of_its_room_as_credit() {
        let credit = Credit::new();
        assert!(credit.spend(10, || Some(400)));
        assert!(credit.spend(99, || None) && credit.spend(1, || None));
        assert!(!credit.spend(1, || None));
    }

    #[test]
    fn an_overtaken_measurement_yields_no_credit() {
        let credit = Credit::new();
        let overtaken = || {
            assert!(credit.spend(10, || Some(0)));
            Some(400)
        };
        assert!(credit.spend(10, overtaken));
        assert!(!credit.spend(1, || None));
    }
}
