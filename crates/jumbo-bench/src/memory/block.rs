//! Memory by `malloc` and by `mmap`: [`Block`], [`Mapping`]; and bytes looked at as [`numbers`].
//!
//! `mmap` and `munmap` are called by name, and so through libc, because that is where the preload library stands; rustix
//! would go past it. So is `malloc`, by this program's allocator.

use std::hint::black_box;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use jumbo::gather::{Gather, Operation};
use jumbo::units::{Bytes, PageSize};

use crate::Error;

/// The size of one huge page where one is wanted; where it is more, the claim of the side fails.
const HUGE: usize = 2 << 20;

/// One allocation.
pub(crate) struct Block(Vec<u8>);

/// One anonymous mapping, private but where it says otherwise. Not unmapped when dropped: how long that takes is measured.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl Block {
    /// `malloc`.
    pub(crate) fn allocate(size: Bytes) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        let had = bytes.try_reserve_exact(usize::try_from(size.0).unwrap_or(usize::MAX));
        had.map_err(|_| Error::Malloc(size))?;
        // A compiler may take it that there is memory, where it sees that nothing is done with it.
        Ok(Self(black_box(bytes)))
    }

    /// Writes to each base page, with two threads: how long that takes is measured nowhere.
    pub(crate) fn touch(&mut self) {
        let page = rustix::param::page_size();
        let bytes = self.0.spare_capacity_mut();
        let (head, tail) = bytes.split_at_mut(bytes.len() / 2);
        let touch = |part: &mut [MaybeUninit<u8>]| {
            for page in part.chunks_mut(page) {
                black_box(page[0].write(1));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| touch(head));
            touch(tail);
        });
    }

    /// Writes to so many base pages, which lie all over it.
    pub(crate) fn write_to(&mut self, pages: usize) {
        let bytes = self.0.spare_capacity_mut();
        let step = (bytes.len() / pages).max(1);
        for part in bytes.chunks_mut(step).take(pages) {
            black_box(part[0].write(2));
        }
    }

    /// Where it is.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.0.as_ptr().addr() as u64;
        start..start + self.0.capacity() as u64
    }
}

/// The numbers in `bytes`; the few bytes before the first aligned one and after the last whole one are left out.
pub(crate) fn numbers(bytes: &mut [u8]) -> &mut [f64] {
    // SAFETY: every pattern of bits is a number, and every number leaves bytes behind.
    let (_, numbers, _) = unsafe { bytes.align_to_mut() };
    numbers
}

impl Mapping {
    /// `mmap`.
    pub(crate) fn new(size: Bytes) -> Result<Self, Error> {
        Self::map(size.0, libc::MAP_PRIVATE)
    }

    /// `mmap` of shared memory.
    pub(crate) fn shared(size: Bytes) -> Result<Self, Error> {
        Self::map(size.0, libc::MAP_SHARED)
    }

    /// The same, at an address that PMDs can map.
    pub(crate) fn shared_aligned(size: Bytes) -> Result<Self, Error> {
        let place = Self::aligned(size, HUGE)?;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let at = place.start.as_ptr().cast();
        // SAFETY: it takes the place of a mapping that no other code knows.
        if unsafe { libc::mmap(at, place.length, rw, flags, -1, 0) } == libc::MAP_FAILED {
            return Err(last_error());
        }
        Ok(place)
    }

    /// `mmap` of one page of the kernel's pool of that size.
    pub(crate) fn hugetlb(size: PageSize) -> Result<Self, Error> {
        let log2 = size.bytes().trailing_zeros().cast_signed();
        let flags = libc::MAP_PRIVATE | libc::MAP_HUGETLB | log2 << libc::MAP_HUGE_SHIFT;
        Self::map(size.bytes(), flags)
    }

    /// `mmap` of a range that begins and ends with a huge page, advised to be of such.
    pub(crate) fn huge(size: Bytes) -> Result<Self, Error> {
        let range = Self::aligned(size, HUGE)?;
        range.advise(libc::MADV_HUGEPAGE)?;
        Ok(range)
    }

    /// `mmap` of a range with nothing behind it, so that it is no neighbour of the next.
    pub(crate) fn apart(size: Bytes) -> Result<Self, Error> {
        Self::aligned(size, rustix::param::page_size())
    }

    /// `mmap` of an aligned range with nothing around it.
    fn aligned(size: Bytes, alignment: usize) -> Result<Self, Error> {
        let wide = Self::new(size + Bytes(alignment as u64))?;
        let before = wide.start.addr().get().wrapping_neg() % alignment;
        let length = wide.length - alignment;
        let (head, rest) = wide.split(before);
        let (range, tail) = rest.split(length);
        if head.length > 0 {
            head.unmap()?;
        }
        tail.unmap()?;
        Ok(range)
    }

    fn map(size: u64, flags: libc::c_int) -> Result<Self, Error> {
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        let flags = flags | libc::MAP_ANONYMOUS;
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let start = unsafe { libc::mmap(null_mut(), length, rw, flags, -1, 0) };
        match NonNull::new(start.cast()) {
            Some(at) if start != libc::MAP_FAILED => Ok(Self { start: at, length }),
            _ => Err(last_error()),
        }
    }

    /// The first `length` bytes, and what is left.
    fn split(self, length: usize) -> (Self, Self) {
        let length = length.min(self.length);
        let tail = Self {
            // SAFETY: `length` leads at most to the end of the range.
            start: unsafe { self.start.add(length) },
            length: self.length - length,
        };
        (Self { length, ..self }, tail)
    }

    /// `madvise`, with an advice that frees nothing.
    pub(super) fn advise(&self, advice: libc::c_int) -> Result<(), Error> {
        let address = self.start.as_ptr().cast();
        // SAFETY: the memory is ours, and the advice changes nothing in it.
        match unsafe { libc::madvise(address, self.length, advice) } {
            0 => Ok(()),
            _ => Err(last_error()),
        }
    }

    /// Writes to each base page.
    pub(crate) fn touch(&mut self) {
        for page in self.bytes().chunks_mut(rustix::param::page_size()) {
            page[0] = black_box(1);
        }
    }

    /// Its bytes. Shared memory is shared with no process that writes to it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours, can be written, and holds zeroes where nothing was written.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    /// Where it is.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.start.addr().get() as u64;
        start..start + self.length as u64
    }

    /// Has a gather unmap it.
    pub(crate) fn add_to(self, gather: &mut Gather) -> Result<(), Error> {
        let start = self.start.addr().get();
        // SAFETY: as for `munmap`, below.
        let added = unsafe { gather.add(start..start + self.length, Operation::Unmap) };
        added.map_err(|error| Error::Map(error.errno.into()))
    }

    /// `munmap`.
    pub(crate) fn unmap(self) -> Result<(), Error> {
        // SAFETY: the range was mapped by `map`, and `self` was the only one to know of it.
        match unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) } {
            0 => Ok(()),
            _ => Err(last_error()),
        }
    }
}

fn last_error() -> Error {
    Error::Map(io::Error::last_os_error())
}
