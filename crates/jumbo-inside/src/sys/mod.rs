//! System calls that rustix lacks, or whose plain form is not enough: one wrapper each, for all of this crate and for
//! `jumbo::kernel`.
//!
//! - [`collapse`], [`collapse_in`]: MADV_COLLAPSE, in this process or another. [`cool_in`]: MADV_COLD in another.
//! - [`Maps`], [`Vma`], [`Pagemap`], [`Pages`], [`Found`]: what an address lies in, and how its pages are mapped.
//! - [`map_at`], [`reserve`]: mappings that replace none; [`unmap`]. [`move_mapping`], [`move_units`]: mappings that move. [`insist`]: a call that has to succeed.
//! - [`copy_words`], [`copy_bytes`], [`copy_scattered`]: memory read without a fault. [`is_mapped`]: whether it is there. [`Blocked`]: a while without signal handlers.
//! - [`Userfault`]: page faults that a thread of ours answers.
//! - [`Thread`], [`clone3`]: tasks that the C library does not know; [`call`], [`wait`], [`wake`]: how they call the kernel.
//!
//! - [`stand_back`], [`stay_prompt`], [`leave_descriptors`]: what a thread of ours begins with.
//! - [`process`]: the caller's ID. [`request`]: any other system call.
//!
//! It uses no other module. Invariant: no call here changes errno.

mod batch;
mod collapse;
mod copy;
mod pagemap;
mod place;
mod remap;
mod signals;
mod task;
mod userfault;
mod vma;

pub use batch::{stand_back, stay_prompt};
pub use collapse::{collapse, collapse_in, cool_in, has_collapse, has_populate};
pub use copy::{copy_bytes, copy_scattered, copy_words};
pub use pagemap::{Found, Pagemap, Pages};
pub use place::{map_at, reserve, unmap};
pub use remap::{insist, is_mapped, move_mapping, move_units};
pub use signals::Blocked;
pub use task::{Entry, Thread, Wait, call, clone3, wait, wake};
pub use userfault::Userfault;
pub use vma::{Maps, Vma};

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::ioctl::Opcode;

/// A system call, past the C library: the program, or we, may interpose its functions.
///
/// # Safety
/// As for the call.
#[expect(unsafe_code, reason = "a system call")]
pub unsafe fn request(number: libc::c_long, arguments: [usize; 6]) -> Result<usize> {
    // SAFETY: the caller's promise.
    let answer = unsafe { call(number, arguments) };
    usize::try_from(answer).map_err(|_| {
        let errno = i32::try_from(answer.unsigned_abs()).unwrap_or(libc::EIO);
        Errno::from_raw_os_error(errno)
    })
}

/// Whether this process gets no huge page, also of advised memory. With PR_THP_DISABLE_EXCEPT_ADVISED (Linux 6.18) advised memory
/// does.
///
/// # References
/// PR_GET_THP_DISABLE in prctl(2); Linux 3.15.
pub fn is_without_thp() -> bool {
    const COMPLETELY: usize = 1;
    let question = libc::PR_GET_THP_DISABLE.cast_unsigned() as usize;
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: it only asks.
    let answer = unsafe { request(libc::SYS_prctl, [question, 0, 0, 0, 0, 0]) };
    answer == Ok(COMPLETELY)
}

/// getpid(2).
pub fn process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Gives the calling thread a descriptor table of its own, of nothing: the numbers that it takes
/// are not missing to the program, and what the program closes is not what it has open.
///
/// # References
/// close_range(2) with CLOSE_RANGE_UNSHARE; Linux 5.9.
///
/// # Errors
/// ENOSYS: a kernel without it; ENOMEM.
#[expect(unsafe_code, reason = "a system call that rustix lacks")]
pub fn leave_descriptors() -> Result<()> {
    const CLOSE_RANGE_UNSHARE: usize = 1 << 1;
    let all = [0, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0];
    // SAFETY: the range is all; the table that is closed is a copy, of nothing.
    unsafe { request(libc::SYS_close_range, all).map(drop) }
}

/// ioctl(2) with a structure that the kernel reads and writes.
///
/// # Safety
/// The request takes a `T`, writes what is one, and nothing else but what it points to.
#[expect(unsafe_code, reason = "as above")]
unsafe fn control<T>(file: &OwnedFd, request: Opcode, structure: &mut T) -> Result<usize> {
    let file = file.as_raw_fd().unsigned_abs() as usize;
    let structure = core::ptr::from_mut(structure).expose_provenance();
    let arguments = [file, request as usize, structure, 0, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { self::request(libc::SYS_ioctl, arguments) }
}
