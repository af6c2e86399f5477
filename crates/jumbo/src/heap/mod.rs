//! Large allocations in an address window of their own; what the preload library calls.

pub mod ledger;
