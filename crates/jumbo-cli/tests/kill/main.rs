//! `jumbo kill`: what it ends, what it gains, and what it leaves as it was.
//!
//! - [`gain`]: memory given back from both sides, and the processes for which that must not be done.
//! - [`alive`]: targets that go on, and interrupted commands: nothing of the target has changed.
//! - [`refuse`]: what cannot be ended.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod alive;
mod gain;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
mod refuse;
mod victim;
