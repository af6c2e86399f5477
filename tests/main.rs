//! End to end: real programs, with and without jumbo, on the kernel that is here.
//!
//! What is compared is what a user sees: output, exit status, and where the memory ended up, read from
//! the kernel's own smaps and from jumbo's report. One test binary, so that the support code is
//! compiled once; the modules are:
//!
//! - [`real_programs`]: CPython, Redis, PostgreSQL, Node, a Go and a static binary.
//! - [`launcher`]: exit status, signals, pipelines, children, environments.
//! - [`allocator`]: the `malloc` family, threads, forks, signals, other allocators.
//! - [`bound`]: the memory of programs that touch little of theirs.
//! - [`doors`]: calls by their name and by their number.
//! - [`export`]: metrics, read by promtool and by Prometheus.
//! - [`filters`]: programs that put a seccomp filter on themselves.
//! - [`fleet`]: two arms of a fleet, in Prometheus and in a CSV.
//! - [`free`]: large frees, with several threads and later.
//! - [`hostile`]: programs that mean harm to a command that looks at them.
//! - [`mappings`]: `mmap` and its kin.
//! - [`pool`]: pages set aside for the heap, and mimalloc on them.
//! - [`promote`]: programs that run already.
//! - [`page`]: measurements as a page, in a browser.
//! - [`memory`]: nothing resident that the program did not ask for.
//! - [`status`]: `jumbo status -p` of a program that is covered.
//! - [`reaper`]: memory given back after the program's end.
//! - [`segments`]: text and data on huge pages.
//! - [`shmem`]: shared memory on huge pages.
//! - [`shmem_user`]: that from user space.
//! - [`top`]: `jumbo top` on a terminal.
//! - [`unreached`]: programs that LD_PRELOAD does not reach.
//! - [`limits`]: resource limits, lack of privilege, debuggers.
//!
//! A test that cannot run here says `SKIP name: reason`; with `JUMBO_TEST_STRICT=1` it fails.

#![expect(clippy::unwrap_used, reason = "a test says that it failed by a panic")]

mod allocator;
mod bound;
mod doors;
mod export;
mod filters;
mod fleet;
mod free;
mod hostile;
mod launcher;
mod limits;
mod mappings;
mod memory;
mod page;
mod pool;
mod promote;
mod real_programs;
mod reaper;
mod segments;
mod shmem;
mod shmem_user;
mod status;
mod support;
mod top;
mod unreached;
