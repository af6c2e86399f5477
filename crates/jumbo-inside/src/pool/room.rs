//! What may be touched: [`Room`], and [`Claim`]s on it; and how far a look at the headroom is trusted: [`Credit`].
//!
//! At the limit of a memory cgroup a touch does not fail, it kills. So the headroom is asked for before, and what is being
//! touched counts as used until it is there. Another process of the cgroup may be faster, so this narrows the
//! window in which a touch is fatal to what happens within one page fault; it cannot close it.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::headroom::{self, Needed};
use crate::sandbox;

/// How far one look at the headroom is trusted.
const MAX_CREDIT_BYTES: usize = 64 << 20;

/// What a look at the headroom has left to be used without another one, in bytes; and above those which look that was. A look
/// that another one has overtaken leaves nothing: threads may have used what it saw.
#[derive(Debug)]
pub(crate) struct Credit(AtomicU64);

/// The bits that bytes have: [`MAX_CREDIT_BYTES`] is less.
const CREDIT_BITS: u32 = 40;
const GENERATION: u64 = 1 << CREDIT_BITS;

impl Credit {
    /// None: there was no look yet.
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether so many bytes may be used: by an earlier look, or by `look`, which says how many more than those there are. What
    /// threads use by earlier looks they have announced before `look` is called.
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

    /// Leaves nothing to be used without another look, and gives what stands for that one.
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

/// The room of this process, in bytes.
#[derive(Debug)]
pub struct Room {
    /// What is left to the rest of the process, and to others.
    reserve: usize,
    credit: Credit,
    /// What has room and is being touched: no other thread is to count on that room.
    touching: AtomicUsize,
}

/// Room that is being used: no other thread counts on it until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Claim<'a> {
    room: &'a Room,
    bytes: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Touched before it is no longer counted.
        self.room.touching.fetch_sub(self.bytes, Ordering::Release);
    }
}

impl Room {
    /// Leaves `left` bytes to the rest of the process, and to others.
    pub const fn new(reserve: usize) -> Self {
        Self {
            reserve,
            credit: Credit::new(),
            touching: AtomicUsize::new(0),
        }
    }

    /// Has the next claim look, whatever an earlier look left.
    pub fn look_again(&self) {
        self.credit.clear();
    }

    /// Room for so many bytes; `None` where there is none, or none is known of.
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
            // What others have touched meanwhile counts twice until they are done.
            pause();
        }
    }

    /// `counted` is what a look took to be used: these bytes, and those of threads that are touching theirs.
    fn has(&self, bytes: usize, counted: &mut usize) -> bool {
        // A filter that the program installed may not let us read files.
        !sandbox::is_entered_later()
            && self.credit.spend(bytes, || {
                *counted = self.touching.load(Ordering::Acquire);
                let needed = counted.saturating_add(self.reserve);
                let room = headroom::headroom(Needed::for_touching(needed))?.min();
                room.checked_sub(needed)
            })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_trusted_for_a_quarter_of_what_it_saw() {
        let credit = Credit::new();
        assert!(credit.spend(10, || Some(400)));
        assert!(credit.spend(99, || None) && credit.spend(1, || None));
        assert!(!credit.spend(1, || None));
    }

    #[test]
    fn a_look_that_another_has_overtaken_leaves_nothing() {
        let credit = Credit::new();
        let overtaken = || {
            assert!(credit.spend(10, || Some(0)));
            Some(400)
        };
        assert!(credit.spend(10, overtaken));
        assert!(!credit.spend(1, || None));
    }
}
