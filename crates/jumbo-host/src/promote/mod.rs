//! Huge pages for running processes, from outside.
//!
//! - [`Target`]: a process that can be promoted; [`Refusal`]: the reason why another cannot be.
//! - [`PromotePlan`]: the blocks to collapse, their gain and cost. A block has the PMD size.
//! - [`Access`]: the permission to advise its memory, by process_madvise(2).
//! - [`Pace`]: limits by rate, memory pressure and free huge pages.
//! - [`promote()`]: carries a plan out; [`split()`]: reverts it.
//!
//! Each block is checked again right before it is collapsed, so a plan may be stale: blocks that
//! the process has unmapped or emptied are skipped. A block that changes even later costs at most
//! its size. A collapse changes no byte that any thread can read.
//!
//! Invariant: the memory that fills up blocks is bounded (`--max-waste`); a block less than half
//! full stays on base pages.

mod access;
mod pace;
mod plan;
mod refusal;
mod split;
mod target;
mod work;

pub use access::{Access, missing_privilege};
pub use pace::{Pace, Pause};
pub use plan::{Part, PromotePlan, Selection, left_out};
pub use refusal::{DESCRIPTORS_HINT, Refusal};
pub use split::{Split, split};
pub use target::{Target, open_program};
pub use work::{Failure, Outcome, Progress, Watcher, promote};
