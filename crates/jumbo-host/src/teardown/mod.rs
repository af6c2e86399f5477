//! Frees the memory of an ending process from two sides: process_mrelease(2) in a thread of this
//! process, in parallel with the kernel's exit, which has one thread.
//!
//! - [`Process`]: a process that will end, by descriptor.
//! - [`Hold`]: a thread of it, seized so that it stops before the process frees its memory.
//! - [`Teardown`]: the release of the memory, and its result: [`Gain`].
//! - [`Reason`]: the reason why less than possible was done.
//!
//! A hold is needed because process_mrelease wants a process that is dying and still has its
//! memory. That state lasts a few microseconds after a signal, too short to hit reliably. At
//! PTRACE_EVENT_EXIT the process *is* dying and waits for its tracer. Once the call is seen to work
//! the process continues, and both walk its memory at once. The kernel starts at the lowest
//! mapping, the call at the highest (since 6.18).
//!
//! One thread is held, not all: the memory lives until the last thread has ended, so the held
//! thread only has to end last. If it ends while others live, the next thread is seized.
//!
//! Invariant: no memory is released that another process needs. When a process ends, the kernel
//! reads its memory for *other* processes in one case only, robust futexes (`man 3
//! pthread_mutexattr_setrobust`): a process that holds any is left to the kernel alone.

mod hold;
mod locks;
mod process;
mod reason;
mod release;

pub use hold::{Hold, HoldEvent};
pub use process::Process;
pub use reason::Reason;
pub use release::{Gain, Teardown, TeardownMethod};
