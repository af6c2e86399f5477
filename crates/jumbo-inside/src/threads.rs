//! Whether the program has made a thread, as far as the preload library has seen.

use core::sync::atomic::{AtomicU8, Ordering};

crate::one_page! {
    static THREADS: AtomicU8 = AtomicU8::new(UNKNOWN);
}
const UNKNOWN: u8 = 0;
const ONE: u8 = 1;
const SEVERAL: u8 = 2;

/// Reports whether the program is known to have made no thread. False without the preload library,
/// which sees threads being made.
pub(crate) fn has_one_thread() -> bool {
    THREADS.load(Ordering::Relaxed) == ONE
}

/// Records the start of a process whose threads are seen from now on: of a program, which may have
/// made some already, or of a fork's child.
pub fn note_one_thread(is_forked: bool) {
    let before = if is_forked { SEVERAL } else { UNKNOWN };
    let relaxed = Ordering::Relaxed;
    let _ = THREADS.compare_exchange(before, ONE, relaxed, relaxed);
}

/// Records that the program makes a thread; true if it had one until now.
pub(crate) fn note_thread() -> bool {
    THREADS.swap(SEVERAL, Ordering::Relaxed) == ONE
}
