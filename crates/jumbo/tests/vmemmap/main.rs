//! Tests of the table of page descriptors: a plain model (`model`), many threads (`threads`),
//! memory according to the kernel (`memory`), and the limit of a memory cgroup (`limits`).
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../books/mod.rs"]
mod books;
#[path = "../confined/mod.rs"]
mod confined;
#[allow(dead_code, reason = "shared with the pool's tests")]
#[path = "../pool/host.rs"]
mod host;
mod limits;
mod memory;
mod model;
mod threads;
