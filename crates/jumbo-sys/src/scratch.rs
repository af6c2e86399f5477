//! Memory for trials of system calls.

#![expect(
    unsafe_code,
    reason = "mapping and unmapping memory that no other code knows"
)]

use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::units::PageSize;
use crate::{Reserved, at};

/// One aligned page in a mapping of its own that no other code refers to; unmapped when dropped.
#[derive(Debug)]
pub struct Scratch {
    reserved: Reserved,
    size: usize,
}

impl Scratch {
    /// Maps anonymous memory, `MapFlags::PRIVATE` or `MapFlags::SHARED`, with no page resident.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub fn new(size: PageSize, sharing: MapFlags) -> Result<Self> {
        let size = usize::try_from(size.bytes()).map_err(|_| Errno::NOMEM)?;
        let reserved = Reserved::new(size, size)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // A huge page of shared memory must be aligned in its object too, so the object begins
        // here.
        // SAFETY: the range lies in the new reservation, which holds no object.
        unsafe { mmap_anonymous(at(reserved.address), size, prot, sharing | MapFlags::FIXED)? };
        Ok(Self { reserved, size })
    }

    /// First address, a multiple of the size.
    pub fn address(&self) -> usize {
        self.reserved.address
    }

    /// Length in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Makes the first base page resident. Returns an error where a touch would be SIGBUS.
    ///
    /// # Errors
    /// The errno of madvise(2) with MADV_POPULATE_WRITE (5.14).
    pub fn touch(&self) -> Result<()> {
        let length = rustix::param::page_size();
        // SAFETY: the range lies in the mapping, which this value owns; populating it changes no
        // byte.
        unsafe { madvise(at(self.address()), length, Advice::LinuxPopulateWrite) }
    }
}
