//! jumbo: huge pages for the whole life of a program's memory.
//!
//! A page is provisioned, described, mapped and freed. Each stage is a module of its own, and all of them use [`units`]:
//!
//! - [`pool`]: huge pages provisioned ahead, on demand, and given back when idle.
//! - [`vmemmap`]: metadata of pages that huge pages do not pay for.
//! - [`shmem`]: anonymous shared memory on huge pages.
//! - [`gather`]: memory given back with several threads, or later.
//! - [`status`]: what of this process is huge, and what is not.
//!
//! [`Root`] is where the kernel's files are; a test may have a folder of its own. The feature `serde` has what is counted
//! serialized. What the command `jumbo` does to a host and to other programs is in the crate `jumbo-host`.
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
//! // What of this process is huge, and what is not.
//! let root = Root::host();
//! let memory = usage(&root, std::process::id())?.total();
//! println!("{} of {} are in huge pages", memory.huge, memory.bytes);
//!
//! // A pool of huge pages, made on demand, up to two of them. `Hugetlb` has those of the kernel's own pool.
//! let pool = Pool::new(Thp::new()?, Placement::of_thread()?);
//! pool.set_overcommit(Pages(2));
//! let mut page = pool.take()?;
//! page.bytes_mut().fill(1);
//! drop(page);
//! assert_eq!(pool.counters().total, Pages(0));
//!
//! // Memory that several threads give back.
//! let mut table = OwnedMapping::new(Bytes(16 << 20))?;
//! table.fill(1);
//! let mut gather = Gather::new(Tunables::default());
//! gather.free(table);
//! println!("{} freed", Bytes(gather.finish()?.bytes));
//! # Ok(())
//! # }
//! ```
//!
//! The examples `buffer_pool`, `gather`, `shared_buffers` and `status` are whole programs. No function here takes a promise that the compiler
//! does not check, but for `Gather::add` and `shmem::Region::file`, which are `unsafe`: a program that forbids `unsafe` can use all the rest.

pub mod gather;
#[doc(hidden)]
pub mod kernel;
pub mod pool;
#[cfg(doctest)]
mod promises;
pub mod shmem;
pub mod status;
pub mod units;
pub mod vmemmap;

pub use kernel::{FileError, Root};
