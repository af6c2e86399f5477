//! Anonymous memory: [`discard_locked`], [`name`], [`memfd`].

use core::ffi::CStr;
use core::ptr::with_exposed_provenance_mut;

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, Result};
use rustix::mm::{self, Advice};

use crate::request;
use crate::units::PageSize;

/// MADV_DONTNEED: frees the memory, locked or not. The range then reads as zeroes.
///
/// # References
/// madvise(2); MADV_DONTNEED_LOCKED, for memory that mlockall(2) has locked: Linux 5.18.
///
/// # Errors
/// Those of madvise(2).
///
/// # Safety
/// The caller owns the content of the range.
#[expect(unsafe_code, reason = "frees memory under pointers")]
pub unsafe fn discard_locked(address: usize, length: usize) -> Result<()> {
    const DONTNEED_LOCKED: usize = libc::MADV_DONTNEED_LOCKED.unsigned_abs() as usize;
    let at = with_exposed_provenance_mut(address);
    // SAFETY: the caller's promise, for both calls.
    unsafe {
        match mm::madvise(at, length, Advice::LinuxDontNeed) {
            Err(Errno::INVAL) => {
                let arguments = [address, length, DONTNEED_LOCKED, 0, 0, 0];
                request(libc::SYS_madvise, arguments).map(drop)
            }
            answer => answer,
        }
    }
}

/// PR_SET_VMA_ANON_NAME: the name of an anonymous mapping in /proc/PID/maps.
///
/// # References
/// prctl(2), Linux 5.17 with CONFIG_ANON_VMA_NAME; elsewhere the mapping goes without.
#[expect(unsafe_code, reason = "a system call")]
pub fn name(address: usize, length: usize, name: &CStr) {
    const PR_SET_VMA: usize = 0x5356_4d41;
    const PR_SET_VMA_ANON_NAME: usize = 0;
    let name = name.as_ptr().expose_provenance();
    let arguments = [PR_SET_VMA, PR_SET_VMA_ANON_NAME, address, length, name, 0];
    // SAFETY: the kernel copies the name; a name changes no byte of the memory.
    let _ = unsafe { request(libc::SYS_prctl, arguments) };
}

/// Creates a sealable memfd, of huge pages if their size is given.
///
/// # References
/// memfd_create(2), Linux 3.17; with MFD_HUGETLB 4.14, with MFD_ALLOW_SEALING too 4.16.
///
/// # Errors
/// ENODEV or EINVAL if the kernel has no pool of that size.
pub fn memfd(name: &CStr, huge: Option<PageSize>) -> Result<OwnedFd> {
    // MFD_HUGE_*: the binary logarithm of the size, from this bit on (<linux/memfd.h>).
    const SIZE_SHIFT: u32 = 26;
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if let Some(size) = huge {
        let log2 = size.bytes().trailing_zeros();
        flags |= MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(log2 << SIZE_SHIFT);
    }
    memfd_create(name, flags)
}
