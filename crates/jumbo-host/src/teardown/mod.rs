//! The teardown of another process from both sides: process_mrelease(2) on a thread of ours, beside the
//! kernel's own, which has one thread.
//!
//! - [`Process`]: a process that will end, by descriptor.
//! - [`Hold`]: one thread of it, seized so that it stops before it gives up the memory.
//! - [`Teardown`]: its memory being given back, and what that came to: [`Gain`].
//! - [`Reason`]: why less was done than could be.
//!
//! Why hold: process_mrelease wants a process that is dying and still has its memory. Between a signal
//! and the end of that there are a few microseconds, which no other process can hit reliably. At
//! PTRACE_EVENT_EXIT the process *is* dying and waits for us; once the call is seen at work the process
//! goes on, and both walk its memory at once. The kernel walks it from the lowest mapping, the call from
//! the highest (6.18; in the same direction before, one helping the other past what is done).
//!
//! One thread is held, not all: the memory lives until the last thread has ended, so any thread that
//! ends after all others will do. Where the one held ends while others live on, the next is seized.
//!
//! Invariant: nothing is released while another process could miss it. Robust futexes (`man 3
//! pthread_mutexattr_setrobust`) are the one thing that the kernel reads from a process's memory for the
//! sake of *others* when it ends: a process that holds any is left to the kernel alone.

mod hold;
mod locks;
mod process;
mod reason;
mod release;

pub use hold::{Hold, HoldEvent};
pub use process::Process;
pub use reason::Reason;
pub use release::{Gain, Teardown, TeardownMethod};
