//! Rules of a pool of huge pages, for both of its users.
//!
//! `jumbo::pool::Pool` hands out pages of a window of its own; [`heap::supply`](crate::heap) maps
//! pages at the addresses that the heap of a wrapped program requests. The shared parts:
//!
//! - [`PageCounts`]: persistent and surplus pages, and the rules by which they change.
//! - [`Quota`]: a bound that several users share: all processes of a run, or users of one pool.
//! - [`Room`], `Credit`: memory that may be touched without an OOM kill.
//! - [`populate`]: resident memory or an error; [`make_huge`]: the same on THPs.
//!
//! It uses [`headroom`](crate::headroom), [`sandbox`](crate::sandbox) and [`jumbo_sys`].
//! Invariant: nothing here allocates or holds a lock; each user has its own locks.

mod counts;
mod huge;
mod quota;
mod room;

pub use counts::{Overcommit, PageCounts};
pub use huge::{make_huge, populate};
pub use quota::Quota;
pub(crate) use room::Credit;
pub use room::{Claim, Room};
