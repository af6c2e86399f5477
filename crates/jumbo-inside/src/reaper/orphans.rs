//! Whether orphans go to a subreaper instead of init: [`are_taken`].
//!
//! The sibling is an orphan, and a subreaper (PR_SET_CHILD_SUBREAPER of prctl(2)) finds all orphans below it in
//! its waits. The kernel tells that a process is one to that process alone. So one that jumbo covers tells its
//! descendants: a fork's child has its memory, and what is executed has its environment, where the orders keep a
//! digit for it. One that is not covered is found out by the first sibling, which becomes its child ([`has_gone_to`]).
#![expect(unsafe_code, reason = "writes one digit of the environment")]

use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use super::raw::{self, plain};
use crate::orders::Orders;

/// An ancestor is one, or this process is or was.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// The digit of this process's environment; null: it has none.
static DIGIT: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// Whether they are, as far as this process knows.
pub(super) fn are_taken() -> bool {
    let taken = TAKEN.load(Ordering::Relaxed);
    if !taken && takes() {
        set_taken();
        return true;
    }
    taken
}

/// What the orders say, and where in the environment they do.
///
/// # Safety
/// `digit` is null or the address of the digit, behind [`Orders::ORPHANS_KEY`], and stays readable and writable.
pub(super) unsafe fn told(taken: bool, digit: *mut u8) {
    DIGIT.store(digit, Ordering::Relaxed);
    TAKEN.store(taken, Ordering::Relaxed);
    are_taken();
}

/// They are from now on, for this process and what comes of it.
pub fn set_taken() {
    TAKEN.store(true, Ordering::Relaxed);
    let digit = DIGIT.load(Ordering::Relaxed);
    let name = Orders::ORPHANS_KEY.as_bytes();
    // The program may have written something else there: its title.
    // SAFETY: null, or `told`'s promise: the name and the digit are readable, and the digit is writable.
    unsafe {
        let is_there = |at: usize, byte: u8| digit.sub(name.len() - at).read_volatile() == byte;
        let mut bytes = name.iter().enumerate();
        if !digit.is_null() && bytes.all(|(at, byte)| is_there(at, *byte)) {
            digit.write_volatile(b'1');
        }
    }
}

/// To whom the calling process has gone, which was a child of `parent` that is about to end; 1 is init. `None`
/// where the caller `is_unwanted` meanwhile.
pub(super) fn has_gone_to(parent: u32, is_unwanted: impl Fn() -> bool) -> Option<u32> {
    while !is_unwanted() {
        // SAFETY: it writes nothing.
        let now = u32::try_from(unsafe { plain(libc::SYS_getppid, [0; 3]) }).unwrap_or(0);
        if now != parent {
            return Some(now);
        }
        // SAFETY: as above.
        unsafe { plain(libc::SYS_sched_yield, [0; 3]) };
    }
    None
}

/// PR_GET_CHILD_SUBREAPER of prctl(2), Linux 3.4: this process is one.
fn takes() -> bool {
    let mut answer: libc::c_int = 0;
    let option = libc::PR_GET_CHILD_SUBREAPER.cast_unsigned() as usize;
    let to = (&raw mut answer).expose_provenance();
    // SAFETY: the kernel writes one int to `answer`.
    unsafe { raw::call(libc::SYS_prctl, [option, to, 0, 0, 0, 0]) };
    answer != 0
}
