//! A piece of private memory to try things on.

use std::ffi::c_void;

use rustix::io::Result;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::units::PageSize;

/// One aligned page of some size, in an anonymous private mapping of its own; unmapped when dropped.
#[derive(Debug)]
pub struct Scratch {
    mapping: *mut c_void,
    mapped: usize,
    address: usize,
    size: usize,
}

#[expect(
    unsafe_code,
    reason = "mapping and unmapping memory that nobody else knows"
)]
impl Scratch {
    /// Maps it. Nothing is resident yet.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub fn new(size: PageSize) -> Result<Self> {
        let size = usize::try_from(size.bytes()).map_err(|_| rustix::io::Errno::NOMEM)?;
        let mapped = size.checked_mul(2).ok_or(rustix::io::Errno::NOMEM)?;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let mapping =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, prot, flags)? };
        let address = mapping.addr().next_multiple_of(size);
        Ok(Self {
            mapping,
            mapped,
            address,
            size,
        })
    }

    /// Its first address, a multiple of its size.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Makes the base page at its start resident, and reports failure where a touch would kill.
    ///
    /// # Errors
    /// The errno of madvise(2) with MADV_POPULATE_WRITE (5.14).
    pub fn touch(&self) -> Result<()> {
        let start = self.mapping.with_addr(self.address);
        // SAFETY: the range lies in the mapping, which this value owns; populating it changes no byte.
        unsafe {
            rustix::mm::madvise(
                start,
                rustix::param::page_size(),
                Advice::LinuxPopulateWrite,
            )
        }
    }
}

#[expect(
    unsafe_code,
    reason = "mapping and unmapping memory that nobody else knows"
)]
impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference into it was ever made.
        let _ = unsafe { rustix::mm::munmap(self.mapping, self.mapped) };
    }
}
