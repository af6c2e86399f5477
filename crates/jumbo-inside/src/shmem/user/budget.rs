//! Whether there is room for memory that the program did not touch: [`Budget`].

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::headroom::has_room;

/// So much is brought in between two looks.
const CHUNK_BYTES: usize = 64 << 20;

/// What may be brought in before the next look. In a memory cgroup at its limit a fill does not fail, it has something killed; and
/// a program that touches little of a large mapping may have no room for all of it. So blocks come in only where there is
/// room for all that has not come yet.
#[derive(Debug)]
pub(super) struct Budget(AtomicUsize);

impl Budget {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Whether so much may come in, of what has not come yet.
    pub(super) fn take(&self, bytes: usize, remaining: impl FnOnce() -> usize) -> bool {
        self.take_of(bytes, remaining, has_room)
    }

    fn take_of(
        &self,
        bytes: usize,
        remaining: impl FnOnce() -> usize,
        holds: impl FnOnce(usize) -> bool,
    ) -> bool {
        let (relaxed, less) = (Ordering::Relaxed, |left: usize| left.checked_sub(bytes));
        if self.0.fetch_update(relaxed, relaxed, less).is_ok() {
            return true;
        }
        let room = holds(remaining());
        if room {
            self.0.store(CHUNK_BYTES.saturating_sub(bytes), relaxed);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_while_there_is_room_for_the_rest() {
        let (budget, mut looks) = (Budget::new(), 0);
        for _ in 0..2048 {
            let looked = |_| {
                looks += 1;
                true
            };
            assert!(budget.take_of(64 << 10, || 1 << 30, looked));
        }
        assert_eq!(looks, 2, "for each 64 MiB");
        assert!(!budget.take_of(64 << 10, || 1 << 30, |remaining| remaining < 1 << 30));
        assert!(budget.take_of(64 << 10, || 1 << 29, |remaining| remaining < 1 << 30));
    }
}
