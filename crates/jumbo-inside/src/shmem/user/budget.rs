//! Whether there is room for memory that the program did not touch: [`Budget`].

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::headroom::{Enough, Room, headroom};

/// So much may be brought in between two looks, where there is room for it.
const CHUNK: usize = 64 << 20;
/// So often nothing is brought in before another look, where there was none.
const PAUSE: u32 = 256;

/// What may still be brought in before the next look: in a memory cgroup at its limit a fill does not fail, it has something
/// killed.
#[derive(Debug)]
pub(super) struct Budget {
    left: AtomicUsize,
    pause: AtomicU32,
}

impl Budget {
    pub(super) const fn new() -> Self {
        Self {
            left: AtomicUsize::new(0),
            pause: AtomicU32::new(0),
        }
    }

    /// Takes so much; false: the program gets what it touched, and no more.
    pub(super) fn take(&self, bytes: usize) -> bool {
        self.take_of(bytes, || headroom(Enough::to_hold(CHUNK)))
    }

    fn take_of(&self, bytes: usize, look: impl FnOnce() -> Option<Room>) -> bool {
        let (relaxed, less) = (Ordering::Relaxed, |left: usize| left.checked_sub(bytes));
        if self.left.fetch_update(relaxed, relaxed, less).is_ok() {
            return true;
        }
        let later = |pause: u32| pause.checked_sub(1);
        if self.pause.fetch_update(relaxed, relaxed, later).is_ok() {
            return false;
        }
        let room = look();
        let holds = |pending| room.is_some_and(|room| room.holds(pending));
        if holds(CHUNK) {
            self.left.store(CHUNK.saturating_sub(bytes), relaxed);
            return true;
        }
        if holds(bytes) {
            return true;
        }
        self.pause.store(PAUSE, relaxed);
        false
    }
}
