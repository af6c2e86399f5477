//! Giving memory back with several threads, or later: [`Gather`].
//!
//! The kernel frees an address range on one thread. But MADV_DONTNEED takes the address space's lock shared, so several
//! threads that each zap a part of a range do work at the same time, and one munmap(2) of what is empty then takes a moment.
//! A [`Gather`] collects ranges in a batch and frees them so.
//!
//! ```
//! use jumbo::gather::{Gather, Operation, Tunables};
//! use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
//! # fn main() -> Result<(), Box<dyn core::error::Error>> {
//! let (length, prot) = (1 << 20, ProtFlags::READ | ProtFlags::WRITE);
//! // SAFETY: a new mapping where the kernel likes disturbs nobody.
//! let start = unsafe { mmap_anonymous(core::ptr::null_mut(), length, prot, MapFlags::PRIVATE)? };
//! let range = start.addr()..start.addr() + length;
//! let mut gather = Gather::new(Tunables::default());
//! // SAFETY: nobody knows of this memory.
//! unsafe { gather.add(range, Operation::Unmap)? };
//! assert_eq!(gather.finish()?.bytes, 1 << 20);
//! # Ok(())
//! # }
//! ```

pub use jumbo_inside::gather::{FreeError, Freed, Gather, Mode, Operation, Tunables};
