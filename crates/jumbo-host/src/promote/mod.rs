//! Huge pages for processes that run already, from outside.
//!
//! - [`Target`]: a process that can be promoted; [`Refusal`]: why another cannot be.
//! - [`PromotePlan`]: the blocks of a huge page that are worth it, what that gains and what it costs.
//! - [`Access`]: the method, of two: process_madvise(2), and a call in a thread of the process by ptrace(2).
//! - [`Pace`]: when the next block may be collapsed: rate, memory pressure, free huge pages.
//! - [`promote()`]: carries a plan out; [`split()`]: the way back.
//!
//! A block is looked at again right before it is collapsed, so a plan may be old: what the process has
//! unmapped or emptied meanwhile is passed over. A block that changes even after that costs at most its
//! own size, and a collapse changes no byte that any thread can read.
//!
//! Invariant: the memory that blocks are filled up with is bounded (`--max-waste`); a block that is not
//! half full stays as it is.

mod access;
mod pace;
mod plan;
mod refusal;
mod split;
mod target;
mod work;

pub use access::{Access, Method};
pub use pace::{Pace, Pause};
pub use plan::{Part, PromotePlan, Selection, left_out};
pub use refusal::Refusal;
pub use split::{Split, split};
pub use target::Target;
pub use work::{Failure, Outcome, Progress, Watcher, promote};
