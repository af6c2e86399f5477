//! Detects whether a subreaper adopts orphans instead of init: [`are_taken`].
//!
//! The reaper is an orphan, and a subreaper (PR_SET_CHILD_SUBREAPER of prctl(2)) sees all orphans
//! among its descendants when it waits. The kernel reports the attribute only to the process
//! itself. So a covered subreaper passes it on: by its memory to children, and by a digit of the
//! orders in the environment to executed programs. A subreaper that is not covered is detected by
//! the first reaper, which becomes its child ([`new_parent`]).
#![expect(unsafe_code, reason = "writes one digit of the environment")]

use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use super::raw::{self, plain};
use crate::orders::Orders;

/// Set if an ancestor is a subreaper, or this process is or was.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Digit in this process's environment, or null.
static DIGIT: AtomicPtr<u8> = AtomicPtr::new(core::ptr::null_mut());

/// Reports whether a subreaper is known to adopt orphans.
pub(super) fn are_taken() -> bool {
    let taken = TAKEN.load(Ordering::Relaxed);
    if !taken && is_subreaper() {
        set_subreaper();
        return true;
    }
    taken
}

/// Initialises the state with the value of the orders and the digit's address.
///
/// # Safety
/// `digit` is null, or the address of the digit behind [`Orders::ORPHANS_KEY`], which stays readable
/// and writable.
pub(super) unsafe fn prepare(taken: bool, digit: *mut u8) {
    DIGIT.store(digit, Ordering::Relaxed);
    TAKEN.store(taken, Ordering::Relaxed);
    are_taken();
}

/// Records a subreaper, for this process and its descendants.
pub fn set_subreaper() {
    TAKEN.store(true, Ordering::Relaxed);
    let digit = DIGIT.load(Ordering::Relaxed);
    let name = Orders::ORPHANS_KEY.as_bytes();
    // The program may have overwritten the environment with its title.
    // SAFETY: null, or the promise to `prepare`: name and digit are readable, and the digit is
    // writable.
    unsafe {
        let is_there = |at: usize, byte: u8| digit.sub(name.len() - at).read_volatile() == byte;
        let mut bytes = name.iter().enumerate();
        if !digit.is_null() && bytes.all(|(at, byte)| is_there(at, *byte)) {
            digit.write_volatile(b'1');
        }
    }
}

/// Waits for the end of the calling process's `parent`, and returns the new parent; 1 is init.
/// `None` if the caller `is_unwanted` meanwhile.
pub(super) fn new_parent(parent: u32, is_unwanted: impl Fn() -> bool) -> Option<u32> {
    while !is_unwanted() {
        // SAFETY: the call writes nothing.
        let now = u32::try_from(unsafe { plain(libc::SYS_getppid, [0; 3]) }).unwrap_or(0);
        if now != parent {
            return Some(now);
        }
        // SAFETY: as above.
        unsafe { plain(libc::SYS_sched_yield, [0; 3]) };
    }
    None
}

/// Reports whether this process is a subreaper: PR_GET_CHILD_SUBREAPER of prctl(2), Linux 3.4.
fn is_subreaper() -> bool {
    let mut answer: libc::c_int = 0;
    let option = libc::PR_GET_CHILD_SUBREAPER.cast_unsigned() as usize;
    let to = (&raw mut answer).expose_provenance();
    // SAFETY: the kernel writes one int to `answer`.
    unsafe { raw::call(libc::SYS_prctl, [option, to, 0, 0, 0, 0]) };
    answer != 0
}
