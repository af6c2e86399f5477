//! End-to-end tests: real programs, with and without jumbo, on this kernel.
//!
//! They compare what a user sees: output, exit status, and the placement of memory according to
//! smaps and to jumbo's report. They form one test binary, so that the support code compiles once.
//!
//! - [`real_programs`]: CPython, Redis, PostgreSQL, Node, a Go and a static binary.
//! - [`launcher`]: exit status, signals, pipelines, children, environments.
//! - [`allocator`]: the `malloc` family, threads, forks, signals, other allocators.
//! - [`bound`]: memory of sparse programs.
//! - [`doors`]: calls by name and by number.
//! - [`export`]: metrics, read by promtool and by Prometheus.
//! - [`files`]: data files that a program maps.
//! - [`filters`]: programs that install a seccomp filter.
//! - [`fleet`]: two arms of a fleet, in Prometheus and in a CSV.
//! - [`free`]: large frees, by several threads and in the background.
//! - [`guest`]: what a program must not notice of the library at its start.
//! - [`hostile`]: programs that attack a command that inspects them.
//! - [`mappings`]: `mmap` and related calls.
//! - [`pool`]: pages reserved for the heap.
//! - [`promote`]: running programs.
//! - [`page`]: HTML reports of measurements, in a browser.
//! - [`memory`]: memory is huge, and no more of it is resident than the program requested.
//! - [`status`]: `jumbo status -p` of a covered program.
//! - [`reaper`]: memory freed after the program's end.
//! - [`segments`]: text and data on huge pages.
//! - [`shmem`]: shared memory on huge pages.
//! - [`top`]: `jumbo top` on a terminal.
//! - [`unreached`]: programs that LD_PRELOAD cannot reach.
//! - [`limits`]: resource limits, lack of privilege, debuggers.
//!
//! A test that cannot run here says `SKIP name: reason`; with `JUMBO_TEST_STRICT=1` it fails.

#![expect(clippy::unwrap_used, reason = "a test says that it failed by a panic")]

mod allocator;
mod bound;
mod doors;
mod export;
mod files;
mod filters;
mod fleet;
mod free;
mod guest;
mod hostile;
mod launcher;
mod limits;
mod mappings;
mod memory;
mod page;
mod pool;
mod populate;
mod promote;
mod real_programs;
mod reaper;
mod segments;
mod shmem;
mod status;
mod support;
mod top;
mod unreached;
