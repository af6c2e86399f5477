//! Turns the options of `jumbo run` and the results of the probe into a plan. Pure: no I/O.
//!
//! - [`Orders`] and [`PoolRequest`]: the options.
//! - [`elf`] and [`Reach`]: whether LD_PRELOAD gets into a program, read from its ELF headers.
//! - [`RunPlan`]: the environment, the [`Orders`], and the memory that will be on huge pages.
//!
//! Invariant: the same input has the same plan. The caller reads the THP table.

pub mod elf;
mod plan;
mod pool;
mod reach;
pub mod variables;

pub use jumbo_inside::orders::{
    DataMode, FilesMode, FreeMode, HeapMode, Keep, KeepError, MAX_FREE_WORKERS, MAX_POOL,
    MAX_POPULATE_WORKERS, MaxWaste, MaxWasteError, Mode, Orders, PoolOrder, ReaperMode, ShmMode,
    TextMode,
};
pub use plan::{HostSupport, MemoryPlan, RunPlan};
pub use pool::{PoolError, PoolRequest};
pub use reach::Reach;
