//! Huge folios in the page cache of a file: [`PageCache`].
//!
//! The kernel has no file that tells of which folios a file's page cache is made. So one PMD of the file at a time is mapped
//! where a PMD can map it, touched, and looked up in /proc/self/smaps: `FilePmdMapped` (of tmpfs `ShmemPmdMapped`) is the kernel's word. Where MADV_HUGEPAGE was
//! given, a touch of what is not in the page cache has the kernel read the whole PMD at once, into one folio where the
//! file system can (xfs since Linux 5.18, ext4 since 6.16). What the page cache has already stays as it is.
//!
//! Invariant: nothing is written, and no byte of the file is read by this process: a file that is truncated
//! meanwhile is an error, and no SIGBUS.

#![expect(
    unsafe_code,
    reason = "files are mapped in a window that no other code knows"
)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;

use jumbo::kernel::{Reserved, at};
use rustix::fs::fadvise;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use super::smaps::Smaps;
use super::{Root, base_page};
use crate::units::PageSize;

/// What the page cache has of one PMD of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// Nothing.
    Absent,
    /// Folios that a PMD cannot map, or a part.
    Small,
    /// One folio that a PMD maps.
    Huge,
}

/// The page cache of a file, looked at through a window of one PMD.
#[derive(Debug)]
pub struct PageCache<'f> {
    file: &'f File,
    /// It has the window.
    reserved: Reserved,
    pmd: usize,
    base: usize,
}

impl<'f> PageCache<'f> {
    /// A window for a file that is open to be read.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub fn new(file: &'f File, pmd: PageSize) -> io::Result<Self> {
        let size = |size: PageSize| usize::try_from(size.bytes()).map_err(io::Error::other);
        let base = size(base_page(&Root::host()))?;
        let pmd = size(pmd)?;
        Ok(Self {
            file,
            reserved: Reserved::new(pmd, pmd)?,
            pmd,
            base,
        })
    }

    fn window(&self) -> *mut c_void {
        at(self.reserved.address)
    }

    /// What is cached of the PMD at `offset`, a multiple of its size. Nothing is read from disk where this process owns the file
    /// or may write to it; for others mincore(2) says that all is resident, and what is not is then read.
    ///
    /// # Errors
    /// The errno of mmap(2), mincore(2) or madvise(2).
    pub fn look(&self, offset: u64) -> io::Result<Cached> {
        self.map(offset)?;
        let mut pages = vec![0u8; self.pmd / self.base];
        // SAFETY: the range is the window's mapping, and the vector has a byte for each of its pages.
        match unsafe { libc::mincore(self.window(), self.pmd, pages.as_mut_ptr()) } {
            0 => {}
            _ => return Err(io::Error::last_os_error()),
        }
        match pages.iter().position(|page| page & 1 != 0) {
            None => Ok(Cached::Absent),
            Some(page) => self.touch(page),
        }
    }

    /// Has the PMD at `offset` in the page cache, in one folio where that can be had and no other folios are there.
    ///
    /// # Errors
    /// The errno of mmap(2) or madvise(2): EFAULT where the file is shorter or cannot be read.
    pub fn bring(&self, offset: u64) -> io::Result<Cached> {
        self.map(offset)?;
        self.touch(0)
    }

    /// Drops what is cached of the PMD at `offset`, but for pages that a process maps or that are not on disk yet.
    ///
    /// # Errors
    /// The errno of posix_fadvise(2).
    pub fn drop_clean(&self, offset: u64) -> io::Result<()> {
        // Folios that are mapped, here too, stay.
        self.clear()?;
        let length = NonZeroU64::new(self.pmd as u64);
        Ok(fadvise(
            self.file,
            offset,
            length,
            rustix::fs::Advice::DontNeed,
        )?)
    }

    /// Maps the PMD at `offset` in the window; what was there goes.
    fn map(&self, offset: u64) -> io::Result<()> {
        let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the window lies in this value's own reservation, of which no reference was ever made.
        unsafe { mmap(self.window(), self.pmd, prot, flags, self.file, offset)? };
        // The second keeps the kernel from reading the next PMD as well: pages that are being read cannot be dropped when it is
        // that one's turn. A kernel without THP refuses the first; what is there tells.
        for advice in [Advice::LinuxHugepage, Advice::Random] {
            // SAFETY: the mapping just made; the advice changes no byte.
            let _ = unsafe { madvise(self.window(), self.pmd, advice) };
        }
        Ok(())
    }

    fn clear(&self) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `map`.
        unsafe { mmap_anonymous(self.window(), self.pmd, ProtFlags::empty(), flags)? };
        Ok(())
    }

    /// Brings in one page of what is mapped, and looks what the kernel mapped with it.
    fn touch(&self, page: usize) -> io::Result<Cached> {
        let address = at(self.reserved.address + page * self.base);
        // SAFETY: a page of the window's mapping; populating it for reading changes no byte, and fails where a read
        // would be killed.
        unsafe { madvise(address, self.base, Advice::LinuxPopulateRead)? };
        let smaps = Smaps::read(&Root::host(), std::process::id()).map_err(io::Error::other)?;
        let window = self.reserved.address as u64;
        let found = smaps.mappings().find(|mapping| mapping.start == window);
        let huge = found.is_some_and(|mapping| mapping.pmd_mapped().0 >= self.pmd as u64);
        Ok(if huge { Cached::Huge } else { Cached::Small })
    }
}
