//! jumbo: huge pages for the whole life of a program's memory.
//!
//! A page is provisioned, described, mapped and freed; each stage is a module of its own, and all of
//! them stand on [`kernel`] (the only door to the operating system) and [`units`]:
//!
//! - [`pool`]: huge pages provisioned ahead, on demand, and given back when idle.
//! - [`gather`]: memory given back with several threads, or later.
//! - [`teardown`]: a process that ends, and whose memory is given back by several processes meanwhile.
//! - [`knobs`]: what is written on a host, with one journal for all of it; [`host_pools`]: the kernel's hugetlb pools.
//! - [`status`]: snapshots of the host and of processes: what is huge, what is not, and why not.
//! - [`policy`]: what was asked and what the probe found, turned into a plan; pure, no I/O.
//!
//! Arrows point down: a mechanism never reaches into another's insides.

pub mod gather;
pub mod host_pools;
pub mod kernel;
pub mod knobs;
pub mod policy;
pub mod pool;
#[cfg(doctest)]
mod promises;
pub mod status;
pub mod teardown;
pub mod units;
pub mod whole_file;
