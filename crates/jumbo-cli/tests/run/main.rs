//! Tests of `jumbo run` as a launcher: the program must not notice it.
//!
//! The end-to-end tests cover the memory of real programs.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod config;
mod environment;
mod exit;
mod hosts;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
mod installed;
#[path = "../../../../tests/support/needs.rs"]
mod needs;
mod reach;
mod report;
mod signals;
mod support;
mod terminal;
