//! Tests of `jumbo pool` and `jumbo thp`, on fake hosts and on this host.
//!
//! - [`hosts`]: many nodes, other page sizes, no hugetlb; output and writes.
//! - [`host`]: the pool of this host, resized and restored.
//! - [`demoted`]: huge pages split into smaller ones.
//! - [`cut_short`]: commands killed and interrupted at every step.
//! - [`steered`]: a pool by demand, `wait` and `watch`, with programs that request pages.
//! - [`thp`]: transparent huge pages and HVO. [`vmemmap`]: savings of HVO, and reallocated pages.
//! - [`measured`]: `jumbo bench pool`, which sets the pool of this host. [`shared`]: `jumbo bench
//! shmem`, which sets the controls of shared memory.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod cut_short;
mod demoted;
mod host;
mod hosts;
#[path = "../../../../tests/support/inherited.rs"]
mod inherited;
mod measured;
#[path = "../../../../tests/support/needs.rs"]
mod needs;
mod shared;
mod steered;
mod support;
mod thp;
mod vmemmap;
