//! The backend of the command `jumbo`: the kernel's files, and what is read and written there for a host and for other programs.
//!
//! - [`kernel`]: files of /proc and /sys, system calls that rustix lacks, and starting a program.
//! - [`knobs`]: what is written on a host, with one journal for all of it; [`host_pools`]: the kernel's hugetlb pools.
//! - [`status`]: snapshots of the host and of processes: what is huge, what is not, and why not.
//! - [`policy`]: what was asked and what the probe found, turned into a plan; pure, no I/O.
//! - [`promote`]: huge pages for processes that run already.
//! - [`segments`]: executables and libraries from outside: program text on huge pages.
//! - [`teardown`]: a process that ends, and whose memory is given back by several processes meanwhile.
//! - [`whole_file`]: files written whole or not at all.
//!
//! Which module uses which is a table in `tests/arrows.rs`: no mechanism uses the parts of another. What a Rust program wants of
//! huge pages for itself is the crate [`jumbo`].

pub mod host_pools;
pub mod kernel;
pub mod knobs;
pub mod policy;
pub mod promote;
pub mod segments;
pub mod status;
pub mod teardown;
pub mod whole_file;

use jumbo::units;
