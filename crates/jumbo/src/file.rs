//! A file in memory, read-only, on huge pages: [`Map`].
//!
//! [`Map::open`] maps the file, advised before its first touch, so that the kernel reads what is not
//! cached in huge folios. It costs no memory beyond the page cache, which processes share. Where the
//! page cache stays in small folios (an older kernel or another file system, a file that was read
//! in before), [`Map::copy`] reads the file into anonymous huge memory, by several threads.
//!
//! ```no_run
//! use jumbo::file::Map;
//!
//! let file = std::fs::File::open("weights.bin")?;
//! // SAFETY: nobody writes to the file or shortens it.
//! let map = match unsafe { Map::open(&file, true)? } {
//!     map if map.is_huge() => map,
//!     _ => Map::copy(&file, 0)?,
//! };
//! println!("{} bytes, {}", map.len(), map.method());
//! # Ok::<(), std::io::Error>(())
//! ```
#![expect(unsafe_code, reason = "maps files")]

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use jumbo_inside::orders::MAX_POPULATE_WORKERS as MAX_WORKERS;
use jumbo_inside::populate::{Access, populate};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::gather::OwnedMapping;
use crate::units::Bytes;
use jumbo_sys::files::Root;
use jumbo_sys::smaps::Smaps;
use jumbo_sys::{Reserved, at, thp};

/// Bytes that a thread of [`Map::copy`] reads at a time.
const PIECE_BYTES: usize = 8 << 20;

/// How a file came onto its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// Mapped, with at least half of what fits mapped by huge pages of the page cache.
    PageCache,
    /// Copied into anonymous memory, advised to be huge.
    Copy,
    /// Mapped, mostly in base pages.
    BasePages,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PageCache => "mapped by huge pages of the page cache",
            Self::Copy => "copied into huge pages",
            Self::BasePages => "mapped by base pages",
        })
    }
}

/// The bytes of a file, unmapped by drop.
#[derive(Debug)]
pub struct Map {
    memory: Memory,
    length: usize,
    method: Method,
}

#[derive(Debug)]
enum Memory {
    /// The file is mapped over reserved addresses.
    Mapped(Reserved),
    Copied(OwnedMapping),
    /// An empty file.
    None,
}

