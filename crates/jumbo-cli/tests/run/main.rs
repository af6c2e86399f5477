//! `jumbo run` as a launcher: the program must not be able to tell who started it.
//!
//! What it does to the memory of real programs is tested end to end, elsewhere.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod config;
mod environment;
mod exit;
mod hosts;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
mod installed;
mod reach;
mod report;
mod signals;
mod support;
mod terminal;
