//! The memfd of a region: [`File`].

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags, SealFlags, SeekFrom};
use rustix::io::{Errno, Result};

use crate::units::PageSize;
use jumbo_sys::memfd;

/// A memfd of shared memory, or of hugetlb pages.
#[derive(Debug)]
pub(super) struct File(OwnedFd);

/// Share of a range that has pages, in memory or in swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Nothing,
    Part,
    All,
}

impl File {
    pub(super) fn new(hugetlb: Option<PageSize>) -> Result<Self> {
        memfd(c"jumbo-region", hugetlb).map(Self)
    }

    /// Wraps a file of shared memory. Returns its length, and its page size on hugetlbfs.
    ///
    /// # Errors
    /// EINVAL: a file of another kind.
    pub(super) fn of(file: OwnedFd) -> Result<(Self, u64, Option<PageSize>)> {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
        let system = fs::fstatfs(&file)?;
        let size = match u64::try_from(system.f_type) {
            Ok(TMPFS_MAGIC) => None,
            Ok(HUGETLBFS_MAGIC) => u64::try_from(system.f_bsize).ok(),
            _ => return Err(Errno::INVAL),
        };
        let length = u64::try_from(fs::fstat(&file)?.st_size).unwrap_or(0);
        let size = size.and_then(|size| PageSize::new(size).ok());
        Ok((Self(file), length, size))
    }

    /// Reports whether the length is sealed; false for a file without seals.
    pub(super) fn is_sealed(&self) -> bool {
        let length = SealFlags::SHRINK | SealFlags::GROW;
        fs::fcntl_get_seals(&self.0).is_ok_and(|seals| seals.contains(length))
    }

    pub(super) fn set_length(&self, length: usize) -> Result<()> {
        fs::ftruncate(&self.0, length as u64)
    }

    /// Fails with EPERM if a seal forbids truncation. F_GET_SEALS, Linux 3.17; of huge pages 4.16.
    pub(super) fn may_cut(&self) -> Result<()> {
        match fs::fcntl_get_seals(&self.0)?.contains(SealFlags::SHRINK) {
            true => Err(Errno::PERM),
            false => Ok(()),
        }
    }

    /// Frees the pages of a range, and zeroes the parts of incomplete pages. fallocate(2) with
    /// FALLOC_FL_PUNCH_HOLE, Linux 3.5; hugetlb 4.3.
    pub(super) fn punch(&self, range: Range<usize>) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, length) = (range.start as u64, range.len() as u64);
        // A repeated call after a signal is harmless.
        rustix::io::retry_on_intr(|| fs::fallocate(&self.0, flags, start, length))
    }

    /// Returns the share of a range that has pages. lseek(2) with SEEK_DATA, Linux 3.1.
    pub(super) fn extent(&self, range: Range<usize>) -> Result<Extent> {
        let (start, end) = (range.start as u64, range.end as u64);
        match fs::seek(&self.0, SeekFrom::Data(start)) {
            Err(Errno::NXIO) => Ok(Extent::Nothing),
            Err(error) => Err(error),
            Ok(data) if data >= end => Ok(Extent::Nothing),
            Ok(data) if data > start => Ok(Extent::Part),
            Ok(_) => match fs::seek(&self.0, SeekFrom::Hole(start))? >= end {
                true => Ok(Extent::All),
                false => Ok(Extent::Part),
            },
        }
    }

    /// Seals the length. F_ADD_SEALS, Linux 3.17; of huge pages 4.16.
    pub(super) fn seal(&self) -> Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fs::fcntl_add_seals(&self.0, seals)
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
