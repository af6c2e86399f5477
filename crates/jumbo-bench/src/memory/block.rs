//! Memory from `malloc` and from `mmap`: [`RawBlock`]; and [`numbers`].
//!
//! All calls go through libc, where the preload library interposes; rustix would bypass it.

use std::io;
use std::ops::Range;
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

use jumbo::units::{Bytes, PageSize};

use crate::Error;
use crate::task::AllocCall;

/// Size of a huge page. If that of the host is larger, the claim of the side fails.
const HUGE_PAGE: usize = 2 << 20;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// An allocation or mapping, private unless stated otherwise. Not freed on drop.
pub(crate) struct RawBlock {
    start: NonNull<u8>,
    length: usize,
    by: AllocCall,
}

impl RawBlock {
    pub(crate) fn take(by: AllocCall, size: Bytes) -> Result<Self, Error> {
        match by {
            AllocCall::Malloc => Self::allocate(size),
            AllocCall::Map => Self::map(size.0, libc::MAP_PRIVATE),
            AllocCall::MapHuge => {
                let range = Self::aligned(size)?;
                range.advise(libc::MADV_HUGEPAGE)?;
                Ok(range)
            }
        }
    }

    fn allocate(size: Bytes) -> Result<Self, Error> {
        let (by, length) = (
            AllocCall::Malloc,
            usize::try_from(size.0).unwrap_or(usize::MAX),
        );
        // SAFETY: the argument is a number.
        let start = NonNull::new(unsafe { libc::malloc(length) }.cast());
        let start = start.ok_or(Error::Malloc(size))?;
        Ok(Self { start, length, by })
    }

