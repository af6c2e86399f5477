//! Pause after a refusal: [`BackOff`].

use core::sync::atomic::{AtomicU32, Ordering};

/// Counter of the attempts to skip after a refusal.
#[derive(Debug)]
pub(crate) struct BackOff(AtomicU32);

impl BackOff {
    pub(crate) const SKIPPED_ATTEMPTS: u32 = 64;

    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Reports whether to skip this attempt, and counts it.
    pub(crate) fn holds(&self) -> bool {
        let decrement = |left: u32| left.checked_sub(1);
        let relaxed = Ordering::Relaxed;
        self.0.fetch_update(relaxed, relaxed, decrement).is_ok()
    }

    /// Reports whether attempts are skipped.
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn begin(&self, skipped_attempts: u32) {
        self.0.store(skipped_attempts, Ordering::Relaxed);
    }
}
