//! Tests of the pool: rules (`rules`), folios (`folios`), a naive model (`model`), many threads
//! (`threads`), regions (`regions`), the real sources (`sources`), and their limits (`processes`).
//!
//! `pool_referee` compares it with the kernel.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

#[path = "../books/mod.rs"]
mod books;
#[path = "../confined/mod.rs"]
mod confined;
mod folios;
mod host;
mod model;
mod processes;
mod regions;
mod rules;
mod sources;
mod threads;
