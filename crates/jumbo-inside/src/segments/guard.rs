//! Between the last look at a segment and the call that replaces it, no other thread may change what is mapped there: [`changing`].
//!
//! The mover never waits: where a thread is about to change mappings it gives up. The others wait for it, for as long as two looks
//! and one call take. Calls that come past the C library are not seen.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use super::later;
use crate::ledger::text_reason as reason;
use crate::sys::{wait, wake};
use crate::watch;

crate::one_page! {
    /// 1 while a segment is looked at for the last time and replaced.
    static MOVING: AtomicU32 = AtomicU32::new(0);
    /// The threads that are changing mappings.
    static CHANGING: AtomicU32 = AtomicU32::new(0);
}

/// Makes a call that may change what is mapped as text, and not while text is being replaced.
#[inline(always)]
pub fn changing<T>(call: impl FnOnce() -> T) -> T {
    if later::may_move() {
        kept_out(call)
    } else {
        call()
    }
}

#[cold]
pub(super) fn kept_out<T>(call: impl FnOnce() -> T) -> T {
    CHANGING.fetch_add(1, Ordering::SeqCst);
    while MOVING.load(Ordering::SeqCst) != 0 && has_mover() {
        wait(&MOVING, 1, Duration::from_millis(10));
    }
    let answer = call();
    // Not below 0: a signal handler may have forked amid the call, and `forked` has counted from 0 again.
    let less = |threads: u32| Some(threads.saturating_sub(1));
    let _ = CHANGING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    answer
}

/// Whether the thread that moves is there. A child has none, however it was made: also by a system call past the C library,
/// where no handler of ours runs.
fn has_mover() -> bool {
    cfg!(test) || watch::is_watched()
}

/// Forgets the threads of the parent, in the child of a fork: one of them may have been moving text, others changing mappings.
///
/// # Safety
/// This is the child, with one thread.
#[expect(unsafe_code, reason = "what it forgets must be another process's")]
pub unsafe fn forked() {
    MOVING.store(0, Ordering::SeqCst);
    CHANGING.store(0, Ordering::SeqCst);
}

/// Looks at a segment for the last time and replaces it, if no thread is changing mappings.
pub(super) fn alone<T>(replace: impl FnOnce() -> Result<T, u32>) -> Result<T, u32> {
    MOVING.store(1, Ordering::SeqCst);
    let answer = match CHANGING.load(Ordering::SeqCst) {
        0 => replace(),
        _ => Err(reason::NOT_YET),
    };
    MOVING.store(0, Ordering::SeqCst);
    wake(&MOVING);
    answer
}
