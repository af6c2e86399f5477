//! Giving memory back with several threads, or later: [`Gather`].
//!
//! The kernel frees an address range on one thread. But MADV_DONTNEED takes the address space's lock shared, so several
//! threads that each zap a part of a range do work at the same time, and one munmap(2) of what is empty then takes a moment.
//! A [`Gather`] collects memory in a batch and frees it so: what a program owns as an [`OwnedMapping`] safely, and any
//! range of addresses by [`Gather::add`], whose caller vouches for it. The work is that of `jumbo_inside::gather`.
//!
//! Invariant: safe code reaches no memory that was handed to a [`Gather`]; it owned that memory, and gave it up.
//!
//! ```
//! use jumbo::gather::{Gather, OwnedMapping, Tunables};
//! use jumbo::units::Bytes;
//!
//! let mut table = OwnedMapping::new(Bytes(1 << 20))?;
//! table[0] = 1;
//!
//! let mut gather = Gather::new(Tunables::default());
//! gather.free(table);
//! assert_eq!(gather.finish()?.bytes, 1 << 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![expect(
    unsafe_code,
    reason = "owns memory by its address, and gives it to threads that free it"
)]

pub use jumbo_inside::gather::{FreeError, Freed, Mode, Operation, Tunables};

use std::io;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{self, with_exposed_provenance, with_exposed_provenance_mut};

use jumbo_inside::gather;
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::units::Bytes;

/// Waits until all that was handed over is free, and ends the threads that free. The next gather makes new ones. False where
/// they have not ended within ten seconds.
///
/// For a program that is about to change its user, its capabilities or its namespaces: a thread that frees would keep what
/// the program gives up, and run in memory that the program can write.
///
/// ```
/// assert!(jumbo::gather::end_workers());
/// // setuid(2) and the like
/// ```
pub fn end_workers() -> bool {
    gather::drain();
    gather::end_workers()
}

/// Memory to be freed: collected, merged with its neighbours, handed over in batches.
///
/// Dropping it is [`Gather::finish`] without the answer.
#[derive(Debug)]
pub struct Gather(gather::Gather);

impl Gather {
    /// An empty gather. The first one of a process makes the memory resident in which all of them keep
    /// their ranges, 64 KiB, so that later none is needed.
    ///
    /// The threads that free are none of the C library's: its setuid(3) does not reach them. A program that gives up
    /// privilege calls [`end_workers`] before.
    pub fn new(tunables: Tunables) -> Self {
        Self(gather::Gather::new(tunables))
    }

    /// Adds a mapping, and hands over what has been collected when it is enough.
    pub fn free(&mut self, mapping: OwnedMapping) {
        let mapping = ManuallyDrop::new(mapping);
        // SAFETY: the mapping was its owner's alone, and its owner has given it up; nothing drops it.
        let added = unsafe { self.0.add(mapping.addresses(), Operation::Unmap) };
        // A mapping begins and ends at a page, and is not empty.
        debug_assert!(added.is_ok(), "{added:?}");
    }

    /// Adds a range of addresses, and hands over what has been collected when it is enough.
    ///
    /// ```
    /// use jumbo::gather::{Gather, Operation, Tunables};
    /// use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (length, prot) = (1 << 20, ProtFlags::READ | ProtFlags::WRITE);
    /// // SAFETY: a new mapping where the kernel likes disturbs no other memory.
    /// let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, prot, MapFlags::PRIVATE)? };
    /// let range = start.addr()..start.addr() + length;
    /// let mut gather = Gather::new(Tunables::default());
    /// // SAFETY: no other code knows of this memory.
    /// unsafe { gather.add(range, Operation::Unmap)? };
    /// assert_eq!(gather.finish()?.bytes, 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// EINVAL where the range does not begin and end at a page; nothing was added. What the kernel refuses
    /// is told by [`Gather::finish`].
    ///
    /// # Safety
    /// What the range holds is the caller's to lose, and for [`Operation::Unmap`] its addresses. From now on, until
    /// [`Gather::finish`] has returned, nothing uses it; in [`Mode::Background`], where the caller is not told when the
    /// memory is free, nothing does any more.
    pub unsafe fn add(
        &mut self,
        range: Range<usize>,
        operation: Operation,
    ) -> Result<(), FreeError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(range, operation) }
    }

    /// Has all of it freed, and in [`Mode::Sync`] waits until it is.
    ///
    /// # Errors
    /// The first range that the kernel refused. The others are free all the same. In
    /// [`Mode::Background`] refusals are not seen.
    pub fn finish(self) -> Result<Freed, FreeError> {
        self.0.finish()
    }
}

