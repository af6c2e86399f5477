//! A piece of memory to try things on.

#![expect(
    unsafe_code,
    reason = "mapping and unmapping memory that no other code knows"
)]

use jumbo::kernel::{Reserved, at};
use rustix::io::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::units::PageSize;

/// One aligned page of some size, in a mapping of its own that no other code knows; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    reserved: Reserved,
    size: usize,
}

impl Scratch {
    /// Maps it: anonymous memory, `MapFlags::PRIVATE` or `MapFlags::SHARED`. Nothing is resident yet.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub(crate) fn new(size: PageSize, sharing: MapFlags) -> Result<Self> {
        let size = usize::try_from(size.bytes()).map_err(|_| Errno::NOMEM)?;
        let reserved = Reserved::new(size, size)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // A huge page of shared memory must be aligned in the object too, so the object begins here.
        // SAFETY: the range lies in the reservation just made, in which nothing lives.
        unsafe { mmap_anonymous(at(reserved.address), size, prot, sharing | MapFlags::FIXED)? };
        Ok(Self { reserved, size })
    }

    /// Its first address, a multiple of its size.
    pub(crate) fn address(&self) -> usize {
        self.reserved.address
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
        let length = rustix::param::page_size();
        // SAFETY: the range lies in the mapping, which this value owns; populating it changes no byte.
        unsafe { madvise(at(self.address()), length, Advice::LinuxPopulateWrite) }
    }
}
