//! The processor's counters of TLB misses: [`Counters`].

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::FromRawFd as _;

/// Two counters of this thread, in the program alone.
pub(super) struct Counters([File; 2]);

/// `struct perf_event_attr` in its first version: 64 bytes.
const VERSION_0: u64 = 64;
/// PERF_TYPE_HW_CACHE.
const CACHE: u64 = 3;
/// PERF_COUNT_HW_CACHE_ITLB and PERF_COUNT_HW_CACHE_DTLB: reads (0) that miss (1).
const MISSES: [u64; 2] = [4 | 1 << 16, 3 | 1 << 16];
/// `exclude_kernel` and `exclude_hv`: these are free to all users.
const NOT_KERNEL: u64 = 1 << 5 | 1 << 6;

impl Counters {
    /// The figures' names.
    pub(super) const NAMES: [&str; 2] = ["itlb_misses", "dtlb_misses"];

    /// Starts to count; `None` where the machine has no such counters, or the kernel refuses them.
    pub(super) fn open() -> Option<Self> {
        let [instructions, data] = MISSES.map(count);
        Some(Self([instructions.ok()?, data.ok()?]))
    }

    /// Why there are none.
    pub(super) fn obstacle() -> Option<io::Error> {
        MISSES.into_iter().find_map(|which| count(which).err())
    }

    /// The counts so far.
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
    // Type and size, what is counted, no samples, and the flags.
    let attributes = [CACHE | VERSION_0 << 32, which, 0, 0, 0, NOT_KERNEL, 0, 0];
    let (any, close_on_exec) = (-1, 1 << 3);
    // SAFETY: the kernel reads the attributes, as many bytes as they say, and makes a descriptor.
    let opened = unsafe {
        let call = libc::SYS_perf_event_open;
        libc::syscall(call, attributes.as_ptr(), 0, any, any, close_on_exec)
    };
    match i32::try_from(opened) {
        // SAFETY: it is new, and no other code has it.
        Ok(number @ 0..) => Ok(unsafe { File::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}