impl Map {
    /// Maps a file that can be read, at an address that PMDs can map. `whole` reads all of it now;
    /// else each part comes with its first touch, a huge page at a time, and [`Map::method`] is
    /// what is cached so far.
    ///
    /// # References
    /// MADV_HUGEPAGE of file mappings: xfs since Linux 5.18, ext4 since 6.16. MADV_POPULATE_READ:
    /// Linux 5.14.
    ///
    /// # Errors
    /// `InvalidInput`: no regular file. Others of mmap(2): ENODEV, a file system without mappings;
    /// ENOMEM, no addresses. With `whole`, also EFAULT: the disk fails, or the file was shortened.
    ///
    /// # Safety
    /// While the map lives, no process writes to the file or shortens it: the bytes would change
    /// under a reference to them, and a read behind the end ends the process with SIGBUS.
    pub unsafe fn open(file: &File, whole: bool) -> io::Result<Self> {
        let length = length_of(file)?;
        if length == 0 {
            return Ok(Self::empty());
        }
        let root = Root::host();
        let pmd = thp::pmd_size(&root).map_or(2 << 20, |pmd| pmd.bytes());
        let pmd = usize::try_from(pmd).map_err(io::Error::other)?;
        let mapped = length.next_multiple_of(rustix::param::page_size());
        let place = Reserved::new(mapped, pmd)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces a part of the reservation.
        unsafe { mm::mmap(at(place.address), length, ProtFlags::READ, flags, file, 0)? };
        // A kernel or file system without huge folios refuses, or takes it without effect.
        // SAFETY: advice changes no byte.
        let _ = unsafe { mm::madvise(at(place.address), mapped, Advice::LinuxHugepage) };
        if whole {
            // One thread: several do not read a disk faster.
            match populate(place.address, mapped, Access::Read, 1) {
                Ok(_) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let huge = huge_bytes(&root, place.address);
        let method = match huge.0 * 2 >= (mapped / pmd * pmd).max(1) as u64 {
            true => Method::PageCache,
            false => Method::BasePages,
        };
        Ok(Self {
            memory: Memory::Mapped(place),
            length,
            method,
        })
    }

    /// Copies a file into anonymous memory on huge pages, by at most `threads` threads; 0: the CPUs
    /// of this thread, at most 4. It takes as much memory as the file has bytes, beside the page
    /// cache.
    ///
    /// # Errors
    /// `InvalidInput`: no regular file, or more than 64 threads; `UnexpectedEof`: the file was
    /// shortened. Others of mmap(2) and read(2).
    pub fn copy(file: &File, threads: u32) -> io::Result<Self> {
        let length = length_of(file)?;
        if length == 0 {
            return Ok(Self::empty());
        }
        let threads = match threads {
            0 => std::thread::available_parallelism()?.get().min(4),
            some if some <= MAX_WORKERS => some as usize,
            more => return Err(invalid(format!("{more} threads; at most {MAX_WORKERS}"))),
        };
        let mut memory = OwnedMapping::new(Bytes(length as u64))?;
        // A kernel without THP refuses.
        let _ = memory.advise_huge();
        let pieces = Mutex::new(memory[..length].chunks_mut(PIECE_BYTES).enumerate());
        let read = || -> io::Result<()> {
            let next = || pieces.lock().map_or(None, |mut pieces| pieces.next());
            while let Some((index, piece)) = next() {
                file.read_exact_at(piece, (index * PIECE_BYTES) as u64)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            // At a limit of threads fewer read.
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, read).ok();
            let others: Vec<_> = (1..threads).filter_map(start).collect();
            let joined = others.into_iter().map(std::thread::ScopedJoinHandle::join);
            let answers = std::iter::once(read()).chain(
                joined.map(|answer| answer.unwrap_or_else(|_| Err(io::Error::other("panic")))),
            );
            answers.collect::<io::Result<()>>()
        })?;
        Ok(Self {
            memory: Memory::Copied(memory),
            length,
            method: Method::Copy,
        })
    }

    fn empty() -> Self {
        Self {
            memory: Memory::None,
            length: 0,
            method: Method::BasePages,
        }
    }

    /// Returns how the file came onto its pages.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Reports whether the file is on huge pages, as far as it can be.
    pub fn is_huge(&self) -> bool {
        self.method != Method::BasePages
    }

    /// Returns the bytes that are mapped by huge pages now. It reads /proc/self/smaps, which takes
    /// milliseconds.
    pub fn huge(&self) -> Bytes {
        match &self.memory {
            Memory::Mapped(place) => huge_bytes(&Root::host(), place.address),
            Memory::Copied(memory) => huge_bytes(&Root::host(), memory.as_ptr().addr()),
            Memory::None => Bytes(0),
        }
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: mapped until the drop, to be read; the caller of `open` keeps the bytes as
            // they are.
            Memory::Mapped(place) => unsafe {
                std::slice::from_raw_parts(at(place.address).cast(), self.length)
            },
            Memory::Copied(memory) => &memory[..self.length],
            Memory::None => &[],
        }
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

fn length_of(file: &File) -> io::Result<usize> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(invalid(String::from("not a regular file")));
    }
    usize::try_from(metadata.len()).map_err(io::Error::other)
}

/// Returns the bytes mapped by PMDs in the mapping at an address; 0 if smaps cannot be read.
fn huge_bytes(root: &Root, address: usize) -> Bytes {
    let smaps = Smaps::read(root, std::process::id());
    let address = address as u64;
    smaps.map_or(Bytes(0), |smaps| {
        let mut mappings = smaps.mappings();
        let mapping = mappings.find(|mapping| (mapping.start..mapping.end).contains(&address));
        mapping.map_or(Bytes(0), |mapping| mapping.pmd_mapped())
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn both_methods_have_the_bytes_of_the_file() {
        for length in [0, 1, 4096, (20 << 20) + 123] {
            let bytes: Vec<u8> = (0..=250).cycle().take(length).collect();
            let file = file_of(&bytes);
            for whole in [false, true] {
                // SAFETY: only this test has the file.
                let map = unsafe { Map::open(&file, whole) }.unwrap();
                assert!(*map == *bytes && map.huge() <= Bytes(20 << 20));
            }
            for threads in [0, 1, 7] {
                let map = Map::copy(&file, threads).unwrap();
                assert!(*map == *bytes);
                assert_eq!(map.is_huge(), length > 0);
            }
        }
    }

    #[test]
    fn what_is_no_file_is_refused() {
        for path in ["/dev/zero", "/"] {
            let file = File::open(path).unwrap();
            // SAFETY: nothing is mapped.
            let mapped = unsafe { Map::open(&file, true) };
            let kinds = [mapped.unwrap_err(), Map::copy(&file, 1).unwrap_err()];
            let kinds = kinds.map(|error| error.kind());
            assert_eq!(kinds, [io::ErrorKind::InvalidInput; 2], "{path}");
        }
        let many = Map::copy(&file_of(b"x"), 65).unwrap_err();
        assert!(many.to_string().contains("at most 64"), "{many}");
    }
}
