//! madvise(2): [`advise`], the one place that calls it for the program that jumbo is inside of; [`allows`],
//! the one question before it.
//!
//! A seccomp filter of the program may kill for an advice that the program itself never gives, and
//! may judge by the advice. `jumbo_inside::sandbox` reports the filters: it blocks all advice while a
//! filter is unknown, and forbids what a known filter does not allow.
//!
//! The reaper is a process of its own with a filter of its own, and not concerned.
#![expect(unsafe_code, reason = "a system call that may drop memory")]

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, Ordering};

use rustix::io::{Errno, Result};

use super::request;

/// Advice that jumbo gives all the time: without one of them it gives no advice of its own accord.
pub const USUAL: [c_int; 5] = [
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_COLLAPSE,
    libc::MADV_DONTNEED,
    libc::MADV_POPULATE_WRITE,
];

/// Reasons to give no advice at all: filters that are unknown, or being installed.
static BLOCKERS: AtomicU32 = AtomicU32::new(0);
/// One bit for each advice that a filter does not allow.
static FORBIDDEN: AtomicU32 = AtomicU32::new(0);

const fn bit(advice: c_int) -> u32 {
    assert!(0 <= advice && advice < 32, "no bit for this advice");
    1 << advice
}

/// Bits of [`USUAL`].
const USUAL_BITS: u32 = {
    let (mut bits, mut at) = (0, 0);
    while at < USUAL.len() {
        bits |= bit(USUAL[at]);
        at += 1;
    }
    bits
};

fn allows_bits(bits: u32) -> bool {
    BLOCKERS.load(Ordering::Acquire) == 0 && FORBIDDEN.load(Ordering::Acquire) & bits == 0
}

/// Reports whether an advice is harmless, as far as known.
#[inline(always)]
pub fn allows(advice: c_int) -> bool {
    allows_bits(u32::try_from(advice).map_or(!0, |advice| 1u32.checked_shl(advice).unwrap_or(!0)))
}

/// Reports whether all [`USUAL`] advice is harmless, as far as known.
#[inline(always)]
pub fn allows_usual() -> bool {
    allows_bits(USUAL_BITS)
}

/// Blocks all advice, until [`unblock`].
pub fn block() {
    BLOCKERS.fetch_add(1, Ordering::AcqRel);
}

/// Ends a [`block`].
pub fn unblock() {
    BLOCKERS.fetch_sub(1, Ordering::AcqRel);
}

/// Forbids each advice for which `is_allowed` is false, for good: filters are never removed.
pub fn forbid_unless(is_allowed: impl Fn(c_int) -> bool) {
    let forbidden = (0..32).filter(|advice| !is_allowed(*advice));
    let bits = forbidden.fold(0, |bits, advice| bits | bit(advice));
    FORBIDDEN.fetch_or(bits, Ordering::AcqRel);
}

/// madvise(2).
///
/// # Errors
/// EPERM, without a call: a filter may kill for it ([`allows`]). Else those of madvise(2).
///
/// # Safety
/// As for madvise(2): if the advice drops memory, nothing needs its content.
pub unsafe fn advise(address: usize, length: usize, advice: c_int) -> Result<()> {
    super::guarded(|| {
        if !allows(advice) {
            return Err(Errno::PERM);
        }
        let advice = advice.cast_unsigned() as usize;
        // SAFETY: the caller's promise.
        unsafe { request(libc::SYS_madvise, [address, length, advice, 0, 0, 0]).map(drop) }
    })
}

/// Discards pages and keeps them mapped; maps them anew where MADV_DONTNEED is not allowed.
///
/// # Errors
/// Those of the call.
///
/// # Safety
/// The pages are private, anonymous, readable and writable, and nothing needs their content.
pub unsafe fn discard(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    match unsafe { advise(address, length, libc::MADV_DONTNEED) } {
        Err(Errno::PERM) => {}
        answer => return answer,
    }
    // SAFETY: the caller's promise.
    unsafe { super::map_anew(address, length) }
}

/// Variant of [`discard`] for memory that may be parts of huge pages of `huge` bytes, a power of two,
/// whose memory is free afterwards. The kernel splits such a page, and frees the part, only once memory is
/// short; MADV_COLD (Linux 5.4) splits it now.
///
/// # Errors
/// Those of the call.
///
/// # Safety
/// As for [`discard`].
pub unsafe fn discard_parts(address: usize, length: usize, huge: usize) -> Result<()> {
    let page = rustix::param::page_size();
    let first = address & !(huge - 1);
    let last = (address + length - page) & !(huge - 1);
    let is_part = |at| at < address || at + huge > address + length;
    for (at, is_split) in [
        (address, is_part(first)),
        (address + length - page, last != first && is_part(last)),
    ] {
        if is_split {
            // SAFETY: advice changes the backing of memory, never its content.
            let _ = unsafe { advise(at, page, libc::MADV_COLD) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { discard(address, length) }
}
