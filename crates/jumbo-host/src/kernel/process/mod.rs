//! Starting a program so that it cannot tell who started it, and standing in for it until it ends.
//!
//! - [`start`]: what this process was given, recorded before Rust's runtime changes it.
//! - [`Image`]: a program with its arguments and environment, ready for `execve`.
//! - [`Signals`]: every signal of this process, read from a descriptor instead of delivered.
//! - [`Interruptible`]: work in a thread, in a system call that a signal cuts short.
//! - [`tree`]: the processes that a program consists of.
//! - [`Standing`]: what a process is to one that wants to end it; [`Stop`]: why a traced one stands still.
//! - [`release`]: the memory of a process that is ending, before it has ended.
//! - [`Beside`]: a process that looks after a program from outside.
//! - [`Child`]: a program run as a child, with the signals, descriptors and dispositions that this
//!   process was given.
//!
//! Invariant: between [`start::record`] and `execve` nothing that the program could see has changed.

mod beside;
mod child;
mod image;
mod interruptible;
mod signals;
mod standing;
pub mod start;
mod stop;
pub mod tree;

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use super::sys::release;
pub use beside::Beside;
pub(super) use child::fork;
pub use child::{Change, Child, Faults, SpawnError};
pub use image::{Image, inherited_environment};
pub use interruptible::Interruptible;
pub use signals::{Signal, Signals, die_by};
pub use standing::Standing;
pub use stop::Stop;

/// Whether a descriptor can be read, or is at its end, within a time.
pub(crate) fn is_ready(fd: impl AsFd, within: Duration) -> rustix::io::Result<bool> {
    let within = Timespec::try_from(within).unwrap_or_default();
    let mut ready = [PollFd::new(&fd, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut ready, Some(&within))).map(|count| count > 0)
}

/// Ends this process without running what its parent registered for its own exit.
#[expect(unsafe_code, reason = "rustix cannot end a process")]
pub(super) fn end(code: i32) -> ! {
    // SAFETY: ends this process and nothing else.
    unsafe { libc::_exit(code) }
}
