//! jumbo: huge pages for the whole life of a program's memory.
//!
//! A page is provisioned, described, mapped and freed. Each stage is a module of its own. All of them use [`units`], and
//! [`kernel`] for the files of /proc and /sys and the system calls that rustix lacks:
//!
//! - [`pool`]: huge pages provisioned ahead, on demand, and given back when idle.
//! - [`vmemmap`]: metadata of pages that huge pages do not pay for.
//! - [`segments`]: program text on huge pages.
//! - [`shmem`]: anonymous shared memory on huge pages.
//! - [`gather`]: memory given back with several threads, or later.
//! - [`teardown`]: a process that ends, and whose memory is given back by several processes meanwhile.
//! - [`knobs`]: what is written on a host, with one journal for all of it; [`host_pools`]: the kernel's hugetlb pools.
//! - [`status`]: snapshots of the host and of processes: what is huge, what is not, and why not.
//! - [`policy`]: what was asked and what the probe found, turned into a plan; pure, no I/O.
//! - [`whole_file`]: files written whole or not at all.
//!
//! Which module uses which is a table in `tests/arrows.rs`: no mechanism uses the parts of another.
//!
//! # Quickstart
//!
//! ```
//! #![forbid(unsafe_code)]
//!
//! use jumbo::gather::{Gather, OwnedMapping, Tunables};
//! use jumbo::kernel::Root;
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
//! does not check, but for `Gather::add` and `shmem::Region::files`, which are `unsafe`: a program that forbids `unsafe` can use all the rest.

pub mod gather;
pub mod host_pools;
pub mod kernel;
pub mod knobs;
pub mod policy;
pub mod pool;
#[cfg(doctest)]
mod promises;
pub mod segments;
pub mod shmem;
pub mod status;
pub mod teardown;
pub mod units;
pub mod vmemmap;
pub mod whole_file;
