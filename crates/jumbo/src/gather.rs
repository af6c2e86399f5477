//! Frees by several threads, or in the background: [`Gather`].
//!
//! The kernel frees an address range on one thread. But MADV_DONTNEED takes the address space's
//! lock shared, so several threads can zap parts of a range at the same time; one munmap(2) of the
//! empty range is then fast. A [`Gather`] collects memory in a batch and frees it so: an
//! [`OwnedMapping`] safely, and any range of addresses by the `unsafe` [`Gather::add`].
//! `jumbo_inside::gather` does the work.
//!
//! Invariant: safe code cannot reach memory after its owner has passed it to a [`Gather`].
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

/// Waits until all pending memory is free, and ends the worker threads; false if they do not end
/// within ten seconds. The next gather starts new ones.
///
/// Call it before a change of user, capabilities or namespaces: a worker would keep the old ones,
/// and run in memory that the program can write.
///
/// ```
/// assert!(jumbo::gather::end_workers());
/// // setuid(2) and the like
/// ```
pub fn end_workers() -> bool {
    gather::drain();
    gather::end_workers()
}

/// A batch of memory to free, merged with its neighbours.
///
/// Drop does the same as [`Gather::finish`], without its result.
#[derive(Debug)]
pub struct Gather(gather::Gather);

impl Gather {
    /// Creates an empty gather. The first one of a process makes 64 KiB resident for the ranges of
    /// all gathers, so that later ones need no memory.
    ///
    /// The C library does not know the worker threads: its setuid(3) does not change them. A
    /// program that drops privilege calls [`end_workers`] first.
    pub fn new(tunables: Tunables) -> Self {
        Self(gather::Gather::new(tunables))
    }

    /// Adds a mapping, and submits the batch when it is large enough.
    pub fn free(&mut self, mapping: OwnedMapping) {
        let mapping = ManuallyDrop::new(mapping);
        // SAFETY: the mapping had one owner, who gave it up; nothing drops it.
        let added = unsafe { self.0.add(mapping.addresses(), Operation::Unmap) };
        // A mapping begins and ends at a page, and is not empty.
        debug_assert!(added.is_ok(), "{added:?}");
    }

    /// Adds a range of addresses, and submits the batch when it is large enough.
    ///
    /// ```
    /// use jumbo::gather::{Gather, Operation, Tunables};
    /// use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (length, prot) = (1 << 20, ProtFlags::READ | ProtFlags::WRITE);
    /// // SAFETY: a new mapping at an address of the kernel's choice replaces none.
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
    /// EINVAL if the range does not begin and end at a page; nothing was added. [`Gather::finish`]
    /// returns the errors of the kernel.
    ///
    /// # Safety
    /// The caller owns the content of the range, and for [`Operation::Unmap`] its addresses. No
    /// code uses it until [`Gather::finish`] has returned; in [`Mode::Background`], where the
    /// caller does not learn when the memory is free, never again.
    pub unsafe fn add(
        &mut self,
        range: Range<usize>,
        operation: Operation,
    ) -> Result<(), FreeError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(range, operation) }
    }

    /// Frees all of it, and in [`Mode::Sync`] waits for that.
    ///
    /// # Errors
    /// The first range that the kernel refused; the others are free. [`Mode::Background`] reports
    /// none.
    pub fn finish(self) -> Result<Freed, FreeError> {
        self.0.finish()
    }
}

/// A private anonymous mapping, initially zeroed; unmapped by drop, or by [`Gather::free`].
#[derive(Debug)]
pub struct OwnedMapping {
    start: usize,
    length: usize,
}

impl OwnedMapping {
    /// Maps `length` bytes, rounded up to whole base pages, without making them resident.
    ///
    /// # Errors
    /// The errno of mmap(2): EINVAL for a length of 0, ENOMEM for lack of memory or addresses.
    pub fn new(length: Bytes) -> io::Result<Self> {
        let length = usize::try_from(length.0).map_err(|_| Errno::NOMEM)?;
        let length = length.checked_next_multiple_of(rustix::param::page_size());
        let length = length.ok_or(Errno::NOMEM)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces none.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), length, prot, MapFlags::PRIVATE)? };
        Ok(Self {
            start: start.expose_provenance(),
            length,
        })
    }

    /// Advises huge pages for later touches (MADV_HUGEPAGE).
    ///
    /// # Errors
    /// EINVAL: a kernel without THP.
    pub fn advise_huge(&mut self) -> io::Result<()> {
        self.advise(Advice::LinuxHugepage)
    }

    /// Advises base pages (MADV_NOHUGEPAGE).
    ///
    /// # Errors
    /// Same as [`OwnedMapping::advise_huge`].
    pub fn advise_base(&mut self) -> io::Result<()> {
        self.advise(Advice::LinuxNoHugepage)
    }

    fn advise(&mut self, advice: Advice) -> io::Result<()> {
        let start = with_exposed_provenance_mut(self.start);
        // SAFETY: the mapping is this value's, and advice changes no byte.
        unsafe { mm::madvise(start, self.length, advice).map_err(Into::into) }
    }

    fn addresses(&self) -> Range<usize> {
        self.start..self.start + self.length
    }
}

impl Deref for OwnedMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is this value's, readable until the drop, and initialized.
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
        // SAFETY: the mapping is this value's; all references borrowed from it.
        let _ = unsafe { mm::munmap(with_exposed_provenance_mut(self.start), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A unique value: another test may have a mapping at the address by now.
    const MARK: usize = 0x6a75_6d62_6f2d_6d61;

    fn is_mapped(at: usize) -> bool {
        let mut word = [0];
        jumbo_sys::copy_words(at, &mut word).is_ok() && word == [MARK]
    }

    fn marked(length: u64) -> (OwnedMapping, usize) {
        let mut mapping = OwnedMapping::new(Bytes(length)).unwrap();
        mapping[..8].copy_from_slice(&MARK.to_ne_bytes());
        let start = mapping.addresses().start;
        assert!(is_mapped(start));
        (mapping, start)
    }

    #[test]
    fn drop_and_gather_unmap_a_mapping() {
        let ((mut dropped, one), (freed, other)) = (marked(5000), marked(1));
        assert_eq!((dropped.len(), dropped[4999]), (8192, 0));
        dropped[8191] = 1;
        drop(dropped);
        assert!(!is_mapped(one));
        let mut gather = Gather::new(Tunables::default());
        gather.free(freed);
        assert_eq!(gather.finish().unwrap().bytes, 4096);
        assert!(!is_mapped(other));
    }

    #[test]
    fn an_invalid_length_is_refused() {
        for length in [0, 1 << 60, u64::MAX] {
            assert!(OwnedMapping::new(Bytes(length)).is_err(), "{length}");
        }
    }
}
