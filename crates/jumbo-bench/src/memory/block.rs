//! Memory by `malloc` and by `mmap`: [`Block`]; and bytes looked at as [`numbers`].
//!
//! All calls are made by name, and so through libc, because that is where the preload library
//! stands; rustix would go past it.

use std::io;
use std::ops::Range;
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

use jumbo::units::{Bytes, PageSize};

use crate::Error;
use crate::task::By;

/// The size of one huge page where one is wanted; where it is more, the claim of the side fails.
const HUGE: usize = 2 << 20;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// One allocation or anonymous mapping, private but where it says otherwise. Not given back when
/// dropped: how long that takes is measured.
pub(crate) struct Block {
    start: NonNull<u8>,
    length: usize,
    by: By,
}

impl Block {
    /// Memory by that call.
    pub(crate) fn take(by: By, size: Bytes) -> Result<Self, Error> {
        match by {
            By::Malloc => Self::allocate(size),
            By::Map => Self::map(size.0, libc::MAP_PRIVATE),
            By::MapHuge => {
                let range = Self::aligned(size)?;
                range.advise(libc::MADV_HUGEPAGE)?;
                Ok(range)
            }
        }
    }

    fn allocate(size: Bytes) -> Result<Self, Error> {
        let (by, length) = (By::Malloc, usize::try_from(size.0).unwrap_or(usize::MAX));
        // SAFETY: takes a number.
        let start = NonNull::new(unsafe { libc::malloc(length) }.cast());
        let start = start.ok_or(Error::Malloc(size))?;
        Ok(Self { start, length, by })
    }

    /// `mmap` of shared memory; where that is set at an address that PMDs can map.
    pub(crate) fn shared(size: Bytes, aligned: bool) -> Result<Self, Error> {
        if !aligned {
            return Self::map(size.0, libc::MAP_SHARED);
        }
        let place = Self::aligned(size)?;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = place.start.as_ptr().cast();
        // SAFETY: it takes the place of a mapping that no other code knows.
        let mapped = unsafe { libc::mmap(at, place.length, READ_WRITE, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(last_error()),
            false => Ok(place),
        }
    }

    /// `mmap` of one page of the kernel's pool of that size.
    pub(crate) fn hugetlb(size: PageSize) -> Result<Self, Error> {
        let log2 = size.bytes().trailing_zeros().cast_signed();
        let flags = libc::MAP_PRIVATE | libc::MAP_HUGETLB | log2 << libc::MAP_HUGE_SHIFT;
        Self::map(size.bytes(), flags)
    }

    /// `mmap` of a range that begins and ends with a huge page, with nothing around it.
    fn aligned(size: Bytes) -> Result<Self, Error> {
        let wide = Self::take(By::Map, size + Bytes(HUGE as u64))?;
        let before = wide.start.addr().get().wrapping_neg() % HUGE;
        let length = wide.length - HUGE;
        let (head, rest) = wide.split(before);
        let (range, tail) = rest.split(length);
        if head.length > 0 {
            head.give_back()?;
        }
        tail.give_back()?;
        Ok(range)
    }

    fn map(size: u64, flags: libc::c_int) -> Result<Self, Error> {
        let (by, length) = (By::Map, usize::try_from(size).unwrap_or(usize::MAX));
        let flags = flags | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let start = unsafe { libc::mmap(null_mut(), length, READ_WRITE, flags, -1, 0) };
        match NonNull::new(start.cast()) {
            Some(at) if start != libc::MAP_FAILED => Ok(Self {
                start: at,
                length,
                by,
            }),
            _ => Err(last_error()),
        }
    }

    /// The first `length` bytes of a mapping, and what is left.
    fn split(self, length: usize) -> (Self, Self) {
        let length = length.min(self.length);
        let tail = Self {
            // SAFETY: `length` leads at most to the end of the range.
            start: unsafe { self.start.add(length) },
            length: self.length - length,
            ..self
        };
        (Self { length, ..self }, tail)
    }

    /// `madvise`, with an advice that frees nothing.
    pub(crate) fn advise(&self, advice: libc::c_int) -> Result<(), Error> {
        let address = self.start.as_ptr().cast();
        // SAFETY: the memory is ours, and the advice changes nothing in it.
        done(unsafe { libc::madvise(address, self.length, advice) })
    }

    /// Gives back the memory behind a part of a mapping, which holds zeroes then.
    pub(crate) fn let_go(&mut self, part: Range<usize>) -> Result<(), Error> {
        let part = self.bytes().get_mut(part).unwrap_or_default();
        let (start, advice) = (part.as_mut_ptr().cast(), libc::MADV_DONTNEED);
        // SAFETY: the memory is ours, and any bytes may be in it.
        done(unsafe { libc::madvise(start, part.len(), advice) })
    }

    /// Writes to each base page.
    pub(crate) fn touch(&mut self) {
        write_each(self.start.as_ptr(), self.length, rustix::param::page_size());
    }

    /// The same with two threads: how long that takes is measured nowhere.
    pub(crate) fn touch_by_two(&mut self) {
        let (start, half) = (self.start.as_ptr().expose_provenance(), self.length / 2);
        let (page, rest) = (rustix::param::page_size(), self.length - half);
        let from = |start| with_exposed_provenance_mut(start);
        std::thread::scope(|scope| {
            scope.spawn(|| write_each(from(start), half, page));
            write_each(from(start + half), rest, page);
        });
    }

    /// Writes to so many base pages, which lie all over it.
    pub(crate) fn write_to(&mut self, pages: usize) {
        write_each(
            self.start.as_ptr(),
            self.length,
            (self.length / pages).max(1),
        );
    }

    /// The bytes of a mapping. Shared memory is shared with no process that writes to it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let length = if self.by == By::Malloc {
            0
        } else {
            self.length
        };
        // SAFETY: the mapping is ours, can be written, and holds zeroes where nothing was written.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), length) }
    }

    /// Where it is.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.start.addr().get() as u64;
        start..start + self.length as u64
    }

    /// `free` or `munmap`.
    pub(crate) fn give_back(self) -> Result<(), Error> {
        let start = self.start.as_ptr().cast();
        if self.by == By::Malloc {
            // SAFETY: `malloc` returned it, and `self` was the only one to know of it.
            unsafe { libc::free(start) };
            return Ok(());
        }
        // SAFETY: the range was mapped by `map`, and `self` was the only one to know of it.
        done(unsafe { libc::munmap(start, self.length) })
    }
}

/// Writes to the first byte of each `step` of so many from `start` on.
fn write_each(start: *mut u8, length: usize, step: usize) {
    for at in (0..length).step_by(step) {
        // SAFETY: a caller has so much memory from there on, and no other thread writes to it.
        unsafe { start.add(at).write_volatile(1) };
    }
}

/// The numbers in `bytes`; the few bytes before the first aligned one and after the last whole one are left out.
pub(crate) fn numbers(bytes: &mut [u8]) -> &mut [f64] {
    // SAFETY: every pattern of bits is a number, and every number leaves bytes behind.
    let (_, numbers, _) = unsafe { bytes.align_to_mut() };
    numbers
}

fn done(result: libc::c_int) -> Result<(), Error> {
    (result == 0).then_some(()).ok_or_else(last_error)
}

fn last_error() -> Error {
    Error::Map(io::Error::last_os_error())
}
