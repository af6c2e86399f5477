//! Files in memory, read-only: `jumbo_file_*`, over [`mod@jumbo::file`].

use std::ffi::{c_int, c_void};
use std::ptr;

use jumbo::file::{Map, Method};
use rustix::io::Errno;

use crate::failure::{Failure, call, own_descriptor, status};
use crate::sized;
use crate::table::Table;

/// A file in memory, read-only. Zero is no file.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct jumbo_file {
    /// Private to the library.
    pub handle: u64,
}

/// Read all of the file when it is mapped, not at the first touch of each part.
pub const JUMBO_FILE_WHOLE: u32 = 1;
/// Method: mapped, mostly by base pages.
pub const JUMBO_FILE_BASE_PAGES: u32 = 1;
/// Method: mapped, with at least half by huge pages of the page cache.
pub const JUMBO_FILE_PAGE_CACHE: u32 = 2;
/// Method: copied into anonymous memory that is advised to be huge.
pub const JUMBO_FILE_COPY: u32 = 3;

static FILES: Table<Map> = Table::new("file");

fn insert(map: Map) -> Result<jumbo_file, Failure> {
    FILES.insert(map).map(|handle| jumbo_file { handle })
}

/// Maps the file of a descriptor that can be read, advised to be huge before its first touch. It
/// costs no memory beyond the page cache. `flags` is 0 or `JUMBO_FILE_WHOLE`. The descriptor stays
/// the caller's, and may be closed.
///
/// While the map lives, no process writes to the file or shortens it: a read behind the end causes
/// SIGBUS. Huge pages: xfs since Linux 5.18, ext4 since 6.16.
///
/// Errors: EBADF; EINVAL for flags, or no regular file; EACCES without read access; ENODEV for a
/// file system without mappings; ENOMEM; with `JUMBO_FILE_WHOLE` also EFAULT, a disk that fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_file_open(fd: c_int, flags: u32, file: *mut jumbo_file) -> c_int {
    // SAFETY: the promise of the caller: a valid pointer, and what `open` states.
    status(|| unsafe {
        sized::put(file, || {
            if flags & !JUMBO_FILE_WHOLE != 0 {
                return Err(Failure::invalid(format!("flags {flags:#x}")));
            }
            insert(Map::open(&own_descriptor(fd)?.into(), flags != 0)?)
        })
    })
}

/// Copies the file of a descriptor into anonymous memory on huge pages, by at most `threads`
/// threads; 0: the CPUs of this thread, at most 4. It takes as much memory as the file has bytes,
/// beside the page cache.
///
/// Errors: EBADF; EINVAL for more than 64 threads, or no regular file; EIO for a file that is
/// shortened meanwhile; ENOMEM; those of read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_file_copy(fd: c_int, threads: u32, file: *mut jumbo_file) -> c_int {
    // SAFETY: the promise of the caller: a valid pointer.
    status(|| unsafe {
        sized::put(file, || {
            insert(Map::copy(&own_descriptor(fd)?.into(), threads)?)
        })
    })
}

/// Returns the address of the bytes of a file, which stays the same until it is closed. That of an
/// empty file is not null, and has no byte.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_file_address(file: jumbo_file) -> *const c_void {
    call(ptr::null(), || {
        Ok(FILES.get(file.handle)?.as_ptr().cast::<c_void>())
    })
}

/// Returns the length of a file in bytes when it was opened, or -1.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_file_size(file: jumbo_file) -> i64 {
    call(-1, || {
        Ok(i64::try_from(FILES.get(file.handle)?.len()).unwrap_or(i64::MAX))
    })
}

/// Returns the bytes of a file that this process maps by huge pages now, or -1. It reads
/// /proc/self/smaps, which takes milliseconds; 0 if it cannot.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_file_huge(file: jumbo_file) -> i64 {
    call(-1, || {
        let huge = FILES.get(file.handle)?.huge();
        Ok(i64::try_from(huge.0).unwrap_or(i64::MAX))
    })
}

/// Returns how a file came onto its pages when it was opened, or -1: `JUMBO_FILE_BASE_PAGES`,
/// `JUMBO_FILE_PAGE_CACHE` or `JUMBO_FILE_COPY`.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_file_method(file: jumbo_file) -> c_int {
    call(-1, || {
        let method = match FILES.get(file.handle)?.method() {
            Method::BasePages => JUMBO_FILE_BASE_PAGES,
            Method::PageCache => JUMBO_FILE_PAGE_CACHE,
            Method::Copy => JUMBO_FILE_COPY,
            other => return Err(Failure::new(Errno::NOTSUP, other)),
        };
        Ok(method.cast_signed())
    })
}

/// Unmaps a file.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_file_close(file: jumbo_file) -> c_int {
    status(|| FILES.remove(file.handle, |_| Ok(())))
}
