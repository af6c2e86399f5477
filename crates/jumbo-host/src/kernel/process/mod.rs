//! Starts a program transparently, and acts as its parent until it ends.
//!
//! - [`start`]: inherited dispositions and descriptors, recorded before Rust's runtime changes
//!   them.
//! - [`ProgramImage`]: a program with its arguments and environment, ready for `execve`.
//! - [`Signals`]: the signals of this process, read from a signalfd.
//! - [`Interruptible`]: work in a thread, in a system call that a signal interrupts.
//! - [`tree`]: the processes of a program.
//! - [`Process`]: a process by descriptor. [`ProcessState`]: a process according to
//!   /proc/PID/status.
//! - [`release`]: frees the memory of a dying process.
//! - [`Beside`]: a process that manages a program from outside.
//! - [`Child`]: a program as a child, with the signals, descriptors and dispositions that this
//!   process inherited.
//!
//! Invariant: from [`start::record`] to `execve` nothing that the program can see changes.

mod beside;
mod child;
mod handle;
mod image;
mod interruptible;
mod signals;
pub mod start;
mod state;
pub mod tree;

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use beside::Beside;
pub(super) use child::fork;
pub use child::{Change, Child, ResourceUsage, SpawnError, wait};
pub use handle::Process;
pub use image::{ProgramImage, inherited_environment};
pub use interruptible::Interruptible;
pub use jumbo_sys::release;
pub use signals::{Signal, Signals, die_by};
pub use state::ProcessState;

/// Reports whether a descriptor becomes readable, or reaches its end, within `timeout`.
pub(crate) fn is_ready(fd: impl AsFd, timeout: Duration) -> rustix::io::Result<bool> {
    let timeout = Timespec::try_from(timeout).unwrap_or_default();
    let mut ready = [PollFd::new(&fd, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut ready, Some(&timeout))).map(|count| count > 0)
}

/// Ends this process without its exit handlers, which belong to its parent.
#[expect(unsafe_code, reason = "rustix cannot end a process")]
pub(super) fn end(code: i32) -> ! {
    // SAFETY: ends this process and nothing else.
    unsafe { libc::_exit(code) }
}
