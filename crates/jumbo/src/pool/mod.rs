//! Provision: huge pages made ahead of their use, and given back when nobody needs them.
//!
//! - [`host`]: the kernel's own pools, changed by plans that can be undone.

pub mod host;
