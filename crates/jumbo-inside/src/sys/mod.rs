//! System calls that rustix lacks, or whose plain form is not enough: one wrapper each, for all of this crate and for
//! `jumbo::kernel`.
//!
//! - [`collapse`], [`collapse_in`]: MADV_COLLAPSE, in this process or another.
//! - [`Maps`], [`Vma`], [`Pagemap`]: what an address lies in, and how its page is mapped.
//! - [`map_at`], [`reserve`]: mappings that replace none. [`move_mapping`], [`move_back`]: mappings that move.
//! - [`copy_words`]: memory read without a fault. [`Blocked`]: a while without signal handlers.
//! - [`Thread`], [`clone3`]: tasks that the C library does not know; [`call`], [`wait`], [`wake`]: how they call the kernel.
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
mod vma;

pub use batch::Batch;
pub use collapse::{collapse, collapse_in};
pub use copy::copy_words;
pub use pagemap::Pagemap;
pub use place::{map_at, reserve};
pub use remap::{move_back, move_mapping};
pub use signals::Blocked;
pub use task::{Entry, Thread, Wait, call, clone3, wait, wake};
pub use vma::{Maps, Vma};

use rustix::io::{Errno, Result};

/// The answer of a call of libc's, -1 with the reason in errno, which is left as it was.
#[expect(unsafe_code, reason = "errno")]
pub fn quietly(call: impl FnOnce() -> libc::c_long) -> Result<usize> {
    // SAFETY: errno is this thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let answer = call();
    // SAFETY: as above.
    let code = unsafe { core::mem::replace(&mut *errno, before) };
    usize::try_from(answer).map_err(|_| Errno::from_raw_os_error(code))
}