/// Private anonymous memory in a mapping of its own, zeroed at first; unmapped when dropped, or by [`Gather::free`].
#[derive(Debug)]
pub struct OwnedMapping {
    start: usize,
    length: usize,
}

impl OwnedMapping {
    /// Maps `length` bytes, rounded up to whole base pages. Nothing is resident yet.
    ///
    /// # Errors
    /// The errno of mmap(2): EINVAL for nothing at all, ENOMEM where that much cannot be had.
    pub fn new(length: Bytes) -> io::Result<Self> {
        let length = usize::try_from(length.0).map_err(|_| Errno::NOMEM)?;
        let length = length.checked_next_multiple_of(rustix::param::page_size());
        let length = length.ok_or(Errno::NOMEM)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes disturbs no other memory.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), length, prot, MapFlags::PRIVATE)? };
        Ok(Self {
            start: start.expose_provenance(),
            length,
        })
    }

    /// Asks for huge pages (MADV_HUGEPAGE), which touches bring from then on.
    ///
    /// # Errors
    /// EINVAL: a kernel without THP.
    pub fn advise_huge(&mut self) -> io::Result<()> {
        self.advise(Advice::LinuxHugepage)
    }

    /// Asks for base pages (MADV_NOHUGEPAGE).
    ///
    /// # Errors
    /// As [`OwnedMapping::advise_huge`].
    pub fn advise_base(&mut self) -> io::Result<()> {
        self.advise(Advice::LinuxNoHugepage)
    }

    fn advise(&mut self, advice: Advice) -> io::Result<()> {
        let start = with_exposed_provenance_mut(self.start);
        // SAFETY: the mapping is this value's own, and which pages it is made of changes nothing that it holds.
        unsafe { mm::madvise(start, self.length, advice).map_err(Into::into) }
    }

    fn addresses(&self) -> Range<usize> {
        self.start..self.start + self.length
    }
}

impl Deref for OwnedMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable until the drop, and this value's own; its bytes are zeroes or were written.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(self.start), self.length) }
    }
}

impl DerefMut for OwnedMapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = with_exposed_provenance_mut(self.start);
        // SAFETY: as for `deref`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(start, self.length) }
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, all of it; what referred to it borrowed from it.
        let _ = unsafe { mm::munmap(with_exposed_provenance_mut(self.start), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of this process alone: another test may have a mapping at the address by now.
    const MARK: usize = 0x6a75_6d62_6f2d_6d61;

    fn is_there(at: usize) -> bool {
        let mut word = [0];
        jumbo_inside::sys::copy_words(at, &mut word).is_ok() && word == [MARK]
    }

    fn marked(length: u64) -> (OwnedMapping, usize) {
        let mut mapping = OwnedMapping::new(Bytes(length)).unwrap();
        mapping[..8].copy_from_slice(&MARK.to_ne_bytes());
        let start = mapping.addresses().start;
        assert!(is_there(start));
        (mapping, start)
    }

    #[test]
    fn a_mapping_goes_with_its_owner_or_with_the_gather() {
        let ((mut dropped, one), (freed, other)) = (marked(5000), marked(1));
        assert_eq!((dropped.len(), dropped[4999]), (8192, 0));
        dropped[8191] = 1;
        drop(dropped);
        assert!(!is_there(one));
        let mut gather = Gather::new(Tunables::default());
        gather.free(freed);
        assert_eq!(gather.finish().unwrap().bytes, 4096);
        assert!(!is_there(other));
    }

    #[test]
    fn what_cannot_be_mapped_is_refused() {
        for length in [0, 1 << 60, u64::MAX] {
            assert!(OwnedMapping::new(Bytes(length)).is_err(), "{length}");
        }
    }
}
