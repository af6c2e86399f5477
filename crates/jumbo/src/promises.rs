//! What a program that forbids `unsafe` tries with memory by its address: none of it compiles.
//!
//! The one call that takes addresses is [`crate::gather::Gather::add`], beside which a program stands that compiles.
//! [`crate::shmem::Region::file`] lends what can take memory away from under a region:
//!
//! ```compile_fail,E0133
//! #![forbid(unsafe_code)]
//! use jumbo::{shmem::Region, units::Bytes};
//! let region = Region::builder(Bytes(8192)).build().unwrap();
//! region.file();
//! ```
//!
//! Nor does a call by address:
//!
//! ```compile_fail,E0133
//! #![forbid(unsafe_code)]
//! use jumbo::gather::{Gather, Operation, Tunables};
//! Gather::new(Tunables::default()).add(4096..8192, Operation::Unmap);
//! ```
//!
//! What runs inside wrapped programs is not to be had here:
//!
//! ```compile_fail,E0433
//! #![forbid(unsafe_code)]
//! jumbo::heap::copy(4096, 8192, 8);
//! ```
//!
//! Nor are the bare system calls:
//!
//! ```compile_fail,E0603
//! #![forbid(unsafe_code)]
//! jumbo::kernel::sys::collapse(4096, 4096);
//! ```
//!
//! Memory that was given up is not used again:
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
//! Nor is a page that went back to its pool:
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
//! Nor are bytes of a region that was cut off:
//!
//! ```compile_fail,E0502
//! #![forbid(unsafe_code)]
//! use jumbo::{shmem::Region, units::Bytes};
//! let mut region = Region::builder(Bytes(8192)).build().unwrap();
//! let bytes = region.bytes(4096..8192).unwrap();
//! region.shrink(Bytes(4096)).unwrap();
//! bytes[0].store(1, std::sync::atomic::Ordering::Relaxed);
//! ```
