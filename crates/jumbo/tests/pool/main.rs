//! The pool: by its rules (`rules`), its folios (`folios`), against a naive model (`model`), from many threads (`threads`), as regions
//! (`regions`), and over the real sources (`sources`) and at their limits (`processes`). Against the kernel: `pool_referee`.
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
