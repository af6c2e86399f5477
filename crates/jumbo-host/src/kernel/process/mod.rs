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

pub use super::sys::release;
pub use beside::Beside;
pub(super) use child::fork;
pub use child::{Change, Child, Faults, SpawnError};
pub use image::{Image, inherited_environment};
pub use interruptible::Interruptible;
pub use signals::{Signal, Signals, die_by};
pub use standing::Standing;
pub use stop::Stop;
