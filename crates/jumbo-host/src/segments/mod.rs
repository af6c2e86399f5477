//! Program text and data files on huge pages, inspected and prepared from outside.
//!
//! - [`elf`]: the segments of a file. [`inspect`]: the methods for its text, and their obstacles.
//! - [`data`]: a file of another kind in the page cache.
//! - [`prime`]: reads text, or a data file, into the page cache in huge folios.
//! - [`mapped`]: the files that a process maps.
//! - [`align`]: a copy of a file, with segments aligned to huge pages.
//! - [`file_system`]: support for huge folios. [`running`]: the processes that map a file.
//!
//! See `docs/design/segments.md`.
//!
//! Invariant: only the copy is written, atomically; no page that a process maps is dropped.

pub mod align;
pub mod data;
pub mod elf;
#[cfg(test)]
mod fake;
pub mod file_system;
pub mod inspect;
mod layout;
pub mod mapped;
pub mod prime;
pub mod running;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::kernel::{FileError, Root, base_page, thp};
use crate::units::PageSize;

/// Errors of reading, aligning and comparing files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that cannot be opened, read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// No ELF file, or a broken one.
    #[error("it is no ELF executable or shared library: {0}")]
    NotElf(String),
    /// An ELF file of another word size or byte order.
    #[error("it is for machines of {0}; only 64 bits and little-endian are supported")]
    Foreign(String),
    /// An object file or a core dump: `e_type`.
    #[error("it is no executable and no shared library (ELF type {0})")]
    NotLoaded(u16),
    /// Text of less than a huge page.
    #[error("its text is smaller than a huge page ({0})")]
    Small(PageSize),
    /// A file that cannot be aligned.
    #[error("it cannot be aligned: {0}")]
    Layout(String),
    /// Original and copy are one file.
    #[error("the copy would replace the original")]
    Itself,
    /// A faulty copy, which was removed.
    #[error("the copy differs from the original ({0}) and was removed")]
    Differs(String),
}

impl From<object::read::Error> for Error {
    fn from(error: object::read::Error) -> Self {
        Self::NotElf(error.to_string())
    }
}

/// Page sizes of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The base page.
    pub base: PageSize,
    /// The huge page.
    pub pmd: PageSize,
}

impl Sizes {
    /// Reads the sizes of the kernel behind `root`.
    ///
    /// # Errors
    /// [`FileError`] where a file exists and cannot be parsed.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        Ok(Self {
            base: base_page(root),
            pmd: thp::pmd_size(root)?,
        })
    }
}

/// Opens a regular file for reading. The type is checked first: to open a FIFO waits for its
/// writer, and to open some devices has side effects.
fn open(path: &Path) -> Result<File, FileError> {
    open_regular(path).map_err(FileError::io("read", path))
}

fn open_regular(path: &Path) -> io::Result<File> {
    use rustix::fs::{AtFlags, CWD, FileType, Mode, StatxFlags};
    let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&file, c"", flags, StatxFlags::TYPE)?;
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    match reopen(&file) {
        // Without /proc; the path may be another file by now.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?.into())
        }
        opened => opened,
    }
}

/// Opens the file of a descriptor made with O_PATH for reading; EAGAIN where another process has a lease.
fn reopen(file: &OwnedFd) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).custom_flags(flags).open(path)
}

/// Writes a path for JSON, whose text is UTF-8; other bytes are replaced.
///
/// # Errors
/// Those of the serializer.
pub fn in_text<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Compares `size` bytes of two files, from an offset in each. Bytes past the end of a file are
/// zero. Bytes at offsets of the first file in `skip` may differ.
fn same_bytes(
    (a, from): (&File, u64),
    (b, to): (&File, u64),
    size: u64,
    skip: &[Range<u64>],
) -> io::Result<bool> {
    const CHUNK: usize = 1 << 20;
    let (mut one, mut other) = (vec![0; CHUNK], vec![0; CHUNK]);
    for at in (0..size).step_by(CHUNK) {
        let length = usize::try_from(size - at).unwrap_or(CHUNK).min(CHUNK);
        let (one, other) = (&mut one[..length], &mut other[..length]);
        read_padded(a, one, from + at)?;
        read_padded(b, other, to + at)?;
        let skipped = |offset: u64| skip.iter().any(|range| range.contains(&offset));
        let mut pairs = one.iter().zip(&*other).zip(from + at..);
        if one != other && !pairs.all(|((a, b), at)| a == b || skipped(at)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn read_padded(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, at)? {
            0 => {
                into.fill(0);
                return Ok(());
            }
            got => (into, at) = (&mut into[got..], at + got as u64),
        }
    }
    Ok(())
}
