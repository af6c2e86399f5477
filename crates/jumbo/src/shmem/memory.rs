//! The one leaf of shared memory that touches addresses: [`Addresses`], a range of them with a file over it.
//!
//! What is lent are atomics: threads of this process and other processes may write the same bytes at any time.
#![expect(unsafe_code, reason = "the leaf that maps and lends memory")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU8;

use jumbo_inside::pool::populate;
use rustix::io::Result;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::policy::Advice;
use crate::kernel::{Reserved, at};
use crate::units::PageSize;

/// A range of addresses; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Addresses {
    reserved: Reserved,
    length: usize,
}

impl Addresses {
    /// `length` bytes at a multiple of `align`, with a file over all of it. Nothing is reserved for it: a page of a hugetlb
    /// file comes when it is populated.
    pub(super) fn map(length: usize, align: usize, file: BorrowedFd<'_>) -> Result<Self> {
        let reserved = Reserved::new(length, align)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range lies in the reservation just made, to which no reference exists.
        unsafe { mm::mmap(at(reserved.address), length, prot, flags, file, 0)? };
        Ok(Self { reserved, length })
    }

    /// The addresses of all of it, whole huge pages.
    pub(super) fn all(&self) -> Range<usize> {
        self.part(0..self.length)
    }

    /// The addresses of a part.
    pub(super) fn part(&self, range: Range<usize>) -> Range<usize> {
        debug_assert!(range.end <= self.length);
        let first = self.reserved.address;
        first + range.start..first + range.end
    }

    /// MADV_HUGEPAGE, or the opposite.
    ///
    /// # Errors
    /// EINVAL: a kernel without THP.
    pub(super) fn advise(&self, advice: Advice) -> Result<()> {
        let value = match advice {
            Advice::None => return Ok(()),
            Advice::Huge => mm::Advice::LinuxHugepage,
            Advice::NoHuge => mm::Advice::LinuxNoHugepage,
        };
        // SAFETY: the advice changes nothing that the memory holds.
        unsafe { mm::madvise(at(self.all().start), self.length, value) }
    }

    /// Makes memory resident in pages of this size, and reports failure where a touch would kill. Linux 5.14.
    pub(super) fn populate(&self, range: Range<usize>, size: PageSize) -> Result<()> {
        let part = self.part(range);
        let huge = usize::try_from(size.bytes()).unwrap_or(0);
        populate(part.start, part.len(), huge)
    }

    /// The bytes of a part.
    ///
    /// # Safety
    /// The part is mapped, and has pages, or gets them when it is touched, for as long as it is lent.
    pub(super) unsafe fn bytes(&self, range: Range<usize>) -> &[AtomicU8] {
        let part = self.part(range);
        // SAFETY: the caller's contract; an AtomicU8 is a byte that other threads and processes may write at any time.
        unsafe { std::slice::from_raw_parts(at(part.start).cast(), part.len()) }
    }
}
