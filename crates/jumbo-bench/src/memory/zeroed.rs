//! The leaf that calls `calloc` by name, and looks at bytes as numbers: [`Zeroed`], [`numbers`].

use std::ptr::NonNull;

use jumbo::units::Bytes;

/// One allocation of zeroes, to be read and written. Freed when dropped.
pub(crate) struct Zeroed {
    start: NonNull<u8>,
    length: usize,
}

impl Zeroed {
    /// `calloc`; `None` where there is no memory.
    pub(crate) fn allocate(size: Bytes) -> Option<Self> {
        let length = usize::try_from(size.0).ok()?;
        // SAFETY: calloc may be called with any size.
        let start = unsafe { libc::calloc(1, length) }.cast::<u8>();
        // A compiler may take it that there is memory, where it sees that nothing is done with it.
        let start = NonNull::new(std::hint::black_box(start))?;
        Some(Self { start, length })
    }

    /// What it holds.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `length` bytes, all of them written by calloc, are there until the drop, and `&mut self`
        // vouches that this is the only reference to them. No allocation is larger than isize::MAX.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: it came from calloc, and no reference outlives `self`.
        unsafe { libc::free(self.start.as_ptr().cast()) };
    }
}

/// The numbers in `bytes`; the few bytes before the first aligned one and after the last whole one are left out.
pub(crate) fn numbers(bytes: &mut [u8]) -> &mut [f64] {
    // SAFETY: every pattern of bits is a number, and every number leaves bytes behind.
    let (_, numbers, _) = unsafe { bytes.align_to_mut() };
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_memory_from_calloc() {
        let mut block = Zeroed::allocate(Bytes(8001)).unwrap();
        let numbers = numbers(block.bytes_mut());
        assert_eq!(numbers.len(), 1000);
        assert!(numbers.iter().all(|number| *number == 0.0));
        numbers[999] = 1.5;
        assert_eq!(block.bytes_mut()[7998..8000], 1.5f64.to_ne_bytes()[6..]);
        assert!(Zeroed::allocate(Bytes(u64::MAX)).is_none());
    }
}
