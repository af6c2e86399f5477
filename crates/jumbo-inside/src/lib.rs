//! The code that runs inside the programs that jumbo wraps.
//!
//! The preload library calls only this crate. The crate has no standard library and no allocator.
//! Where an operation fails, the program's own allocator or the kernel takes over.
//!
//! - [`events`]: the calls of the program that mechanisms hear, and their order.
//! - [`heap`]: large allocations in an address range of their own, and the program's mappings.
//! - [`slab`]: blocks below 128 KiB, with their records apart.
//! - [`keep`]: bound of the freed memory that stays for later allocations.
//! - [`gather`]: memory freed by several threads, or in the background.
//! - [`populate`]: memory made resident by several threads.
//! - [`reaper`]: memory freed after the program's end, by a reaper process.
//! - [`segments`]: text and data of the program, moved to huge pages.
//! - [`density`]: decides whether memory may have huge pages now, and scans it.
//! - [`shmem`]: shared memory on huge pages.
//! - [`watch`]: the background scanner, a thread or a process beside the program.
//! - [`ledger`]: counters of each process, for the launcher.
//! - [`debug`]: decisions as lines of text.
//! - [`orders`]: the configuration that the launcher passes in one environment variable.
//! - [`pool`]: rules of a pool of huge pages, for the heap and for `jumbo::pool`.
//! - [`headroom`]: memory and tasks that are available. [`sandbox`]: detects a seccomp filter.
//!   [`bpf`]: evaluates one.
//! - Locks: [`sync`].
//!
//! The crate `jumbo-sys` has the system calls and the units. The public interface is the crate
//! `jumbo`. Functions here that take addresses are `unsafe` where the caller must keep a promise.

#![cfg_attr(not(test), no_std)]

pub mod bpf;
pub mod debug;
pub mod density;
pub mod events;
pub mod gather;
pub mod headroom;
pub mod heap;
pub mod keep;
pub mod ledger;
mod one_page;
pub mod orders;
pub mod pool;
pub mod populate;
#[cfg(doctest)]
mod promises;
pub mod reaper;
pub mod sandbox;
pub mod segments;
pub mod shmem;
pub mod slab;
mod standing;
pub mod sync;
pub mod watch;

pub use jumbo_sys::one_page;
