//! Shared memory on huge pages: `jumbo_region_*`, over [`jumbo::shmem`].

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd as _;
use std::ptr;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use jumbo::shmem::{Blocks, Region, Rung, Standing, Why};
use jumbo::units::{Bytes, PageSize};
use rustix::io::Errno;

use crate::failure::{Failure, Outcome, call, note, own_descriptor, status};
use crate::sized::{self, Plain};
use crate::table::Table;
use crate::{JUMBO_ANY, JUMBO_HUGETLB, JUMBO_THP};

/// A region of shared memory. Zero is no region.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct jumbo_region {
    /// Private to the library.
    pub handle: u64,
}

/// Configuration of a region. All fields but `size` and `length` may be zero.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct jumbo_region_options {
    /// `sizeof(struct jumbo_region_options)`.
    pub size: usize,
    /// `JUMBO_ANY`, `JUMBO_THP` or `JUMBO_HUGETLB`. `JUMBO_THP` has base pages until
    /// `jumbo_region_collapse`, unless the kernel's controls permit more.
    pub source: u64,
    /// Bytes of the region; whole pages with `JUMBO_HUGETLB`.
    pub length: u64,
    /// Maximum length, for which addresses are reserved; 0: `length`.
    pub capacity: u64,
    /// Bytes of a hugetlb page; 0: the size that one PMD maps.
    pub page_size: u64,
}

// SAFETY: integers of 8 bytes, on the 64-bit targets of jumbo.
unsafe impl Plain for jumbo_region_options {}

static REGIONS: Table<RwLock<Region>> = Table::new("region");

fn read(region: &RwLock<Region>) -> RwLockReadGuard<'_, Region> {
    region.read().unwrap_or_else(PoisonError::into_inner)
}

fn change(
    region: jumbo_region,
    body: impl FnOnce(&mut Region) -> Result<(), jumbo::shmem::Error>,
) -> c_int {
    status(|| {
        let region = REGIONS.get(region.handle)?;
        let mut region = region.write().unwrap_or_else(PoisonError::into_inner);
        Ok(body(&mut region)?)
    })
}

fn insert(region: Region) -> Outcome<jumbo_region> {
    let handle = REGIONS.insert(RwLock::new(region));
    handle.map(|handle| jumbo_region { handle })
}

fn make(options: &jumbo_region_options) -> Outcome<Region> {
    let mut builder = Region::builder(Bytes(options.length));
    if options.capacity != 0 {
        builder = builder.capacity(Bytes(options.capacity));
    }
    if options.page_size != 0 {
        let size = PageSize::new(options.page_size).map_err(Failure::invalid)?;
        builder = builder.sizes(&[size]);
    }
    let rung = match u32::try_from(options.source) {
        Ok(JUMBO_ANY | JUMBO_HUGETLB) => Rung::Hugetlb,
        Ok(JUMBO_THP) => Rung::Collapse,
        _ => return Err(Failure::invalid(format!("no source {}", options.source))),
    };
    let region = builder.up_to(rung).build()?;
    let Standing { rung, refused, .. } = region.standing();
    if *rung != Rung::Hugetlb && options.source != u64::from(JUMBO_THP) {
        let why = refused.iter().map(|(_, why)| why.to_string());
        let why = why.collect::<Vec<_>>().join("; ");
        if options.source == u64::from(JUMBO_HUGETLB) {
            let errno = match refused.first() {
                Some((_, Why::NotWhole(_) | Why::Size(_))) => Errno::INVAL,
                _ => Errno::NOMEM,
            };
            return Err(Failure::new(errno, why));
        }
        note(&format!("no hugetlb pages: {why}"));
    }
    Ok(region)
}

/// Makes a region of zeroes, mapped shared, on a file of its own.
///
/// A hugetlb region is populated. A touch of another region allocates its page, and without memory
/// it kills the program, as everywhere.
///
/// Errors: EINVAL, E2BIG for the options; ENOMEM without pages of `JUMBO_HUGETLB`, or addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_region_make(
    options: *const jumbo_region_options,
    region: *mut jumbo_region,
) -> c_int {
    // SAFETY: the promise of the caller: valid pointers.
    status(|| unsafe { sized::put(region, || insert(make(&sized::read(options)?)?)) })
}

