//! What was asked and what the probe found, turned into a plan. Pure: no I/O happens here.

mod order;

pub use order::Orders;
