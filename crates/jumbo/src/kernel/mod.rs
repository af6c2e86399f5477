//! The only door to the kernel: files under /proc and /sys, and the system calls that rustix lacks.
//!
//! Every path starts at a [`Root`], which tests replace with a folder of their own. This module knows
//! none of the mechanisms above it.

mod root;

pub use root::{FileError, Root};
