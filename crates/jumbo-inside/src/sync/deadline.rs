//! A bound of time for a wait.

use core::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment of CLOCK_MONOTONIC. The C library is not asked: the kernel's vdso answers.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Duration);

impl Deadline {
    /// So long from now.
    pub fn after(time: Duration) -> Self {
        Self(now().saturating_add(time))
    }

    /// How long it is until then; zero when it has passed.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(now())
    }

    /// Whether it has passed.
    pub fn has_passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Whole milliseconds, for a place that only an atomic can be in.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Since the machine started.
pub(crate) fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or(Duration::MAX)
}
