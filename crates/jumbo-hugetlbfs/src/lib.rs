//! The interface of libhugetlbfs 2.24: `libhugetlbfs.so.0`, for programs that are linked to it.
//!
//! - `environment`: the variables `HUGETLB_*`: those that the library obeys, and the reasons
//!   against the others, which it prints.
//! - `sizes`: page sizes. `mounts`: hugetlbfs mounts and files. `memory`: allocations.
//!
//! It replaces no `malloc` and moves no text: `jumbo run` does, of which `hugectl` makes use.
//! Sources: the manual pages of libhugetlbfs 2.24, <https://github.com/libhugetlbfs/libhugetlbfs>.
//!
//! Invariant: what a program asks for is done, or refused by the function's error; a variable
//! without effect is named on stderr.
#![allow(
    unsafe_code,
    clippy::missing_safety_doc,
    reason = "a foreign function interface: the promises are those of C, in the manual pages"
)]

mod environment;
mod memory;
mod mounts;
mod sizes;

use std::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use std::ptr;

use jumbo::units::PageSize;
use rustix::io::{Errno, Result};

use environment::{Level, settings, tell};

const GHP_DEFAULT: c_ulong = 1;
const GHR_FALLBACK: c_ulong = 0x2000_0000;
const GHR_COLOR: c_ulong = 0x4000_0000;
const GHR_MASK: c_ulong = 0x7000_0000;

/// Returns the result, or `failed` with errno set.
fn answer<T>(failed: T, result: Result<T>) -> T {
    result.unwrap_or_else(|errno| {
        // SAFETY: the C library's errno of this thread.
        unsafe { *libc::__errno_location() = errno.raw_os_error() };
        failed
    })
}

fn size(bytes: c_long) -> Result<PageSize> {
    let size = u64::try_from(bytes).ok().map(PageSize::new);
    let size = size.and_then(std::result::Result::ok).ok_or(Errno::INVAL)?;
    sizes::all()?
        .contains(&size)
        .then_some(size)
        .ok_or(Errno::INVAL)
}

/// gethugepagesize(3): the default size in bytes; -1 with ENOSYS without huge pages.
#[unsafe(no_mangle)]
pub extern "C" fn gethugepagesize() -> c_long {
    answer(-1, sizes::default().map(sizes::long))
}

/// gethugepagesizes(3): the sizes of huge pages, at most `count`, or their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gethugepagesizes(to: *mut c_long, count: c_int) -> c_int {
    // SAFETY: the caller's promise.
    answer(
        -1,
        sizes::all().and_then(|sizes| unsafe { store(&sizes, to, count) }),
    )
}

/// getpagesizes(3): the same, with the base page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpagesizes(to: *mut c_long, count: c_int) -> c_int {
    // SAFETY: the caller's promise.
    answer(
        -1,
        sizes::with_base().and_then(|sizes| unsafe { store(&sizes, to, count) }),
    )
}

/// # Safety
/// A pointer that is not null has room for `count` numbers.
unsafe fn store(sizes: &[PageSize], to: *mut c_long, count: c_int) -> Result<c_int> {
    let room = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    let stored = match (to.is_null(), room) {
        (true, 0) => sizes.len(),
        (true, _) => return Err(Errno::INVAL),
        (false, _) => sizes.len().min(room),
    };
    for (at, size) in sizes
        .iter()
        .take(stored)
        .enumerate()
        .filter(|_| !to.is_null())
    {
        // SAFETY: the caller's promise; `at` is below `count`.
        unsafe { to.add(at).write(sizes::long(*size)) };
    }
    c_int::try_from(stored).map_err(|_| Errno::OVERFLOW)
}

/// hugetlbfs_test_path(3): 1 for a path on hugetlbfs, 0 for another, -1 with statfs(2)'s errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugetlbfs_test_path(path: *const c_char) -> c_int {
    if path.is_null() {
        return answer(-1, Err(Errno::FAULT));
    }
    // SAFETY: the caller's promise: a string.
    let path = unsafe { CStr::from_ptr(path) };
    answer(
        -1,
        mounts::page_size(path).map(|size| c_int::from(size.is_some())),
    )
}

/// hugetlbfs_find_path(3): a mount with pages of the default size, or null with ENOENT.
#[unsafe(no_mangle)]
pub extern "C" fn hugetlbfs_find_path() -> *const c_char {
    let found = sizes::default().and_then(mounts::find);
    answer(ptr::null(), found.map(CStr::as_ptr))
}

