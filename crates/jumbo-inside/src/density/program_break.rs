//! The C library's own heap below the program break, which it grows unseen: [`follow`].
//!
//! Where the program's blocks come from that heap, [`check`] looks at the break, and tracks new blocks
//! of it as memory on base pages, which are collapsed once they are dense.

use core::sync::atomic::{AtomicUsize, Ordering};

use super::fill;
use crate::sandbox;
use jumbo_sys as sys;

/// Last known break; 0: it is not followed.
static BREAK: AtomicUsize = AtomicUsize::new(0);

/// Begins to follow the break.
pub fn follow() {
    BREAK.store(current(), Ordering::Relaxed);
}

/// Tracks what the C library has added to its heap, and forgets what it has returned.
pub fn check() {
    let known = BREAK.load(Ordering::Relaxed);
    if known == 0 || sandbox::is_entered_later() {
        return;
    }
    let now = current();
    let relaxed = Ordering::Relaxed;
    if now == 0
        || now == known
        || BREAK
            .compare_exchange(known, now, relaxed, relaxed)
            .is_err()
    {
        return;
    }
    match now > known {
        true => fill::begin_on_base_pages(&(known & !(fill::block_bytes() - 1)..now)),
        false => fill::forget(&(now..known)),
    }
}

/// Returns the break, 0 if unknown. brk(2).
fn current() -> usize {
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: brk(0) only returns the break.
    let answer = unsafe { sys::request(libc::SYS_brk, [0; 6]) };
    answer.unwrap_or(0)
}
