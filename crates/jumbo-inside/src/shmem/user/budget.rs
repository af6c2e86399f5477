//! Checks of the room for memory that the program did not touch: [`Budget`].

use core::sync::atomic::{AtomicUsize, Ordering};

use crate::headroom::has_room;

/// Bytes populated between two checks of the headroom.
const BYTES_PER_CHECK: usize = 64 << 20;

/// Bytes that may be populated before the next check of the headroom.
///
/// In a memory cgroup at its limit a fill does not fail, it triggers the OOM killer. A program that
/// touches little of a large mapping may have no room for all of it. So blocks are populated only
/// while there is room for all that is unpopulated.
#[derive(Debug)]
pub(super) struct Budget(AtomicUsize);

impl Budget {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Reports whether `bytes` of the `remaining` unpopulated ones may be populated.
    pub(super) fn take(&self, bytes: usize, remaining: impl FnOnce() -> usize) -> bool {
        self.take_if(bytes, remaining, has_room)
    }

    fn take_if(
        &self,
        bytes: usize,
        remaining: impl FnOnce() -> usize,
        has_room: impl FnOnce(usize) -> bool,
    ) -> bool {
        let (relaxed, less) = (Ordering::Relaxed, |left: usize| left.checked_sub(bytes));
        if self.0.fetch_update(relaxed, relaxed, less).is_ok() {
            return true;
        }
        let room = has_room(remaining());
        if room {
            self.0.store(BYTES_PER_CHECK.saturating_sub(bytes), relaxed);
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_populated_while_there_is_room_for_the_rest() {
        let (budget, mut checks) = (Budget::new(), 0);
        for _ in 0..2048 {
            let check = |_| {
                checks += 1;
                true
            };
            assert!(budget.take_if(64 << 10, || 1 << 30, check));
        }
        assert_eq!(checks, 2, "one for each 64 MiB");
        assert!(!budget.take_if(64 << 10, || 1 << 30, |remaining| remaining < 1 << 30));
        assert!(budget.take_if(64 << 10, || 1 << 29, |remaining| remaining < 1 << 30));
    }
}
