//! The memory of the calling process: `jumbo_status` and `jumbo_status_range`, over
//! [`jumbo::status`].

use std::ffi::{c_int, c_void};

use jumbo::Root;
use jumbo::status::Mapped;
use jumbo::status::process::usage;

use crate::failure::{Failure, status};
use crate::sized::{self, Plain};

/// Memory in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct jumbo_memory {
    /// Mapped, resident or not.
    pub mapped: u64,
    /// Resident, hugetlb included.
    pub resident: u64,
    /// Resident in huge pages that a PMD or more maps.
    pub huge: u64,
    /// Resident, and perhaps in huge pages that base pages map: only root can read that. 0 for a
    /// range.
    pub unknown: u64,
}

// SAFETY: integers of 8 bytes, on the 64-bit targets of jumbo.
unsafe impl Plain for jumbo_memory {}

/// Reads the memory of this process, from /proc/self/smaps. `size` is
/// `sizeof(struct jumbo_memory)`.
///
/// Errors: EINVAL; those of open(2) without /proc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_status(memory: *mut jumbo_memory, size: usize) -> c_int {
    status(|| {
        let total = usage(&Root::host(), std::process::id())?.total();
        let found = jumbo_memory {
            mapped: total.mapped.0,
            resident: total.bytes.0,
            huge: total.huge.0,
            unknown: total.unknown.0,
        };
        // SAFETY: the promise of the caller: a valid pointer.
        unsafe { sized::write(memory, size, found) }
    })
}

/// Reads the memory of a range of whole base pages, mapped or not; `mapped` is its length. Linux
/// 6.7. `size` is `sizeof(struct jumbo_memory)`.
///
/// Errors: EINVAL for a range that does not begin and end at a page; EFAULT beyond the address
/// space; ENOSYS for an older kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_status_range(
    start: *const c_void,
    length: usize,
    memory: *mut jumbo_memory,
    size: usize,
) -> c_int {
    status(|| {
        let page = rustix::param::page_size();
        let end = start.addr().checked_add(length);
        let whole = |end: &usize| (start.addr() | *end).is_multiple_of(page);
        let end = end.filter(whole).ok_or_else(|| {
            Failure::invalid(format!("{length} bytes at {start:?} are no whole pages"))
        })?;
        let mapped = Mapped::of(start.addr()..end)?;
        let found = jumbo_memory {
            mapped: length as u64,
            resident: mapped.bytes.0,
            huge: mapped.huge.0,
            unknown: 0,
        };
        // SAFETY: the promise of the caller: a valid pointer.
        unsafe { sized::write(memory, size, found) }
    })
}
