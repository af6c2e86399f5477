//! Mappings at given addresses that replace nothing: [`map_at`], [`reserve`]; and [`unmap`].

use core::ptr::with_exposed_provenance_mut;

use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

/// Maps private anonymous memory at the free `address`. `flags` are added to MAP_PRIVATE,
/// MAP_ANONYMOUS and MAP_FIXED_NOREPLACE.
///
/// # References
/// MAP_FIXED_NOREPLACE: mmap(2), Linux 4.17. Older kernels treat the address as a hint, so the
/// result is compared.
///
/// # Errors
/// EEXIST: the range is not free; those of mmap(2).
#[expect(unsafe_code, reason = "takes an address")]
pub fn map_at(address: usize, length: usize, prot: ProtFlags, flags: MapFlags) -> Result<()> {
    let flags = flags | MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let at = with_exposed_provenance_mut(address);
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping.
    let mapped = unsafe { mm::mmap_anonymous(at, length, prot, flags)? };
    if mapped.addr() == address {
        return Ok(());
    }
    // SAFETY: a new mapping, elsewhere, whose address no other code knows.
    let _ = unsafe { unmap(mapped.expose_provenance(), length) };
    Err(Errno::EXIST)
}

/// Reserves `length` bytes of address space at `address`, without memory.
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
/// The caller owns the range, and nothing uses its memory.
#[expect(unsafe_code, reason = "invalidates pointers")]
pub unsafe fn unmap(address: usize, length: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::munmap(with_exposed_provenance_mut(address), length) }
}
