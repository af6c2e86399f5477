//! Waiting for an event, with a bound: a test never sleeps and hopes.

use std::time::{Duration, Instant};

/// How long something may take that takes a moment; generous, because test machines are slow and
/// shared.
pub(crate) const MOMENT: Duration = Duration::from_mins(2);

/// Asks until there is an answer; panics with `what` when there is none within `bound`.
pub(crate) fn until<T>(what: &str, bound: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(
            start.elapsed() < bound,
            "waited {bound:?} in vain for: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
