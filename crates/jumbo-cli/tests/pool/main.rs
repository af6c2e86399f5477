//! `jumbo pool` and `jumbo thp` from outside: on folders that stand in for hosts, and on this host.
//!
//! - [`hosts`]: many nodes, other page sizes, no hugetlb; what is printed and what is written.
//! - [`host`]: the pool of this host, resized and put back.
//! - [`demoted`]: pages split into smaller ones.
//! - [`cut_short`]: killed and interrupted at every step.
//! - [`steered`]: a pool by demand, `wait` and `watch`, with programs that want pages.
//! - [`thp`]: the same of the tables of transparent huge pages, and of HVO. [`vmemmap`]: what HVO saves, and pages made anew.
//! - [`measured`]: `jumbo bench pool`, which sets the pool of this host as well. [`shared`]: `jumbo bench shmem`, which sets
//!   its controls too.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod cut_short;
mod demoted;
mod host;
mod hosts;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
mod measured;
mod shared;
mod steered;
mod support;
mod thp;
mod vmemmap;
