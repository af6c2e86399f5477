//! Tests of `jumbo files` and `jumbo text`: aligned copies, primed files, and reports, checked
//! against smaps.
//!
//! - [`align`]: aligned copies equal their originals. [`prime`]: text of primed programs is huge
//!   after a plain start.
//! - [`show`]: reports about files and processes. [`data`]: data files.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod align;
mod data;
mod prime;
mod show;
mod support;
