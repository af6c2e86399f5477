//! glibc's heap below the program break: [`seen`].
//!
//! glibc's tunable advises each step of its heap, a block or two. A program may touch little of it,
//! such as the first page of each 64 KiB buffer. glibc touches a step before jumbo hears of it. So
//! a block is charged beforehand, and glibc advises only while one is; [`seen`] reports the
//! changes. A heap block beyond the last known break reveals that the break has moved.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{PMD_BYTES, fill};
use crate::sys;

/// Last known break, or [`NOT_FOLLOWED`].
static BREAK: AtomicUsize = AtomicUsize::new(NOT_FOLLOWED);
static START_BREAK: AtomicUsize = AtomicUsize::new(NOT_FOLLOWED);
/// Start of the known blocks, which end at [`BREAK`]: 0, all are, until [`observe`].
static START_KNOWN: AtomicUsize = AtomicUsize::new(0);
crate::one_page! {
    /// A block is charged for the next step.
    static IS_CHARGED: AtomicBool = AtomicBool::new(false);
}
/// Maximum distance of a heap block from the break: blocks beyond it belong to other areas.
const MAX_STEP_BYTES: usize = 1 << 40;
/// Value of [`BREAK`] that no block is less than [`MAX_STEP_BYTES`] beyond.
const NOT_FOLLOWED: usize = 1 << 63;
/// Blocks between the known break and [`MAX_STEP_BYTES`] that were not in the heap.
static UNKNOWN_BLOCKS: AtomicUsize = AtomicUsize::new(0);
const MAX_UNKNOWN_BLOCKS: usize = 64;

pub(super) fn start() {
    let now = current();
    if now != 0 {
        START_BREAK.store(now, Ordering::Relaxed);
        IS_CHARGED.store(fill::charge_next_step(), Ordering::Relaxed);
        BREAK.store(now, Ordering::Relaxed);
    }
}

/// Begins to report blocks as not [known](is_known).
pub fn observe() {
    let start = match BREAK.load(Ordering::Relaxed) {
        NOT_FOLLOWED => NOT_FOLLOWED,
        _ => START_BREAK.load(Ordering::Relaxed),
    };
    START_KNOWN.store(start, Ordering::Relaxed);
}

/// Stops following the break, and its charge: the caller advises the steps itself.
pub fn is_followed_otherwise() {
    stop();
    if IS_CHARGED.swap(false, Ordering::Relaxed) {
        fill::uncharge_next_step();
    }
}

fn stop() {
    BREAK.store(NOT_FOLLOWED, Ordering::Relaxed);
    if START_KNOWN.load(Ordering::Relaxed) != 0 {
        observe();
    }
}

pub(super) fn charged_ahead() -> usize {
    match IS_CHARGED.load(Ordering::Relaxed) {
        true => PMD_BYTES.load(Ordering::Relaxed),
        false => 0,
    }
}

/// Growth of glibc's heap.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// Size of the step in bytes.
    pub bytes: usize,
    /// glibc may advise the next step.
    pub may_advise: bool,
}

/// Reports whether a block lies in the heap below the last known break, or blocks are not
/// [observed](observe).
#[inline(always)]
pub fn is_known(block: usize) -> bool {
    let start = START_KNOWN.load(Ordering::Relaxed);
    block.wrapping_sub(start) < BREAK.load(Ordering::Relaxed).wrapping_sub(start)
}

/// Reports whether [`seen`] may return a growth for a block.
#[inline(always)]
pub fn is_beyond(block: usize) -> bool {
    block.wrapping_sub(BREAK.load(Ordering::Relaxed)) < MAX_STEP_BYTES
}

/// Notes a new block of glibc that the program has not seen yet. Returns the growth of the heap
/// that it reveals.
pub fn seen(block: usize) -> Option<Growth> {
    let known = BREAK.load(Ordering::Relaxed);
    if !is_beyond(block) {
        return None;
    }
    let now = current();
    if now <= block {
        if UNKNOWN_BLOCKS.fetch_add(1, Ordering::Relaxed) >= MAX_UNKNOWN_BLOCKS {
            stop();
        }
        return None;
    }
    let relaxed = Ordering::Relaxed;
    BREAK.compare_exchange(known, now, relaxed, relaxed).ok()?;
    // The first block may begin before the heap.
    let first = fill::next_block(START_BREAK.load(Ordering::Relaxed));
    let step = known.max(first)..now.max(first);
    let is_charged = IS_CHARGED.swap(false, Ordering::Relaxed);
    let is_left = is_charged && !fill::track_charged_step(&step);
    if !is_charged {
        fill::track_step(&step);
    }
    let may_advise = is_left || fill::charge_next_step();
    // Another thread may have charged one meanwhile.
    if may_advise && IS_CHARGED.swap(true, Ordering::Relaxed) {
        fill::uncharge_next_step();
    }
    Some(Growth {
        bytes: now.saturating_sub(known),
        may_advise,
    })
}

/// Reports whether a block is in the heap that ends at `now`.
pub fn is_below(block: usize, now: usize) -> bool {
    (START_BREAK.load(Ordering::Relaxed)..now).contains(&block)
}

/// Returns the size of the heap that ends at `now`, in bytes.
pub fn heap_bytes(now: usize) -> usize {
    now.saturating_sub(START_BREAK.load(Ordering::Relaxed))
}

/// Sets the break to `now` after a call of glibc without advice. Returns the growth of the heap,
/// for the caller to advise.
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
    let first = fill::next_block(START_BREAK.load(Ordering::Relaxed));
    Some(known.max(first)..now.max(first))
}

/// Checks whether glibc has returned the end of its heap to the kernel.
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

/// Returns the break, 0 if unknown. brk(2).
fn current() -> usize {
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: brk(0) only returns the break.
    let answer = unsafe { sys::request(libc::SYS_brk, [0; 6]) };
    answer.unwrap_or(0)
}
