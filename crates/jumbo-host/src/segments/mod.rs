//! Map the program: its text on huge pages, seen and prepared from outside.
//!
//! - [`elf`]: the segments of a file. [`inspect`]: what each rung of the ladder would give it, and why not.
//! - [`prime`]: a file's text into the page cache in huge folios.
//! - [`mapped`]: the text of a process as it is.
//! - [`images`]: the copies that processes share.
//! - [`align`]: a copy whose segments lie as huge folios do.
//! - [`file_system`]: which of them have huge folios. [`running`]: which processes map a file.
//!
//! It uses `kernel`, of `policy` the reading of ELF headers, and `whole_file`. See `docs/design/segments.md`.
//!
//! Invariant: no file is written but the copy, whole or not at all; what a process maps is
//! never taken from it.

pub mod align;
pub mod elf;
#[cfg(test)]
mod fake;
pub mod file_system;
pub mod images;
pub mod inspect;
mod layout;
pub mod mapped;
pub mod prime;
pub mod running;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::kernel::{FileError, Root, base_page, thp};
use crate::units::PageSize;

/// Why a file's segments are not known, or cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Opening, reading or writing failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file of /proc or /sys.
    #[error(transparent)]
    Kernel(#[from] FileError),
    /// No ELF file, or a broken one.
    #[error("it is no ELF executable or shared library: {0}")]
    NotElf(String),
    /// An ELF file that this is not made for.
    #[error("it is for machines of {0}; only 64 bits and little-endian are supported")]
    Foreign(String),
    /// An object file or a core dump: `e_type`.
    #[error("it is no executable and no shared library (ELF type {0})")]
    NotLoaded(u16),
    /// None of its text can be huge.
    #[error("its text is smaller than a huge page ({0})")]
    Small(PageSize),
    /// It cannot be laid out otherwise.
    #[error("it cannot be aligned: {0}")]
    Layout(String),
    /// Original and copy are one file.
    #[error("the copy would replace the original")]
    Itself,
    /// The copy is not what it should be; nothing was left of it.
    #[error("the copy is not as the original: it has {0}, and was removed")]
    Differs(String),
}

impl Error {
    fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            operation,
            path,
            source,
        }
    }
}

/// The base page, and what one PMD maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The base page.
    pub base: PageSize,
    /// The huge page.
    pub pmd: PageSize,
}

impl Sizes {
    /// Those of the kernel behind `root`.
    ///
    /// # Errors
    /// [`FileError`] where the file is there and cannot be understood.
    pub fn read(root: &Root) -> Result<Self, FileError> {
        Ok(Self {
            base: base_page(root),
            pmd: thp::pmd_size(root)?,
        })
    }
}

/// A regular file, open to be read. Looked at before it is opened: opening a FIFO waits for its writer, and opening some devices does
/// something.
fn open(path: &Path) -> Result<File, Error> {
    open_regular(path).map_err(Error::io("read", path))
}

fn open_regular(path: &Path) -> io::Result<File> {
    use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
    let there = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&there, c"", flags, StatxFlags::TYPE)?;
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    let number = std::os::fd::AsRawFd::as_raw_fd(&there);
    match File::open(format!("/proc/self/fd/{number}")) {
        // Without /proc: what was looked at may be another file by now.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?.into())
        }
        opened => opened,
    }
}

/// Whether so many bytes of two files are alike, from an offset in each. A file holds zeroes behind its end. The bytes at
/// offsets in `skip`, of the first one, may differ.
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
