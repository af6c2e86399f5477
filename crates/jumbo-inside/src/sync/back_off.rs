//! Not asking again at once for what was refused: [`BackOff`].

use core::sync::atomic::{AtomicU32, Ordering};

/// After a refusal so many times what was refused is not asked for.
#[derive(Debug)]
pub struct BackOff(AtomicU32);

impl BackOff {
    /// How many times.
    pub const TIMES: u32 = 64;

    /// Nothing was refused yet.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Whether this is one of those times.
    pub fn holds(&self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let relaxed = Ordering::Relaxed;
        self.0.fetch_update(relaxed, relaxed, less).is_ok()
    }

    /// It was refused.
    pub fn begin(&self) {
        self.0.store(Self::TIMES, Ordering::Relaxed);
    }
}

impl Default for BackOff {
    fn default() -> Self {
        Self::new()
    }
}
