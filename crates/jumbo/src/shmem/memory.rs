//! The one leaf of shared memory that touches addresses: [`Addresses`], a range of them with files over its parts.
//!
//! What is lent are atomics: threads of this process and other processes may write the same bytes at any time.
#![expect(unsafe_code, reason = "the leaf that maps and lends memory")]

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::AtomicU8;

use jumbo_inside::pool::populate;
use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::policy::Advice;
use crate::gather::{Freed, Gather, Operation, Tunables};
use crate::units::PageSize;

/// A range of addresses; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Addresses {
    start: usize,
    length: usize,
    /// The first one that is aligned as was asked.
    pub(super) first: usize,
}

fn at(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

impl Addresses {
    /// Reserves `length` bytes at a multiple of `align`, with no access and no memory behind them.
    pub(super) fn reserve(length: usize, align: usize) -> Result<Self> {
        let length = length.checked_add(align).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let none = ProtFlags::empty();
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), length, none, flags)? };
        let start = start.expose_provenance();
        Ok(Self {
            start,
            length,
            first: start.next_multiple_of(align),
        })
    }

    /// The addresses of a part.
    pub(super) fn part(&self, range: Range<usize>) -> Range<usize> {
        debug_assert!(self.first + range.end <= self.start + self.length);
        self.first + range.start..self.first + range.end
    }

    /// Puts a file over a part, from the file's start on. Nothing is reserved for it: a page of a hugetlb file comes when it is
    /// populated.
    ///
    /// # Safety
    /// Nothing of this part was lent yet.
    pub(super) unsafe fn map(&self, range: Range<usize>, file: BorrowedFd<'_>) -> Result<()> {
        let part = self.part(range);
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the part lies in this reservation, and the caller says that no reference to it exists.
        unsafe { mm::mmap(at(part.start), part.len(), prot, flags, file, 0) }.map(drop)
    }

    /// MADV_HUGEPAGE, or the opposite.
    ///
    /// # Errors
    /// EINVAL: a kernel without THP.
    pub(super) fn advise(&self, range: Range<usize>, advice: Advice) -> Result<()> {
        let part = self.part(range);
        let value = match advice {
            Advice::None => return Ok(()),
            Advice::Huge => mm::Advice::LinuxHugepage,
            Advice::NoHuge => mm::Advice::LinuxNoHugepage,
        };
        // SAFETY: the advice changes nothing that the memory holds.
        unsafe { mm::madvise(at(part.start), part.len(), value) }
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

    /// Gives back what the files have behind these parts, each of another file, by several threads. The parts stay mapped and
    /// hold zeroes.
    ///
    /// # Errors
    /// The first refusal, as an errno.
    pub(super) fn punch(
        &self,
        parts: impl Iterator<Item = (usize, Range<usize>)>,
    ) -> Result<Freed> {
        let mut gather = Gather::new(Tunables::default());
        for (number, range) in parts {
            // Ten bits of it count; files with the same number share a thread, no more.
            let file = u16::try_from(number % 1024).unwrap_or(0);
            let part = self.part(range);
            // SAFETY: the owner gives up what the part holds, and has it borrowed mutably: no byte of it is lent. Other
            // processes that have it mapped read zeroes.
            let added = unsafe { gather.add(part, Operation::Punch { file }) };
            added.map_err(|error| error.errno)?;
        }
        gather.finish().map_err(|error| error.errno)
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, all of it; what referred to it borrowed from it.
        let _ = unsafe { mm::munmap(at(self.start), self.length) };
    }
}
