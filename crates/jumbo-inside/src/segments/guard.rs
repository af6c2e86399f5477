//! Exclusion of mapping changes while a segment is replaced: [`changing`].
//!
//! The mover never waits: it gives up if a thread is about to change mappings. Other threads wait
//! for it, for two checks and one call. System calls that bypass the C library are not seen.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

use super::scan;
use crate::ledger::text_reason as reason;
use crate::watch;
use jumbo_sys::{wait, wake};

crate::one_page! {
    /// 1 while a segment is checked for the last time and replaced.
    static MOVING: AtomicU32 = AtomicU32::new(0);
    /// Number of threads that are changing mappings.
    static CHANGERS: AtomicU32 = AtomicU32::new(0);
}

/// Makes a call that may change text mappings, but not while text is being replaced.
#[inline(always)]
pub(super) fn changing<T>(call: impl FnOnce() -> T) -> T {
    if scan::may_move() {
        wait_and_call(call)
    } else {
        call()
    }
}

#[cold]
pub(super) fn wait_and_call<T>(call: impl FnOnce() -> T) -> T {
    CHANGERS.fetch_add(1, Ordering::SeqCst);
    while MOVING.load(Ordering::SeqCst) != 0 && has_mover() {
        wait(&MOVING, 1, Duration::from_millis(10));
    }
    let result = call();
    // Saturating: a signal handler may have forked during the call, and `forked` has reset the
    // count.
    let less = |threads: u32| Some(threads.saturating_sub(1));
    let _ = CHANGERS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    result
}

/// Reports whether this process has the thread that moves text. A child has none, even one made by
/// a system call that bypasses the C library, and so all handlers of jumbo.
fn has_mover() -> bool {
    cfg!(test) || watch::is_watched()
}

/// Resets the state in the child of a fork: threads of the parent may have been moving text or
/// changing mappings.
///
/// # Safety
/// This is the child, with one thread.
#[expect(unsafe_code, reason = "would drop the exclusion of running threads")]
pub(super) unsafe fn forked() {
    MOVING.store(0, Ordering::SeqCst);
    CHANGERS.store(0, Ordering::SeqCst);
}

/// Calls `replace`, unless a thread is changing mappings, and keeps such threads waiting meanwhile.
pub(super) fn exclusively<T>(replace: impl FnOnce() -> Result<T, u32>) -> Result<T, u32> {
    MOVING.store(1, Ordering::SeqCst);
    let result = match CHANGERS.load(Ordering::SeqCst) {
        0 => replace(),
        _ => Err(reason::NOT_YET),
    };
    MOVING.store(0, Ordering::SeqCst);
    wake(&MOVING);
    result
}
