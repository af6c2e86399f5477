//! The backend of the command `jumbo`: reads and changes a host's settings and other processes.
//!
//! - [`kernel`]: files of /proc and /sys, system calls that rustix lacks, and starting a program.
//! - [`knobs`]: journalled writes to kernel settings; [`host_pools`]: the kernel's hugetlb pools.
//! - [`status`]: snapshots of the host and of processes: huge memory, base pages, and the reasons.
//! - [`policy`]: turns options and probe results into a plan; pure, no I/O.
//! - [`promote`]: huge pages for running processes.
//! - [`segments`]: executables and libraries from outside: program text on huge pages.
//! - [`whole_file`]: atomic writes of files.
//!
//! `tests/arrows.rs` has the allowed dependencies between modules.

pub mod host_pools;
pub mod kernel;
pub mod knobs;
pub mod policy;
pub mod promote;
pub mod segments;
pub mod status;
pub mod whole_file;

use jumbo::units;
