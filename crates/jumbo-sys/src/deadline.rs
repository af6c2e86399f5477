//! Time limits: [`Deadline`].

use core::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Point in time of CLOCK_MONOTONIC, read through the vDSO without the C library.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Duration);

impl Deadline {
    /// Returns the deadline after `time` from now.
    pub fn after(time: Duration) -> Self {
        Self(now().saturating_add(time))
    }

    /// Returns the remaining time, zero after the deadline.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(now())
    }

    /// Reports whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Converts to whole milliseconds, for atomics.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the CPU time of the calling thread. CLOCK_THREAD_CPUTIME_ID, Linux 2.6.12.
pub fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Returns the time of CLOCK_MONOTONIC.
pub fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or(Duration::MAX)
}
