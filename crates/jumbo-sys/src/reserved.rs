//! Reserved addresses without memory: [`Reserved`].

#![expect(unsafe_code, reason = "gives addresses back")]

use core::ffi::c_void;

use rustix::io::{Errno, Result};

use crate::{reserve_anywhere, unmap};

/// A range of addresses without access, for mappings of its owner; unmapped by drop.
#[derive(Debug)]
pub struct Reserved {
    start: usize,
    whole: usize,
    /// First address with the requested alignment.
    pub address: usize,
}

/// Returns the pointer to an address.
pub fn at(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

impl Reserved {
    /// Reserves `length` bytes at a multiple of `align`.
    ///
    /// # References
    /// mmap(2), MAP_NORESERVE.
    ///
    /// # Errors
    /// ENOMEM: not that many addresses, or beyond `ulimit -v`.
    pub fn new(length: usize, align: usize) -> Result<Self> {
        let whole = length.checked_add(align).ok_or(Errno::NOMEM)?;
        let start = reserve_anywhere(whole)?;
        Ok(Self {
            start,
            whole,
            address: start.next_multiple_of(align),
        })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the range is this value's; references into it borrow from its owner.
        let _ = unsafe { unmap(self.start, self.whole) };
    }
}
