//! Waits for events with a timeout; a test never relies on a fixed sleep.

use std::time::{Duration, Instant};

/// Timeout of operations that normally take milliseconds; generous for slow and shared machines.
pub(crate) const TIMEOUT: Duration = Duration::from_mins(2);

/// Polls `ask` until it returns a value; panics with `what` after `timeout`.
pub(crate) fn until<T>(what: &str, timeout: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(
            start.elapsed() < timeout,
            "waited {timeout:?} in vain for: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
