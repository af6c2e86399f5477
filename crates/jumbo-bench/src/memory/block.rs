//! The leaf that calls `malloc`, `calloc`, `free`, `mmap` and `munmap` by name, as a C program would: [`Block`],
//! [`Mapping`], [`zeroed`]; and that looks at bytes as [`numbers`].
//!
//! By name, and so through libc, because that is where the preload library stands; rustix would go past it.
//! Neither is freed when dropped: when that happens is what is measured, and the process ends soon after.

use std::io;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use jumbo::units::{Bytes, PageSize};

/// What one huge page maps where one is wanted; where it is more, the claim of the side fails.
const HUGE: usize = 2 << 20;

/// One allocation.
pub(crate) struct Block(Stretch);

/// One private anonymous mapping.
pub(crate) struct Mapping(Stretch);

/// Memory that no other code knows of.
struct Stretch {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is memory; nothing about it belongs to a thread.
unsafe impl Send for Stretch {}

impl Block {
    /// `malloc`; `None` where there is no memory.
    pub(crate) fn allocate(size: Bytes) -> Option<Self> {
        let length = usize::try_from(size.0).ok()?;
        // SAFETY: malloc may be called with any size.
        let start = unsafe { libc::malloc(length) }.cast::<u8>();
        // A compiler may take it that there is memory, where it sees that nothing is done with it.
        let start = NonNull::new(std::hint::black_box(start))?;
        Some(Self(Stretch { start, length }))
    }

    /// Writes to each base page, with two threads: how long that takes is measured nowhere.
    pub(crate) fn touch(&mut self) {
        let page = rustix::param::page_size();
        let (mut head, mut tail) = self.0.split((self.0.length / 2).next_multiple_of(page));
        std::thread::scope(|scope| {
            scope.spawn(|| head.touch());
            tail.touch();
        });
    }

    /// Where it is.
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.0.addresses()
    }

    /// `free`.
    pub(crate) fn free(self) {
        // SAFETY: it came from malloc, and `self` was the only one to know of it.
        unsafe { libc::free(self.0.start.as_ptr().cast()) };
    }
}

/// `calloc`, for the rest of the process's life; `None` where there is no memory.
pub(crate) fn zeroed(size: Bytes) -> Option<&'static mut [u8]> {
    let length = usize::try_from(size.0).ok()?;
    // SAFETY: calloc may be called with any size.
    let start = unsafe { libc::calloc(1, length) }.cast::<u8>();
    let start = NonNull::new(std::hint::black_box(start))?;
    // SAFETY: `length` bytes, all of them written by calloc, are there and are never freed, and no other code
    // knows of them. No allocation is larger than isize::MAX.
    Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), length) })
}

/// The numbers in `bytes`; the few bytes before the first aligned one and after the last whole one are left out.
pub(crate) fn numbers(bytes: &mut [u8]) -> &mut [f64] {
    // SAFETY: every pattern of bits is a number, and every number leaves bytes behind.
    let (_, numbers, _) = unsafe { bytes.align_to_mut() };
    numbers
}

impl Mapping {
    /// `mmap`.
    pub(crate) fn new(size: Bytes) -> io::Result<Self> {
        let length = usize::try_from(size.0).map_err(io::Error::other)?;
        Self::map(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    /// `mmap` of one page of the kernel's pool of that size.
    pub(crate) fn hugetlb(size: PageSize) -> io::Result<Self> {
        let length = usize::try_from(size.bytes()).map_err(io::Error::other)?;
        let log2 = size.bytes().trailing_zeros().cast_signed();
        let flags = libc::MAP_HUGETLB | log2 << libc::MAP_HUGE_SHIFT;
        Self::map(length, flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    fn map(length: usize, flags: libc::c_int) -> io::Result<Self> {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let start = unsafe { libc::mmap(null_mut(), length, rw, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self(Stretch { start, length }))
    }

    /// `mmap` of a range that begins and ends with a huge page, advised to be of such.
    pub(crate) fn huge(size: Bytes) -> io::Result<Self> {
        let wide = Self::new(size + Bytes(HUGE as u64))?;
        let before = wide.0.start.addr().get().wrapping_neg() % HUGE;
        let (head, rest) = wide.0.split(before);
        let (aligned, tail) = rest.split(wide.0.length - HUGE);
        for end in [head, tail] {
            if end.length > 0 {
                Self(end).unmap()?;
            }
        }
        let address = aligned.start.as_ptr().cast();
        // SAFETY: the advice is on memory that is ours, and changes nothing in it.
        match unsafe { libc::madvise(address, aligned.length, libc::MADV_HUGEPAGE) } {
            0 => Ok(Self(aligned)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Writes to each base page.
    pub(crate) fn touch(&mut self) {
        self.0.touch();
    }

    /// Writes to the first base page.
    pub(crate) fn touch_first(&mut self) {
        self.0.touch_at(0);
    }

    /// Where it is.
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.0.addresses()
    }

    /// `munmap`.
    pub(crate) fn unmap(self) -> io::Result<()> {
        // SAFETY: the range was mapped by `new`, and `self` was the only one to know of it.
        match unsafe { libc::munmap(self.0.start.as_ptr().cast(), self.0.length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Stretch {
    fn touch(&mut self) {
        for offset in (0..self.length).step_by(rustix::param::page_size()) {
            self.touch_at(offset);
        }
    }

    fn touch_at(&mut self, offset: usize) {
        if offset < self.length {
            // SAFETY: the offset is inside of memory that is ours and can be written. Volatile, because
            // nothing ever reads it: a compiler may leave out such an allocation as a whole.
            unsafe { self.start.add(offset).write_volatile(1) };
        }
    }

    fn addresses(&self) -> Range<u64> {
        let start = self.start.addr().get() as u64;
        start..start + self.length as u64
    }

    /// The first `length` bytes, and what is left.
    fn split(&self, length: usize) -> (Self, Self) {
        let length = length.min(self.length);
        let head = Self {
            start: self.start,
            length,
        };
        let tail = Self {
            // SAFETY: `length` leads at most to the end of the range.
            start: unsafe { self.start.add(length) },
            length: self.length - length,
        };
        (head, tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_touched_and_freed() {
        let mut block = Block::allocate(Bytes(1 << 20)).unwrap();
        block.touch();
        block.touch();
        block.free();
        assert!(Block::allocate(Bytes(u64::MAX)).is_none());
    }

    #[test]
    fn numbers_in_memory_from_calloc() {
        let bytes = zeroed(Bytes(8001)).unwrap();
        let numbers = numbers(bytes);
        assert_eq!(numbers.len(), 1000);
        assert!(numbers.iter().all(|number| *number == 0.0));
        numbers[999] = 1.5;
        assert_eq!(bytes[7998..8000], 1.5f64.to_ne_bytes()[6..]);
        assert!(zeroed(Bytes(u64::MAX)).is_none());
    }

    #[test]
    fn a_mapping_is_whole_or_begins_with_a_huge_page() {
        let size = Bytes(3 * HUGE as u64);
        let mut mapping = Mapping::new(size).unwrap();
        mapping.touch();
        mapping.unmap().unwrap();
        // Refused by a kernel without THP only.
        if let Ok(mut mapping) = Mapping::huge(size) {
            assert_eq!(mapping.0.start.addr().get() % HUGE, 0);
            assert_eq!(mapping.0.length as u64, size.0);
            mapping.touch();
            mapping.unmap().unwrap();
        }
        assert!(Mapping::new(Bytes(0)).is_err());
    }
}
