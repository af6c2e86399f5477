//! jumbo: huge pages for the memory of Rust programs, from provisioning to the free.
//!
//! - [`pool`]: a pool of huge pages, provisioned ahead or on demand, released when idle.
//! - [`vmemmap`]: page descriptors that cost nothing for huge pages.
//! - [`shmem`]: anonymous shared memory on huge pages.
//! - [`gather`]: frees by several threads, or in the background.
//! - [`populate`](mod@populate): memory made resident by several threads.
//! - [`mod@file`]: a file in memory, read-only, on huge pages.
//! - [`heap`]: a global allocator on huge pages.
//! - [`status`]: this process's memory by page size.
//! - [`units`]: the types of sizes, which all modules use.
//!
//! [`Root`] is the folder of the kernel's files; a test may use a fake tree. The feature `serde`
//! serializes counters. The crate `jumbo-host` has the parts of the command `jumbo` that concern
//! hosts and other programs.
//!
//! # Quickstart
//!
//! ```
//! #![forbid(unsafe_code)]
//!
//! use jumbo::gather::{Gather, OwnedMapping, Tunables};
//! use jumbo::Root;
//! use jumbo::pool::{Placement, Pool, Thp};
//! use jumbo::status::process::usage;
//! use jumbo::units::{Bytes, Pages};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The huge part of this process's memory.
//! let root = Root::host();
//! let memory = usage(&root, std::process::id())?.total();
//! println!("{} of {} are in huge pages", memory.huge, memory.bytes);
//!
//! // A pool of up to two THPs, made on demand. `Hugetlb` has pages of the kernel's own pool.
//! let pool = Pool::new(Thp::new()?, Placement::of_thread()?);
//! pool.set_overcommit(Pages(2));
//! let mut page = pool.take()?;
//! page.bytes_mut().fill(1);
//! drop(page);
//! assert_eq!(pool.counters().total, Pages(0));
//!
//! // Memory that several threads free.
//! let mut table = OwnedMapping::new(Bytes(16 << 20))?;
//! table.fill(1);
//! let mut gather = Gather::new(Tunables::default());
//! gather.free(table);
//! println!("{} freed", Bytes(gather.finish()?.bytes));
//! # Ok(())
//! # }
//! ```
//!
//! The examples `buffer_pool`, `gather`, `heap`, `shared_buffers`, `status` and `sum_file` are
//! complete programs. Only `Gather::add`, `shmem::Region::file` and `attach`, and `file::Map::open` are
//! `unsafe`: a program that forbids `unsafe` can use all the rest.

#[cfg(test)]
mod fake;
pub mod file;
pub mod gather;
pub mod heap;
mod mutex;
pub mod pool;
pub mod populate;
#[cfg(doctest)]
mod promises;
pub mod shmem;
pub mod status;
pub mod units;
pub mod vmemmap;

#[doc(inline)]
pub use jumbo_sys::files::{FileError, Root};