/// hugetlbfs_find_path_for_size(3).
#[unsafe(no_mangle)]
pub extern "C" fn hugetlbfs_find_path_for_size(bytes: c_long) -> *const c_char {
    let found = size(bytes).and_then(mounts::find);
    answer(ptr::null(), found.map(CStr::as_ptr))
}

/// Creates a file of the program, which its children inherit, as libhugetlbfs's from mkstemp(3).
fn of_program(size: PageSize) -> Result<std::os::fd::OwnedFd> {
    mounts::unlinked(size, true)
}

/// hugetlbfs_unlinked_fd(3): a new file of huge pages without a name, of the caller; -1 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn hugetlbfs_unlinked_fd() -> c_int {
    let file = sizes::default().and_then(of_program);
    answer(-1, file.map(std::os::fd::IntoRawFd::into_raw_fd))
}

/// hugetlbfs_unlinked_fd_for_size(3).
#[unsafe(no_mangle)]
pub extern "C" fn hugetlbfs_unlinked_fd_for_size(bytes: c_long) -> c_int {
    let file = size(bytes).and_then(of_program);
    answer(-1, file.map(std::os::fd::IntoRawFd::into_raw_fd))
}

/// get_huge_pages(3): `length` bytes in pages of the kernel's pool, present; null with errno.
#[unsafe(no_mangle)]
pub extern "C" fn get_huge_pages(length: usize, flags: c_ulong) -> *mut c_void {
    if flags & GHR_MASK != 0 {
        tell(
            Level::Error,
            "get_huge_pages: a flag GHR_*, which is of get_hugepage_region",
        );
    }
    let pages =
        memory::pages(length).inspect_err(|errno| shortage("get_huge_pages", length, *errno));
    answer(ptr::null_mut(), pages)
}

fn shortage(function: &str, length: usize, errno: Errno) {
    tell(
        Level::Warning,
        &format!("{function}: no huge pages for {length} bytes: {errno}"),
    );
}

/// free_huge_pages(3). An unknown address is named on stderr, with errno EINVAL.
#[unsafe(no_mangle)]
pub extern "C" fn free_huge_pages(pages: *mut c_void) {
    free("free_huge_pages", pages);
}

fn free(function: &str, pages: *mut c_void) {
    answer(
        (),
        memory::free(pages).inspect_err(|_| {
            tell(
                Level::Error,
                &format!("{function}: {pages:?} is not allocated, or freed before"),
            );
        }),
    );
}

/// get_hugepage_region(3): as get_huge_pages, on smaller pages if need be and permitted.
#[unsafe(no_mangle)]
pub extern "C" fn get_hugepage_region(length: usize, flags: c_ulong) -> *mut c_void {
    if flags & GHP_DEFAULT != 0 {
        tell(
            Level::Error,
            "get_hugepage_region: a flag GHP_*, which is of get_huge_pages",
        );
    }
    let region = memory::region(length, flags & GHR_FALLBACK != 0, flags & GHR_COLOR != 0);
    let region = region.inspect_err(|errno| shortage("get_hugepage_region", length, *errno));
    answer(ptr::null_mut(), region)
}

/// free_hugepage_region(3).
#[unsafe(no_mangle)]
pub extern "C" fn free_hugepage_region(region: *mut c_void) {
    free("free_hugepage_region", region);
}

/// shmget(2), with SHM_HUGETLB and a size of whole pages under HUGETLB_SHM=yes.
#[unsafe(no_mangle)]
pub extern "C" fn shmget(key: libc::key_t, length: usize, flags: c_int) -> c_int {
    let call = |length: usize, flags: c_int| {
        // SAFETY: shmget(2) takes three numbers. The system call, because this function stands
        // before the C library's.
        unsafe { libc::syscall(libc::SYS_shmget, key, length, flags) }
    };
    if settings().shm {
        let whole = sizes::default()
            .ok()
            .and_then(|size| memory::whole(length, size).ok());
        let id = whole.map_or(-1, |whole| call(whole, flags | libc::SHM_HUGETLB));
        if id >= 0 {
            return c_int::try_from(id).unwrap_or(-1);
        }
        let errno = std::io::Error::last_os_error();
        let message =
            format!("shmget: {length} bytes on base pages, in spite of HUGETLB_SHM: {errno}");
        tell(Level::Error, &message);
    }
    c_int::try_from(call(length, flags)).unwrap_or(-1)
}
