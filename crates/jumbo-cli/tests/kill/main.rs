//! Tests of `jumbo kill`.
//!
//! - [`gain`]: release of memory beside the kernel, and processes for which it is not allowed.
//! - [`alive`]: targets that survive, and interrupted commands: the target is unchanged.
//! - [`refuse`]: processes that jumbo refuses to end.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod alive;
mod gain;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
#[path = "../../../../tests/support/needs.rs"]
mod needs;
mod refuse;
mod victim;
