//! Tests of `jumbo text`: aligned copies, primed files, and reports, checked against smaps.
//!
//! - [`align`]: aligned copies equal their originals. [`prime`]: text of primed programs is huge
//!   after a plain start.
//! - [`inspect`]: reports about files and processes.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod align;
mod inspect;
mod prime;
mod support;
