//! Hardware counters of TLB misses: [`TlbCounters`].

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::FromRawFd as _;

/// Two counters of this thread, in user mode.
pub(super) struct TlbCounters([File; 2]);

const PERF_ATTR_SIZE_VER0: u64 = 64;
const PERF_TYPE_HW_CACHE: u64 = 3;
/// PERF_COUNT_HW_CACHE_ITLB and PERF_COUNT_HW_CACHE_DTLB: reads (0) that miss (1).
const TLB_MISSES: [u64; 2] = [4 | 1 << 16, 3 | 1 << 16];
/// `exclude_kernel` and `exclude_hv`: allowed to all users.
const EXCLUDE_KERNEL_HV: u64 = 1 << 5 | 1 << 6;

impl TlbCounters {
    pub(super) const NAMES: [&str; 2] = ["itlb_misses", "dtlb_misses"];

    /// Starts the counters, if the machine has them and the kernel permits.
    pub(super) fn open() -> io::Result<Self> {
        let [instructions, data] = TLB_MISSES.map(count);
        Ok(Self([instructions?, data?]))
    }

    pub(super) fn read(&self) -> io::Result<[u64; 2]> {
        let mut counts = [0; 2];
        for (mut file, count) in self.0.iter().zip(&mut counts) {
            let mut bytes = [0; 8];
            file.read_exact(&mut bytes)?;
            *count = u64::from_ne_bytes(bytes);
        }
        Ok(counts)
    }
}

/// perf_event_open(2), for this thread on any CPU.
fn count(which: u64) -> io::Result<File> {
    // Type and size, config, no sampling, and flags.
    let attributes = [
        PERF_TYPE_HW_CACHE | PERF_ATTR_SIZE_VER0 << 32,
        which,
        0,
        0,
        0,
        EXCLUDE_KERNEL_HV,
        0,
        0,
    ];
    let (any, close_on_exec) = (-1, 1 << 3);
    // SAFETY: the kernel reads the attributes by their size field, and creates a descriptor.
    let opened = unsafe {
        let call = libc::SYS_perf_event_open;
        libc::syscall(call, attributes.as_ptr(), 0, any, any, close_on_exec)
    };
    match i32::try_from(opened) {
        // SAFETY: the descriptor is new and has no other owner.
        Ok(number @ 0..) => Ok(unsafe { File::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}
