//! Huge folios in the page cache of a file: [`PageCache`].
//!
//! The kernel has no file with the folio sizes of a file's page cache. So each PMD range of the
//! file is mapped at an aligned address and touched, and /proc/self/smaps tells by `FilePmdMapped`
//! (tmpfs: `ShmemPmdMapped`) whether a PMD maps it. With MADV_HUGEPAGE, a touch of an uncached
//! range reads the whole range at once. The file system may use one folio for it (xfs since Linux
//! 5.18, ext4 since 6.16). Cached folios stay as they are.
//!
//! Invariant: this process writes nothing, and reads no byte of the file: the truncation of a file
//! causes an error, and no SIGBUS.

#![expect(
    unsafe_code,
    reason = "files are mapped in a window that no other code knows"
)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;

use jumbo_sys::{Reserved, at};
use rustix::fs::fadvise;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};

use super::folios::Folios;
use super::smaps::Smaps;
use super::{Root, base_page};
use crate::units::{Bytes, PageSize};

/// State of one PMD range of a file in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// No page is cached.
    Absent,
    /// Some pages are cached, or all in folios that a PMD cannot map.
    Small,
    /// One folio that a PMD maps.
    Huge,
}

/// Page cache of a file, seen through a window of one PMD range.
#[derive(Debug)]
pub struct PageCache<'f> {
    file: &'f File,
    /// Addresses of the window.
    reserved: Reserved,
    pmd: usize,
    base: usize,
}

impl<'f> PageCache<'f> {
    /// Reserves a window for a file that is open for reading.
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

    /// State of the PMD range at `offset`, a multiple of its size. Reads nothing from disk where
    /// this process owns the file or may write to it. For other files mincore(2) reports all pages
    /// as resident, so missing ones are read.
    ///
    /// # Errors
    /// The errno of mmap(2), mincore(2) or madvise(2).
    pub fn look(&self, offset: u64) -> io::Result<Cached> {
        self.map(offset)?;
        match self.resident()?.iter().position(|page| *page) {
            None => Ok(Cached::Absent),
            Some(page) => self.touch(page),
        }
    }

    /// Returns the cached bytes of the PMD range at `offset` by folio size, as far as `folios` may
    /// still look. For whom [`PageCache::look`] reads nothing from disk, this does not, either.
    ///
    /// # Errors
    /// The errno of mmap(2), mincore(2) or madvise(2), or an error of [`Folios::sizes`].
    pub fn folios(
        &self,
        offset: u64,
        folios: &mut Folios,
    ) -> io::Result<BTreeMap<PageSize, Bytes>> {
        self.map(offset)?;
        let mut start = self.reserved.address;
        for run in self.resident()?.chunk_by(|a, b| a == b) {
            let length = run.len() * self.base;
            if run.first() == Some(&true) {
                // SAFETY: as in `touch`.
                unsafe { madvise(at(start), length, Advice::LinuxPopulateRead)? };
            }
            start += length;
        }
        let window = self.reserved.address as u64;
        let sizes = folios.sizes(std::process::id(), window, window + self.pmd as u64);
        sizes.map_err(io::Error::other)
    }

    /// Returns the cached bytes of the PMD range at `offset`. Reads nothing from disk.
    ///
    /// # Errors
    /// The errno of mmap(2) or mincore(2).
    pub fn bytes(&self, offset: u64) -> io::Result<Bytes> {
        self.map(offset)?;
        let pages = self.resident()?.iter().filter(|page| **page).count();
        Ok(Bytes((pages * self.base) as u64))
    }

    /// Reports for each base page of the window whether it is cached.
    fn resident(&self) -> io::Result<Vec<bool>> {
        let mut pages = vec![0u8; self.pmd / self.base];
        // SAFETY: the range is the window's mapping, and the vector has a byte for each of its
        // pages.
        match unsafe { libc::mincore(self.window(), self.pmd, pages.as_mut_ptr()) } {
            0 => Ok(pages.iter().map(|page| page & 1 != 0).collect()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reads the PMD range at `offset` into the page cache, in one folio if the file system can and
    /// no other folio is cached.
    ///
    /// # Errors
    /// The errno of mmap(2) or madvise(2): EFAULT where the file is shorter or unreadable.
    pub fn bring(&self, offset: u64) -> io::Result<Cached> {
        self.map(offset)?;
        self.touch(0)
    }

    /// Drops cached pages of the PMD range at `offset`, except mapped and dirty ones.
    ///
    /// # Errors
    /// The errno of posix_fadvise(2).
    pub fn drop_clean(&self, offset: u64) -> io::Result<()> {
        // The kernel does not drop mapped folios.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as in `map`.
        unsafe { mmap_anonymous(self.window(), self.pmd, ProtFlags::empty(), flags)? };
        let length = NonZeroU64::new(self.pmd as u64);
        Ok(fadvise(
            self.file,
            offset,
            length,
            rustix::fs::Advice::DontNeed,
        )?)
    }

    /// Maps the PMD range at `offset` in the window, and replaces the previous mapping.
    fn map(&self, offset: u64) -> io::Result<()> {
        let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the window lies in this value's own reservation, to which no reference exists.
        unsafe { mmap(self.window(), self.pmd, prot, flags, self.file, offset)? };
        // MADV_RANDOM prevents readahead of the next PMD range: its pages could not be dropped
        // later while they are read. A kernel without THP refuses MADV_HUGEPAGE; `touch` reports
        // the result.
        for advice in [Advice::LinuxHugepage, Advice::Random] {
            // SAFETY: the mapping just made; the advice changes no byte.
            let _ = unsafe { madvise(self.window(), self.pmd, advice) };
        }
        Ok(())
    }

    /// Faults one page in, and reports whether the kernel mapped it by a PMD.
    fn touch(&self, page: usize) -> io::Result<Cached> {
        let address = at(self.reserved.address + page * self.base);
        // SAFETY: a page of the window's mapping; populating it for reading changes no byte, and
        // fails where a read would be SIGBUS.
        unsafe { madvise(address, self.base, Advice::LinuxPopulateRead)? };
        let smaps = Smaps::read(&Root::host(), std::process::id()).map_err(io::Error::other)?;
        let window = self.reserved.address as u64;
        let found = smaps.mappings().find(|mapping| mapping.start == window);
        let huge = found.is_some_and(|mapping| mapping.pmd_mapped().0 >= self.pmd as u64);
        Ok(if huge { Cached::Huge } else { Cached::Small })
    }
}
