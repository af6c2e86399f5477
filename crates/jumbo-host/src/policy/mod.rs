//! What was asked and what the probe found, turned into a plan. Pure: no I/O happens here.
//!
//! - [`Orders`] and [`PoolRequest`]: what a user asks of `jumbo run`.
//! - [`elf`] and [`Reach`]: whether LD_PRELOAD gets into a program, read from the program's own bytes.
//! - [`RunPlan`]: what follows: the environment, the [`Orders`], and what will be on huge pages.
//!
//! Of [`kernel`](crate::kernel) it knows the THP table that its caller read. Invariant: the same question has the same plan.

pub mod elf;
mod plan;
mod pool;
mod reach;
pub mod variables;

pub use jumbo_inside::orders::{
    DataMode, FreeMode, HeapMode, Keep, KeepError, MAX_FREE_WORKERS, MAX_POOL, MaxWaste,
    MaxWasteError, Mode, Orders, PoolOrder, ReaperMode, ShmMode, TextMode,
};
pub use plan::{HostSupport, MemoryPlan, RunPlan, Tunable};
pub use pool::{PoolError, PoolRequest};
pub use reach::Reach;
