//! Misuse of memory that does not compile in a program that forbids `unsafe`.
//!
//! [`crate::shmem::Region::file`] lends the file, through which a holder could remove a region's
//! memory:
//!
//! ```compile_fail,E0133
//! #![forbid(unsafe_code)]
//! use jumbo::{shmem::Region, units::Bytes};
//! let region = Region::builder(Bytes(8192)).build().unwrap();
//! region.file();
//! ```
//!
//! [`crate::gather::Gather::add`], the one call that takes addresses:
//!
//! ```compile_fail,E0133
//! #![forbid(unsafe_code)]
//! use jumbo::gather::{Gather, Operation, Tunables};
//! Gather::new(Tunables::default()).add(4096..8192, Operation::Unmap);
//! ```
//!
//! Code of wrapped programs:
//!
//! ```compile_fail,E0433
//! #![forbid(unsafe_code)]
//! jumbo::heap::copy(4096, 8192, 8);
//! ```
//!
//! Bare system calls:
//!
//! ```compile_fail,E0433
//! #![forbid(unsafe_code)]
//! jumbo::sys::collapse(4096, 4096);
//! ```
//!
//! A mapping after its free:
//!
//! ```compile_fail,E0382
//! #![forbid(unsafe_code)]
//! use jumbo::gather::{Gather, OwnedMapping, Tunables};
//! use jumbo::units::Bytes;
//! let mut mapping = OwnedMapping::new(Bytes(4096)).unwrap();
//! Gather::new(Tunables::default()).free(mapping);
//! mapping[0] = 1;
//! ```
//!
//! A page after its return to the pool:
//!
//! ```compile_fail,E0505
//! #![forbid(unsafe_code)]
//! use jumbo::pool::{Model, Placement, Pool};
//! let pool = Pool::new(Model::new(&[16]).unwrap(), Placement::of_thread().unwrap());
//! let mut page = pool.take().unwrap();
//! let bytes = page.bytes_mut();
//! drop(page);
//! bytes[0] = 1;
//! ```
//!
//! Bytes beyond the end of a shrunk region:
//!
//! ```compile_fail,E0502
//! #![forbid(unsafe_code)]
//! use jumbo::{shmem::Region, units::Bytes};
//! let mut region = Region::builder(Bytes(8192)).build().unwrap();
//! let bytes = region.bytes(4096..8192).unwrap();
//! region.shrink(Bytes(4096)).unwrap();
//! bytes[0].store(1, std::sync::atomic::Ordering::Relaxed);
//! ```
