//! `jumbo text`: copies that are aligned, files that are primed, and what both say, with the kernel's smaps as the referee.
//!
//! - [`align`]: copies are what the originals are. [`prime`]: programs that were primed for are huge, started plainly.
//! - [`inspect`]: what is said of files and processes.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod align;
mod inspect;
mod prime;
mod support;
