//! What jumbo does inside the programs that it wraps.
//!
//! The preload library is made of this, and nothing else of ours runs in a wrapped program. So there is no standard
//! library here and no allocator: the compiler keeps what a comment would have to ask for. Where something cannot be done the
//! caller is told, and the program's own allocator or the kernel does it.
//!
//! - [`events`]: the one door: what a program does that mechanisms hear, and in which order.
//! - [`heap`]: large allocations in an address window of their own, and the program's mappings.
//! - [`keep`]: how much of what is freed stays for the next allocations.
//! - [`gather`]: memory given back by several threads, or later.
//! - [`reaper`]: memory given back after the program's end, by a sibling process.
//! - [`segments`]: the program's text and data, moved to huge pages.
//! - [`density`]: whether memory may have huge pages now, and the scan that finds out.
//! - [`shmem`]: memory that the program shares, on huge pages.
//! - [`watch`]: the thread that looks, now and then, what of it has become worth while.
//! - [`ledger`]: what all of them did in each process, for the launcher to read.
//! - [`orders`]: what the launcher tells the library, in one environment variable.
//! - [`pool`]: the rules of a pool of huge pages, for the heap and for `jumbo::pool`.
//! - [`headroom`], [`sandbox`]: what may be touched and called without harm; [`bpf`]: what a filter would say to a call.
//! - [`sys`], [`sync`], [`units`]: system calls that rustix lacks, locks, sizes.
//!
//! This crate is no public interface: `jumbo` is. Its functions take addresses; those whose callers have to keep a promise
//! are `unsafe`, and say which.

#![cfg_attr(not(test), no_std)]

pub mod bpf;
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
mod proc;
#[cfg(doctest)]
mod promises;
pub mod reaper;
pub mod sandbox;
pub mod segments;
pub mod shmem;
mod standing;
pub mod sync;
pub mod sys;
pub mod units;
pub mod watch;
