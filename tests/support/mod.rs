//! Support code of the end-to-end tests.
//!
//! - [`browser`]: headless Chromium.
//! - [`build`]: the `jumbo` under test and its library; programs compiled from `tests/programs`.
//! - [`program`]: a command that runs plain and under jumbo; [`running`]: one that is running.
//! - [`report`]: jumbo's report about memory; [`smaps`]: the kernel's.
//! - [`host`]: requirements on the host, and the lock on its global state.
//! - `inherited`: signal dispositions that programs inherit.
//! - `needs`: commands that a test needs.
//! - [`wait`]: waits for an event, with a timeout.

pub(crate) mod browser;
pub(crate) mod build;
pub(crate) mod host;
mod inherited;
mod needs;
pub(crate) mod program;
pub(crate) mod report;
pub(crate) mod running;
pub(crate) mod smaps;
pub(crate) mod wait;

pub(crate) use build::{Compiled, Source, compile};
pub(crate) use needs::skip;
pub(crate) use program::{Program, Ran, assert_same};
pub(crate) use report::Report;
pub(crate) use running::Running;

/// Returns all cases with the feature `full`; else one of `step`, the first one among them.
pub(crate) fn sample<T>(
    cases: impl IntoIterator<Item = T>,
    step: usize,
) -> impl Iterator<Item = T> {
    let step = if cfg!(feature = "full") { 1 } else { step };
    cases.into_iter().step_by(step)
}

/// 1 MiB in bytes.
pub(crate) const MIB: u64 = 1 << 20;

/// Calls of `escalate.c` that reach beyond the memory of a program: no process of jumbo beside one may
/// make them.
pub(crate) const OUTSIDE_CALLS: [&str; 26] = [
    "openat",
    "open",
    "kill",
    "tgkill",
    "ptrace",
    "socket",
    "execve",
    "fork",
    "clone",
    "clone3",
    "setuid",
    "mprotect",
    "mremap",
    "process_vm_readv",
    "prctl",
    "dumpable",
    "unshare-user",
    "setns",
    "bpf",
    "pidfd_open",
    "io_uring_setup",
    "unlink",
    "mount",
    "keyctl",
    "rt_sigaction",
    "x32",
];
