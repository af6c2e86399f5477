//! Allocations: pages of the kernel's pool, and regions that may have smaller ones.
//!
//! Invariant: an allocation is complete and present when it is returned, or nothing of it is left
//! and no other memory changed.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jumbo::units::PageSize;
use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::environment::{Level, settings, tell};
use crate::{mounts, sizes};

/// Bytes that the processors of today transfer at once.
const CACHE_LINE_BYTES: usize = 64;

/// A mapping, and its part that the program has.
struct Allocation {
    start: *mut c_void,
    length: usize,
}

// SAFETY: the address of a mapping, which is of no thread.
unsafe impl Send for Allocation {}

/// By the address that the program has.
static ALLOCATIONS: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());

fn allocations() -> MutexGuard<'static, BTreeMap<usize, Allocation>> {
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(address: *mut c_void, start: *mut c_void, length: usize) -> *mut c_void {
    allocations().insert(address.addr(), Allocation { start, length });
    address
}

/// Rounds a length up to whole pages.
///
/// # Errors
/// EINVAL for 0, ENOMEM beyond the address space.
pub(crate) fn whole(length: usize, size: PageSize) -> Result<usize> {
    let page = usize::try_from(size.bytes()).map_err(|_| Errno::NOMEM)?;
    match length {
        0 => Err(Errno::INVAL),
        _ => length.checked_next_multiple_of(page).ok_or(Errno::NOMEM),
    }
}

/// Maps whole huge pages of the default size.
///
/// # Errors
/// Those of mmap(2); ENOMEM if the pool or a cgroup has too few pages.
pub(crate) fn pages(length: usize) -> Result<*mut c_void> {
    let (start, length) = huge(length)?;
    Ok(record(start, start, length))
}

fn huge(length: usize) -> Result<(*mut c_void, usize)> {
    let size = sizes::default()?;
    let length = whole(length, size)?;
    let file = mounts::unlinked(size, false)?;
    let mut flags = MapFlags::PRIVATE;
    if settings().no_reserve {
        flags |= MapFlags::NORESERVE;
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let start = unsafe { mm::mmap(ptr::null_mut(), length, access, flags, &file, 0)? };
    if settings().no_prefault {
        return Ok((start, length));
    }
    // SAFETY: fills the mapping just made. MADV_POPULATE_WRITE, Linux 5.14.
    match unsafe { mm::madvise(start, length, Advice::LinuxPopulateWrite) } {
        // An older kernel: the reservation has the pages.
        Ok(()) | Err(Errno::INVAL) => Ok((start, length)),
        Err(errno) => {
            // SAFETY: the mapping just made, of which nothing refers.
            let _ = unsafe { mm::munmap(start, length) };
            // EFAULT is the kernel's answer to a pool or a cgroup at its limit.
            Err(if errno == Errno::FAULT {
                Errno::NOMEM
            } else {
                errno
            })
        }
    }
}

/// Maps a region: on huge pages, or with `fallback` on THPs or base pages. With `color` the address
/// is some cache lines into the pages, as far as `length` leaves room.
///
/// # Errors
/// Those of [`pages`], and with `fallback` those of mmap(2).
pub(crate) fn region(length: usize, fallback: bool, color: bool) -> Result<*mut c_void> {
    let (start, mapped, usable) = match huge(length) {
        Ok((start, mapped)) => (start, mapped, start),
        Err(errno) if fallback && length > 0 => {
            tell(
                Level::Warning,
                &format!("get_hugepage_region: no pages of the pool: {errno}"),
            );
            small(length)?
        }
        Err(errno) => return Err(errno),
    };
    let room = mapped - (usable.addr() - start.addr()) - length;
    static NEXT_LINE: AtomicUsize = AtomicUsize::new(0);
    // 61 is prime to the numbers of lines, so that buffers spread over them.
    let line = NEXT_LINE.fetch_add(61, Ordering::Relaxed) % (room / CACHE_LINE_BYTES + 1);
    let offset = if color { line * CACHE_LINE_BYTES } else { 0 };
    // SAFETY: `offset` and `length` together are within the mapping.
    let address = unsafe { usable.byte_add(offset) };
    Ok(record(address, start, mapped))
}

/// Maps anonymous memory, advised for THPs and aligned for them. Returns its start, its length and
/// the aligned address.
fn small(length: usize) -> Result<(*mut c_void, usize, *mut c_void)> {
    let huge = sizes::default().unwrap_or(PageSize::SIZE_2M);
    let align = usize::try_from(huge.bytes().min(PageSize::SIZE_2M.bytes())).unwrap_or(0);
    let page = rustix::param::page_size();
    let length = length.checked_next_multiple_of(page).ok_or(Errno::NOMEM)?;
    let mapped = length.checked_add(align).ok_or(Errno::NOMEM)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), mapped, access, MapFlags::PRIVATE)? };
    // A kernel without THP refuses; base pages were asked for too.
    // SAFETY: the advice changes no byte.
    let _ = unsafe { mm::madvise(start, mapped, Advice::LinuxHugepage) };
    let offset = start.addr().next_multiple_of(align) - start.addr();
    // SAFETY: `offset` is less than `align`, by which the mapping is longer.
    Ok((start, mapped, unsafe { start.byte_add(offset) }))
}

/// Frees an allocation.
///
/// # Errors
/// EINVAL: none has this address.
pub(crate) fn free(address: *mut c_void) -> Result<()> {
    let allocation = allocations().remove(&address.addr());
    let Allocation { start, length } = allocation.ok_or(Errno::INVAL)?;
    // SAFETY: the mapping of the allocation, which the program gave up.
    unsafe { mm::munmap(start, length) }
}
