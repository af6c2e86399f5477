//! Memory made resident and freed by several threads: `jumbo_populate`, over
//! [`mod@jumbo::populate`], and `jumbo_free_ranges`, over [`jumbo::gather`].

use std::ffi::{c_int, c_void};

use jumbo::gather::{Gather, Mode, Operation, Tunables, end_workers};
use jumbo::populate::{Access, populate};
use libc::iovec;
use rustix::io::Errno;

use crate::failure::{Failure, call, status};

/// Free and unmap private anonymous memory: munmap(2).
pub const JUMBO_FREE_UNMAP: u32 = 1;
/// Return at once: the memory is freed in the background, and errors are lost.
pub const JUMBO_FREE_BACKGROUND: u32 = 2;
/// Populate with the pages that a read finds: of a file, of shared memory, or the zero page.
pub const JUMBO_POPULATE_READ: u32 = 1;

/// Makes a range of addresses resident, by at most `threads` threads, the caller included; 0: its
/// CPUs, at most 4. Returns the number of threads, or -1. No byte changes that a thread could read.
/// Linux 5.14.
///
/// Huge pages come where the range is advised (MADV_HUGEPAGE). A range below 64 MiB is populated by
/// the caller alone. Other threads may use the range meanwhile.
///
/// Errors: EINVAL for flags, a range that does not begin and end at a page, memory without that
/// access or of a driver, or an older kernel; ENOMEM without memory, or for a hole in the range;
/// EFAULT without a hugetlb page, or behind the end of a file; EHWPOISON; EAGAIN in a seccomp
/// filter, or after vfork(2). A part of the range may be resident then.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_populate(
    start: *mut c_void,
    length: usize,
    flags: u32,
    threads: u32,
) -> c_int {
    call(-1, || {
        let access = match flags {
            0 => Access::Write,
            JUMBO_POPULATE_READ => Access::Read,
            _ => return Err(Failure::invalid(format!("flags {flags:#x}"))),
        };
        let page = rustix::param::page_size();
        if !(start.addr() | length).is_multiple_of(page) {
            let message = format!("{length} bytes at {start:?} are no whole pages");
            return Err(Failure::invalid(message));
        }
        let threads = populate(start.addr(), length, access, threads)
            .map_err(|errno| Failure::new(errno, format!("{length} bytes at {start:?}")))?;
        Ok(c_int::try_from(threads).unwrap_or(c_int::MAX))
    })
}

/// Frees ranges of private anonymous memory by several threads, where that is faster. Without
/// `JUMBO_FREE_UNMAP` they stay mapped, and read as zeroes: MADV_DONTNEED.
///
/// No thread uses the ranges until the call returns; in the background, never again. The worker
/// threads stay for later calls, and are unknown to the C library: see `jumbo_end_workers`.
///
/// Errors: EINVAL for unknown flags, or a range that is empty or does not begin and end at a page,
/// and no range is freed; else the error of the first range that the kernel refused, and the
/// others are free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_free_ranges(
    ranges: *const iovec,
    count: usize,
    flags: u32,
) -> c_int {
    status(|| {
        if flags & !(JUMBO_FREE_UNMAP | JUMBO_FREE_BACKGROUND) != 0 {
            return Err(Failure::invalid(format!("flags {flags:#x}")));
        }
        if count == 0 {
            return Ok(());
        }
        // `isize::MAX` bytes bound a slice.
        if ranges.is_null() || !ranges.is_aligned() || count > isize::MAX as usize / 16 {
            return Err(Failure::invalid(format!("{count} ranges at {ranges:?}")));
        }
        // SAFETY: the promise of the caller: so many ranges.
        let ranges = unsafe { std::slice::from_raw_parts(ranges, count) };
        let page = rustix::param::page_size();
        let mut wanted = Vec::with_capacity(count);
        for range in ranges {
            let start = range.iov_base.addr();
            let end = start.checked_add(range.iov_len);
            let whole = |end: &usize| *end > start && (start | *end).is_multiple_of(page);
            let end = end.filter(whole).ok_or_else(|| {
                let message = format!("{} bytes at {start:#x} are no pages", range.iov_len);
                Failure::new(Errno::INVAL, message)
            })?;
            wanted.push(start..end);
        }
        let operation = match flags & JUMBO_FREE_UNMAP {
            0 => Operation::Zap,
            _ => Operation::Unmap,
        };
        let mode = match flags & JUMBO_FREE_BACKGROUND {
            0 => Mode::Sync,
            _ => Mode::Background,
        };
        let mut gather = Gather::new(Tunables {
            mode,
            ..Tunables::default()
        });
        for range in wanted {
            // SAFETY: the promise of the caller: the ranges are its own, and no thread uses them.
            unsafe { gather.add(range, operation)? };
        }
        Ok(gather.finish().map(drop)?)
    })
}

/// Waits for frees in the background, and ends the worker threads. Call it before setuid(2),
/// setns(2) and the like: a worker would keep the old user.
///
/// Errors: EBUSY if a worker still runs after ten seconds.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_end_workers() -> c_int {
    status(|| match end_workers() {
        true => Ok(()),
        false => Err(Failure::new(
            Errno::BUSY,
            "the workers did not end in ten seconds",
        )),
    })
}
