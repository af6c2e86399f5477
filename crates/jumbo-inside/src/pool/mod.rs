//! The rules of a pool of huge pages, once for both of its faces.
//!
//! `jumbo::pool::Pool` hands out pages of a window of its own; [`heap::supply`](crate::heap) maps pages at the addresses
//! that the heap of a wrapped program asks for. What both must do alike is here:
//!
//! - [`PageCounts`]: how many pages there are, how many of them are surplus, who may have more, and which leave.
//! - [`Quota`]: a bound that several users share: all processes of a run, or users of one pool.
//! - [`Room`], [`Credit`]: what may be touched without the kernel killing a process for it.
//! - [`populate`]: memory that is resident now, or an error; [`make_huge`]: the same on THPs.
//!
//! It asks [`headroom`](crate::headroom) and [`sandbox`](crate::sandbox), and calls the kernel through [`sys`](crate::sys).
//! Invariant: nothing here allocates or holds a lock; each face has locks of its own.

mod counts;
mod huge;
mod quota;
mod room;

pub use counts::{Overcommit, PageCounts};
pub use huge::{make_huge, populate};
pub use quota::Quota;
pub(crate) use room::Credit;
pub use room::{Claim, Room};
