//! glibc's heap below the program break: [`seen`].
//!
//! glibc's tunable advises each step by which its heap grows, a block or two. A program may touch
//! little of it: buffers of 64 KiB, say, of which the first page is used. glibc touches a step before
//! anybody hears of it, so a block is charged beforehand, and glibc advises only while one is
//! ([`seen`] tells when that changes). The break moves without a call that could be heard; but a block
//! of the heap beyond the last known break tells.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{PMD_BYTES, fill};
use crate::sys;

/// The break, as far as it is known, or [`NOT_FOLLOWED`].
static BREAK: AtomicUsize = AtomicUsize::new(NOT_FOLLOWED);
/// The break at the start.
static FIRST: AtomicUsize = AtomicUsize::new(NOT_FOLLOWED);
crate::one_page! {
    /// A block is charged for the next step.
    static IS_CHARGED: AtomicBool = AtomicBool::new(false);
}
/// A block of so much beyond the break is none of this heap: a mapping, or another arena.
const MAX_STEP_BYTES: usize = 1 << 40;
/// The break is not followed: no block is less than [`MAX_STEP_BYTES`] beyond it.
const NOT_FOLLOWED: usize = 1 << 63;
/// Blocks that were beyond the break and not below the new one; after some nothing is followed.
static STRANGE: AtomicUsize = AtomicUsize::new(0);
const MAX_STRANGE: usize = 64;

/// Follows the break from now on.
pub(super) fn start() {
    let now = current();
    if now != 0 {
        FIRST.store(now, Ordering::Relaxed);
        IS_CHARGED.store(fill::charge_ahead(), Ordering::Relaxed);
        BREAK.store(now, Ordering::Relaxed);
    }
}

/// The heap's steps are advised by those who make them: nothing is followed, nor charged ahead.
pub fn is_followed_otherwise() {
    BREAK.store(NOT_FOLLOWED, Ordering::Relaxed);
    if IS_CHARGED.swap(false, Ordering::Relaxed) {
        fill::give_ahead();
    }
}

/// The bytes that are charged for the next step.
pub(super) fn charged_ahead() -> usize {
    match IS_CHARGED.load(Ordering::Relaxed) {
        true => PMD_BYTES.load(Ordering::Relaxed),
        false => 0,
    }
}

/// glibc has returned a block of its own, which the program has not seen yet. Says whether glibc may advise the next step of
/// its heap, where that may have changed.
#[inline(always)]
pub fn seen(block: usize) -> Option<bool> {
    let known = BREAK.load(Ordering::Relaxed);
    match block.wrapping_sub(known) < MAX_STEP_BYTES {
        true => has_moved(block, known),
        false => None,
    }
}

#[cold]
#[inline(never)]
fn has_moved(block: usize, known: usize) -> Option<bool> {
    let now = current();
    if now <= block {
        if STRANGE.fetch_add(1, Ordering::Relaxed) >= MAX_STRANGE {
            BREAK.store(NOT_FOLLOWED, Ordering::Relaxed);
        }
        return None;
    }
    let relaxed = Ordering::Relaxed;
    BREAK.compare_exchange(known, now, relaxed, relaxed).ok()?;
    // The first block may begin before the heap.
    let first = fill::next_block(FIRST.load(Ordering::Relaxed));
    let step = known.max(first)..now.max(first);
    let is_charged = IS_CHARGED.swap(false, Ordering::Relaxed);
    let is_left = is_charged && !fill::begin_charged(&step);
    if !is_charged {
        fill::begin_break(&step);
    }
    let may_advise = is_left || fill::charge_ahead();
    // Another thread may have charged one meanwhile.
    if may_advise && IS_CHARGED.swap(true, Ordering::Relaxed) {
        fill::give_ahead();
    }
    Some(may_advise)
}

/// Whether a block is in the heap that ends at `now`.
pub fn is_below(block: usize, now: usize) -> bool {
    (FIRST.load(Ordering::Relaxed)..now).contains(&block)
}

/// The break is `now`, after a call of glibc's that advised nothing. Gives what the heap grew by, which is the caller's
/// to advise.
pub fn moved(now: usize) -> Option<Range<usize>> {
    let known = BREAK.load(Ordering::Relaxed);
    if known == NOT_FOLLOWED || now == known {
        return None;
    }
    let relaxed = Ordering::Relaxed;
    BREAK.compare_exchange(known, now, relaxed, relaxed).ok()?;
    if now < known {
        fill::forget(&(now..known));
        return None;
    }
    let first = fill::next_block(FIRST.load(Ordering::Relaxed));
    Some(known.max(first)..now.max(first))
}

/// glibc may have returned the end of its heap to the kernel.
pub(super) fn check() {
    let known = BREAK.load(Ordering::Relaxed);
    if known == NOT_FOLLOWED {
        return;
    }
    let now = current();
    if (1..known).contains(&now) {
        moved(now);
    }
}

/// The break; 0 where it cannot be known. brk(2).
fn current() -> usize {
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: it only asks.
    let answer = unsafe { sys::request(libc::SYS_brk, [0; 6]) };
    answer.unwrap_or(0)
}
