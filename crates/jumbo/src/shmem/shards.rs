//! The files of a region, side by side: [`Shards`].
//!
//! A file has one lock under which its pages come and go, so two threads that free one file are slower than one, and two that
//! free two files are faster.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags, SealFlags, SeekFrom};
use rustix::io::{Errno, Result};

use crate::kernel::sys::memfd;
use crate::units::PageSize;

/// Files of `each` bytes, the last of which ends with the region.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<OwnedFd>,
    /// How many bytes of the region each has, at most: a multiple of the size of its pages.
    pub(super) each: usize,
    /// The pages of hugetlb files; `None`: memfds of shared memory.
    hugetlb: Option<PageSize>,
}

/// What of a range has pages, in memory or in swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Nothing,
    Part,
    All,
}

impl Shards {
    pub(super) fn new(each: usize, hugetlb: Option<PageSize>) -> Self {
        let files = Vec::new();
        Self {
            files,
            each,
            hugetlb,
        }
    }

    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd)
    }

    /// One more file, empty.
    pub(super) fn add(&mut self) -> Result<BorrowedFd<'_>> {
        self.files.push(memfd(c"jumbo-region", self.hugetlb)?);
        self.files.last().map(AsFd::as_fd).ok_or(Errno::BADF)
    }

    /// Removes the files from that number on.
    pub(super) fn truncate(&mut self, files: usize) {
        self.files.truncate(files);
    }

    /// The files, each with its part of a length.
    fn lengths(&self, length: usize) -> impl DoubleEndedIterator<Item = (usize, &OwnedFd, u64)> {
        self.files.iter().enumerate().map(move |(index, file)| {
            let own = length.saturating_sub(index * self.each).min(self.each);
            (index, file, own as u64)
        })
    }

    /// Makes the files as long as a region of so many bytes, which are a whole number of the files' pages.
    pub(super) fn set_length(&self, length: usize) -> Result<()> {
        self.lengths(length)
            .try_for_each(|(_, file, own)| fs::ftruncate(file, own))
    }

    /// Cuts the files to the lengths of a smaller region, the last one first. On an error it says for how large a region they
    /// are long enough.
    pub(super) fn cut(&self, length: usize) -> std::result::Result<(), (usize, Errno)> {
        for (index, file, own) in self.lengths(length).rev() {
            let left = |errno| ((index + 1) * self.each, errno);
            fs::ftruncate(file, own).map_err(left)?;
        }
        Ok(())
    }

    /// Whether no seal keeps the files from being cut so. F_GET_SEALS, Linux 3.17; of huge pages 4.16.
    pub(super) fn may_cut(&self, length: usize) -> Result<()> {
        for (index, file) in self.files.iter().enumerate() {
            // One that keeps its length may be sealed.
            let is_cut = (index + 1) * self.each > length;
            if is_cut && fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
                return Err(Errno::PERM);
            }
        }
        Ok(())
    }

    /// A range of the region by its files: number, range in the file.
    pub(super) fn parts(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let each = self.each;
        let files = range.start / each..range.end.div_ceil(each);
        files.map(move |index| {
            let base = index * each;
            let start = range.start.max(base) - base;
            (index, start..range.end.min(base + each) - base)
        })
    }

    /// Gives the pages of a range back, and fills the rest of those that are in it in part with zeroes. fallocate(2) with
    /// FALLOC_FL_PUNCH_HOLE, Linux 3.5; hugetlb 4.3.
    pub(super) fn punch(&self, range: Range<usize>) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (index, part) in self.parts(range) {
            let Some(file) = self.files.get(index) else {
                continue;
            };
            let (start, length) = (part.start as u64, part.len() as u64);
            // A signal cuts it short, and what was done stays done.
            while let Err(errno) = fs::fallocate(file, flags, start, length) {
                match errno {
                    Errno::INTR => {}
                    errno => return Err(errno),
                }
            }
        }
        Ok(())
    }

    /// What of a range, which lies within one file, has pages. lseek(2) with SEEK_DATA, Linux 3.1.
    pub(super) fn extent(&self, range: Range<usize>) -> Result<Extent> {
        let (index, start) = (range.start / self.each, range.start % self.each);
        let (start, end) = (start as u64, (start + range.len()) as u64);
        let file = self.files.get(index).ok_or(Errno::BADF)?;
        match fs::seek(file, SeekFrom::Data(start)) {
            Err(Errno::NXIO) => Ok(Extent::Nothing),
            Err(error) => Err(error),
            Ok(data) if data >= end => Ok(Extent::Nothing),
            Ok(data) if data > start => Ok(Extent::Part),
            Ok(_) => match fs::seek(file, SeekFrom::Hole(start))? >= end {
                true => Ok(Extent::All),
                false => Ok(Extent::Part),
            },
        }
    }

    /// The files keep their lengths for good. F_ADD_SEALS, Linux 3.17; of huge pages 4.16.
    pub(super) fn seal(&self) -> Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        self.files
            .iter()
            .try_for_each(|file| fs::fcntl_add_seals(file, seals))
    }
}