/// Maps the region of a descriptor from `jumbo_region_fd`, of this process or another, with its
/// present length; a file of memfd_create(2), shm_open(3) or on hugetlbfs too. The descriptor stays
/// the caller's.
///
/// No process truncates the file meanwhile, or punches holes into one of hugetlb: a touch would
/// cause SIGBUS. `jumbo_region_seal` forbids the first to all.
///
/// Errors: EBADF; EINVAL for another kind of file, or an empty one; EACCES without write access;
/// ENOMEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn jumbo_region_attach(fd: c_int, region: *mut jumbo_region) -> c_int {
    // SAFETY: the promise of the caller: a valid pointer, and what `attach` states.
    status(|| unsafe { sized::put(region, || insert(Region::attach(own_descriptor(fd)?)?)) })
}

/// Returns the address of a region, which stays the same until it is closed.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_address(region: jumbo_region) -> *mut c_void {
    call(ptr::null_mut(), || {
        let region = REGIONS.get(region.handle)?;
        let region = read(&region);
        Ok(region.bytes(0..0)?.as_ptr().cast_mut().cast())
    })
}

/// Returns the length of a region in bytes, or -1.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_size(region: jumbo_region) -> i64 {
    call(-1, || {
        let region = REGIONS.get(region.handle)?;
        let size = read(&region).size();
        Ok(i64::try_from(size.0).unwrap_or(i64::MAX))
    })
}

/// Returns the bytes of a region that this process maps by huge pages, or -1. Linux 6.7.
///
/// Errors: EBADF; ENOSYS.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_huge(region: jumbo_region) -> i64 {
    call(-1, || {
        let region = REGIONS.get(region.handle)?;
        let huge = read(&region).huge();
        let unknown = || Failure::new(Errno::NOSYS, "this kernel has no PAGEMAP_SCAN: Linux 6.7");
        let huge = huge.ok_or_else(unknown)?;
        Ok(i64::try_from(huge.0).unwrap_or(i64::MAX))
    })
}

/// Returns the descriptor of a region's file, or -1. It is the library's: do not close it. Pass it
/// by fork(2) or SCM_RIGHTS.
///
/// No holder truncates the file, or punches holes into one of hugetlb: see `jumbo_region_attach`.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_fd(region: jumbo_region) -> c_int {
    call(-1, || {
        let region = REGIONS.get(region.handle)?;
        // SAFETY: the promise of the caller, which the documentation states.
        let fd = unsafe { read(&region).file().as_raw_fd() };
        Ok(fd)
    })
}

/// Grows a region by zeroes; its address stays. A smaller size changes nothing.
///
/// Errors: EBADF; EINVAL beyond the capacity; EPERM for a sealed region; ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_grow(region: jumbo_region, size: u64) -> c_int {
    change(region, |region| region.grow(Bytes(size)))
}

/// Frees the pages of a range, which reads as zeroes afterwards, in all processes.
///
/// A touch of a hole in a hugetlb region can cause SIGBUS: call `jumbo_region_fill` first.
///
/// Errors: EBADF; EINVAL beyond the region.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_punch(region: jumbo_region, offset: usize, size: usize) -> c_int {
    change(region, |region| {
        region.punch(offset..offset.saturating_add(size))
    })
}

/// Fills the holes of a range of a hugetlb region that this process punched. Other regions need no
/// call.
///
/// Errors: EBADF; EINVAL beyond the region; ENOMEM.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_fill(region: jumbo_region, offset: usize, size: usize) -> c_int {
    change(region, |region| {
        region.bytes(offset..offset.saturating_add(size)).map(drop)
    })
}

/// Collapses the touched blocks of a region onto huge pages (MADV_COLLAPSE, Linux 6.1). No byte
/// changes; other threads may write meanwhile. Blocks for which no huge page is free stay.
///
/// Errors: EBADF; EINVAL if the kernel refuses shared memory.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_collapse(region: jumbo_region) -> c_int {
    status(|| {
        let region = REGIONS.get(region.handle)?;
        let collapsed = read(&region).collapse(Blocks::Touched);
        Ok(collapsed.map(drop)?)
    })
}

/// Seals the size of a region for all processes.
///
/// Errors: EBADF; those of fcntl(2).
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_seal(region: jumbo_region) -> c_int {
    change(region, Region::seal)
}

/// Unmaps a region, and closes its descriptor. Other processes keep the memory.
///
/// Errors: EBADF.
#[unsafe(no_mangle)]
pub extern "C" fn jumbo_region_close(region: jumbo_region) -> c_int {
    status(|| REGIONS.remove(region.handle, |_| Ok(())))
}
