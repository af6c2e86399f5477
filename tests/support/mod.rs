//! What the end-to-end tests stand on.
//!
//! - [`browser`]: headless Chromium.
//! - [`build`]: the `jumbo` under test and its library; programs compiled from `tests/programs`.
//! - [`program`]: a command to be run plain and under jumbo; [`running`]: one that is running.
//! - [`report`]: jumbo's word on where the memory was; [`smaps`]: the kernel's.
//! - [`host`]: what the host must be, and the lock around its global state.
//! - `inherited`: what programs inherit, however the tests were started.
//! - [`wait`]: waiting for an event, with a bound.

pub(crate) mod browser;
pub(crate) mod build;
pub(crate) mod host;
mod inherited;
pub(crate) mod program;
pub(crate) mod report;
pub(crate) mod running;
pub(crate) mod smaps;
pub(crate) mod wait;

pub(crate) use build::{Compiled, Source, compile};
pub(crate) use program::{Program, Ran, assert_same};
pub(crate) use report::Report;
pub(crate) use running::Running;

/// For sizes in tests.
pub(crate) const MIB: u64 = 1 << 20;
