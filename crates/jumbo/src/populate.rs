//! Memory made resident by several threads: [`populate`], the counterpart of
//! [`gather`](crate::gather).
//!
//! ```
//! use jumbo::gather::OwnedMapping;
//! use jumbo::populate::{Access, populate};
//! use jumbo::units::Bytes;
//!
//! let table = OwnedMapping::new(Bytes(1 << 20))?;
//! let threads = populate(table.as_ptr().addr(), table.len(), Access::Write, 0)?;
//! assert!(threads >= 1 && table[0] == 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use jumbo_inside::populate::{Access, MIN_BYTES, populate};
