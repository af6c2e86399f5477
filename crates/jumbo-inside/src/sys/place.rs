//! Mappings at addresses of our choice that replace nothing: [`map_at`], [`reserve`]; and their end: [`unmap`].

use core::ptr::with_exposed_provenance_mut;

use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

/// Maps fresh private zero memory at `address`, which must be free. `flags` are those beside MAP_PRIVATE,
/// MAP_ANONYMOUS and MAP_FIXED_NOREPLACE.
///
/// # References
/// MAP_FIXED_NOREPLACE: mmap(2), Linux 4.17. Older kernels take it for a hint, so the address that comes back is compared.
///
/// # Errors
/// EEXIST: something is mapped there; those of mmap(2).
#[expect(unsafe_code, reason = "takes an address")]
pub fn map_at(address: usize, length: usize, prot: ProtFlags, flags: MapFlags) -> Result<()> {
    let flags = flags | MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let at = with_exposed_provenance_mut(address);
    // SAFETY: MAP_FIXED_NOREPLACE never disturbs a mapping that is there already.
    let got = unsafe { mm::mmap_anonymous(at, length, prot, flags)? };
    if got.addr() == address {
        return Ok(());
    }
    // SAFETY: the kernel has just made this mapping, elsewhere; no other code has seen its address.
    let _ = unsafe { unmap(got.expose_provenance(), length) };
    Err(Errno::EXIST)
}

/// Takes `length` bytes of address space at `address` without any memory behind them.
///
/// # Errors
/// As [`map_at`].
pub fn reserve(address: usize, length: usize) -> Result<()> {
    map_at(address, length, ProtFlags::empty(), MapFlags::NORESERVE)
}

/// munmap(2).
///
/// # Errors
/// Those of munmap(2).
///
/// # Safety
/// The range is the caller's, and nothing uses what it holds.
#[expect(unsafe_code, reason = "takes memory away from under its pointers")]
pub unsafe fn unmap(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::munmap(with_exposed_provenance_mut(address), length) }
}
