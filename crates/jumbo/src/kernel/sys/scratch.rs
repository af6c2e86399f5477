//! A piece of memory to try things on.

use std::ffi::c_void;

use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::units::PageSize;

/// One aligned page of some size, in a mapping of its own that no other code knows; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    reserved: *mut c_void,
    length: usize,
    address: usize,
    size: usize,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Anonymous private memory.
    Private,
    /// Anonymous shared memory: what MAP_SHARED | MAP_ANONYMOUS gives.
    Shared,
}

#[expect(
    unsafe_code,
    reason = "mapping and unmapping memory that no other code knows"
)]
impl Scratch {
    /// Maps it. Nothing is resident yet.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub(crate) fn new(size: PageSize, sharing: Sharing) -> Result<Self> {
        let size = usize::try_from(size.bytes()).map_err(|_| Errno::NOMEM)?;
        let length = size.checked_mul(2).ok_or(Errno::NOMEM)?;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(null, length, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        let address = reserved.addr().next_multiple_of(size);
        let scratch = Self {
            reserved,
            length,
            address,
            size,
        };
        // A huge page of shared memory must be aligned in the object too, so the object begins here.
        let flags = match sharing {
            Sharing::Private => MapFlags::PRIVATE,
            Sharing::Shared => MapFlags::SHARED,
        };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range lies in the reservation just made, in which nothing lives.
        unsafe {
            rustix::mm::mmap_anonymous(scratch.start(), size, prot, flags | MapFlags::FIXED)?
        };
        Ok(scratch)
    }

    fn start(&self) -> *mut c_void {
        self.reserved.with_addr(self.address)
    }

    /// Its first address, a multiple of its size.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Its length in bytes.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Makes the base page at its start resident, and reports failure where a touch would kill.
    ///
    /// # Errors
    /// The errno of madvise(2) with MADV_POPULATE_WRITE (5.14).
    pub(crate) fn touch(&self) -> Result<()> {
        let page = rustix::param::page_size();
        // SAFETY: the range lies in the mapping, which this value owns; populating it changes no byte.
        unsafe { rustix::mm::madvise(self.start(), page, Advice::LinuxPopulateWrite) }
    }
}

#[expect(
    unsafe_code,
    reason = "mapping and unmapping memory that no other code knows"
)]
impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mappings are this value's own, and no reference into them was ever made.
        let _ = unsafe { rustix::mm::munmap(self.reserved, self.length) };
    }
}
