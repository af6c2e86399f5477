//! The leaf of shared memory that accesses addresses: [`Addresses`], a range with a file over it.
//!
//! Bytes are lent as atomics: other threads and processes may write them at any time.
#![expect(unsafe_code, reason = "the leaf that maps and lends memory")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU8;

use jumbo_inside::pool::populate;
use rustix::io::Result;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::policy::Advice;
use crate::units::PageSize;
use jumbo_sys::{Reserved, at};

/// A range of addresses with a file over it; unmapped by drop.
#[derive(Debug)]
pub(super) struct Addresses {
    reserved: Reserved,
    length: usize,
}

impl Addresses {
    /// Maps `length` bytes of a file at a multiple of `align`. Reserves no memory: a page of a
    /// hugetlb file is allocated when it is populated.
    pub(super) fn map(length: usize, align: usize, file: BorrowedFd<'_>) -> Result<Self> {
        let reserved = Reserved::new(length, align)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range lies in the reservation just made, to which no reference exists.
        unsafe { mm::mmap(at(reserved.address), length, prot, flags, file, 0)? };
        Ok(Self { reserved, length })
    }

    /// Returns all addresses, in whole huge pages.
    pub(super) fn all(&self) -> Range<usize> {
        self.part(0..self.length)
    }

    pub(super) fn part(&self, range: Range<usize>) -> Range<usize> {
        debug_assert!(range.end <= self.length);
        let first = self.reserved.address;
        first + range.start..first + range.end
    }

    /// Advises all of the range: MADV_HUGEPAGE or MADV_NOHUGEPAGE.
    ///
    /// # Errors
    /// EINVAL: a kernel without THP.
    pub(super) fn advise(&self, advice: Advice) -> Result<()> {
        let value = match advice {
            Advice::None => return Ok(()),
            Advice::Huge => mm::Advice::LinuxHugepage,
            Advice::NoHuge => mm::Advice::LinuxNoHugepage,
        };
        // SAFETY: the advice changes no byte.
        unsafe { mm::madvise(at(self.all().start), self.length, value) }
    }

    /// Populates a part in pages of `size`; fails where a touch would kill. Linux 5.14.
    pub(super) fn populate(&self, range: Range<usize>, size: PageSize) -> Result<()> {
        let part = self.part(range);
        let huge = usize::try_from(size.bytes()).unwrap_or(0);
        populate(part.start, part.len(), huge)
    }

    /// Returns the bytes of a part.
    ///
    /// # Safety
    /// For the life of the borrow the part is mapped, and its pages are present or allocated by a
    /// touch.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[AtomicU8] {
        let part = self.part(range);
        // SAFETY: the caller's contract; other threads and processes may write an AtomicU8 at any
        // time.
        unsafe { std::slice::from_raw_parts(at(part.start).cast(), part.len()) }
    }
}