    /// Maps shared memory; if `aligned`, at an address that PMDs can map.
    pub(crate) fn shared(size: Bytes, aligned: bool) -> Result<Self, Error> {
        if !aligned {
            return Self::map(size.0, libc::MAP_SHARED);
        }
        let place = Self::aligned(size)?;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = place.start.as_ptr().cast();
        // SAFETY: the mapping replaces one that is known only here.
        let mapped = unsafe { libc::mmap(at, place.length, READ_WRITE, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(last_error()),
            false => Ok(place),
        }
    }

    /// Maps private memory with MAP_POPULATE.
    pub(crate) fn populated(size: Bytes) -> Result<Self, Error> {
        Self::map(size.0, libc::MAP_PRIVATE | libc::MAP_POPULATE)
    }

    /// Maps one page of the kernel's pool of that page size.
    pub(crate) fn hugetlb(size: PageSize) -> Result<Self, Error> {
        let log2 = size.bytes().trailing_zeros().cast_signed();
        let flags = libc::MAP_PRIVATE | libc::MAP_HUGETLB | log2 << libc::MAP_HUGE_SHIFT;
        Self::map(size.bytes(), flags)
    }

    /// Maps a range that begins and ends at huge page boundaries, with nothing around it.
    fn aligned(size: Bytes) -> Result<Self, Error> {
        let wide = Self::take(AllocCall::Map, size + Bytes(HUGE_PAGE as u64))?;
        let before = wide.start.addr().get().wrapping_neg() % HUGE_PAGE;
        let length = wide.length - HUGE_PAGE;
        let (head, rest) = wide.split(before);
        let (range, tail) = rest.split(length);
        if head.length > 0 {
            head.give_back()?;
        }
        tail.give_back()?;
        Ok(range)
    }

    fn map(size: u64, flags: libc::c_int) -> Result<Self, Error> {
        let (by, length) = (AllocCall::Map, usize::try_from(size).unwrap_or(usize::MAX));
        let flags = flags | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
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

    /// Calls `madvise` with an advice that frees nothing.
    pub(crate) fn advise(&self, advice: libc::c_int) -> Result<(), Error> {
        let address = self.start.as_ptr().cast();
        // SAFETY: the memory is ours, and the advice does not change its content.
        done(unsafe { libc::madvise(address, self.length, advice) })
    }

    /// Locks the block, which makes it resident.
    pub(crate) fn lock(&self) -> Result<(), Error> {
        // SAFETY: a lock changes no byte.
        done(unsafe { libc::mlock(self.start.as_ptr().cast(), self.length) })
    }

    /// Registers the block as the buffers of an io_uring, which makes it resident. A buffer has at
    /// most 1 GiB. io_uring_register(2), Linux 5.1.
    pub(crate) fn register(&self) -> Result<(), Error> {
        const MAX_BYTES: usize = 1 << 30;
        const REGISTER_BUFFERS: libc::c_long = 0;
        /// Size of `struct io_uring_params` (linux/io_uring.h) in words.
        const PARAMETER_WORDS: usize = 30;
        let mut parameters = [0_u32; PARAMETER_WORDS];
        // SAFETY: the kernel reads and writes the parameters, which outlive the call.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if ring < 0 {
            return Err(last_error());
        }
        let parts = (0..self.length).step_by(MAX_BYTES);
        let buffers: Vec<_> = parts
            .map(|at| libc::iovec {
                // SAFETY: within the block.
                iov_base: unsafe { self.start.as_ptr().add(at) }.cast(),
                iov_len: (self.length - at).min(MAX_BYTES),
            })
            .collect();
        let (number, count) = (libc::SYS_io_uring_register, buffers.len());
        // SAFETY: the block is never freed while the ring is open, and nothing is read into it.
        let answer =
            unsafe { libc::syscall(number, ring, REGISTER_BUFFERS, buffers.as_ptr(), count) };
        if answer < 0 {
            Err(last_error())
        } else {
            Ok(())
        }
    }

    /// Frees a part of a mapping, which then reads as zeroes.
    pub(crate) fn let_go(&mut self, part: Range<usize>) -> Result<(), Error> {
        let part = self.bytes().get_mut(part).unwrap_or_default();
        let (start, advice) = (part.as_mut_ptr().cast(), libc::MADV_DONTNEED);
        // SAFETY: the memory is ours, and every content is valid.
        done(unsafe { libc::madvise(start, part.len(), advice) })
    }

    pub(crate) fn touch(&mut self) {
        write_each(self.start.as_ptr(), self.length, rustix::param::page_size());
    }

    /// Writes to each base page by two threads, where the time is not measured.
    pub(crate) fn touch_by_two(&mut self) {
        let (start, half) = (self.start.as_ptr().expose_provenance(), self.length / 2);
        let (page, rest) = (rustix::param::page_size(), self.length - half);
        let from = |start| with_exposed_provenance_mut(start);
        std::thread::scope(|scope| {
            scope.spawn(|| write_each(from(start), half, page));
            write_each(from(start + half), rest, page);
        });
    }

    /// Writes to `pages` base pages, spread over the block.
    pub(crate) fn write_to(&mut self, pages: usize) {
        write_each(
            self.start.as_ptr(),
            self.length,
            (self.length / pages).max(1),
        );
    }

    /// Bytes of a mapping. No other process writes to shared memory.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let length = if self.by == AllocCall::Malloc {
            0
        } else {
            self.length
        };
        // SAFETY: the mapping is ours, writable, and initialised: untouched pages read as zeroes.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), length) }
    }

    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.start.addr().get() as u64;
        start..start + self.length as u64
    }

    pub(crate) fn give_back(self) -> Result<(), Error> {
        let start = self.start.as_ptr().cast();
        if self.by == AllocCall::Malloc {
            // SAFETY: `malloc` returned the block, and `self` was its only owner.
            unsafe { libc::free(start) };
            return Ok(());
        }
        // SAFETY: `map` mapped the range, and `self` was its only owner.
        done(unsafe { libc::munmap(start, self.length) })
    }
}

/// Writes to the first byte of each `step` in `length` bytes from `start`.
fn write_each(start: *mut u8, length: usize, step: usize) {
    for at in (0..length).step_by(step) {
        // SAFETY: callers own `length` bytes from `start`, and no other thread writes to them.
        unsafe { start.add(at).write_volatile(1) };
    }
}

/// Numbers in `bytes`, without the unaligned bytes at both ends.
pub(crate) fn numbers(bytes: &mut [u8]) -> &mut [f64] {
    // SAFETY: every bit pattern is a valid `f64`, and every `f64` leaves valid bytes.
    let (_, numbers, _) = unsafe { bytes.align_to_mut() };
    numbers
}

fn done(result: libc::c_int) -> Result<(), Error> {
    (result == 0).then_some(()).ok_or_else(last_error)
}

fn last_error() -> Error {
    Error::Map(io::Error::last_os_error())
}
