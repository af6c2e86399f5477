//! What may be touched: [`Room`], and [`Claim`]s on it; and how far a look at the headroom is trusted: [`Credit`].
//!
//! At the limit of a memory cgroup a touch does not fail, it kills. So the headroom is asked for before, and what is being
//! touched counts as used until it is there. Another process of the cgroup may be faster, so this narrows the
//! window in which a touch is fatal to what happens within one page fault; it cannot close it.

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::headroom::{self, Enough};
use crate::sandbox;

/// How far one look at the headroom is trusted.
const TRUSTED: usize = 64 << 20;

/// What a look at the headroom has left to be used without another one, in bytes.
#[derive(Debug)]
pub struct Credit(AtomicUsize);

impl Credit {
    /// None: there was no look yet.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Whether so many bytes may be used: by an earlier look, or by `look`, which says how many more than those there are.
    pub fn spend(&self, bytes: usize, look: impl FnOnce() -> Option<usize>) -> bool {
        let (relaxed, less) = (Ordering::Relaxed, |left: usize| left.checked_sub(bytes));
        let trust = |more: &usize| self.0.store((more / 4).min(TRUSTED), relaxed);
        self.0.fetch_update(relaxed, relaxed, less).is_ok() || look().inspect(trust).is_some()
    }
}

impl Default for Credit {
    fn default() -> Self {
        Self::new()
    }
}

/// The room of this process, in bytes.
#[derive(Debug)]
pub struct Room {
    /// What is left to others.
    left: usize,
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
        self.room.touching.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Room {
    /// Leaves `left` bytes to others.
    pub const fn new(left: usize) -> Self {
        Self {
            left,
            credit: Credit::new(),
            touching: AtomicUsize::new(0),
        }
    }

    /// Has the next claim look, whatever an earlier look left.
    pub fn look_again(&self) {
        self.credit.0.store(0, Ordering::Relaxed);
    }

    /// Room for so many bytes; `None` where there is none, or none is known of.
    pub fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        loop {
            let others = self.touching.fetch_add(bytes, Ordering::Relaxed);
            let claim = Claim { room: self, bytes };
            if self.has(others.saturating_add(bytes)) {
                return Some(claim);
            }
            drop(claim);
            if others == 0 {
                return None;
            }
            // What the others have touched meanwhile counts twice until they are done.
            pause();
        }
    }

    fn has(&self, bytes: usize) -> bool {
        // A filter that the program installed may not let us read files.
        !sandbox::is_entered_later()
            && self.credit.spend(bytes, || {
                let enough = Enough::for_touching(bytes.saturating_add(self.left));
                let room = headroom::headroom(enough)?.least();
                room.checked_sub(self.left)?.checked_sub(bytes)
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
