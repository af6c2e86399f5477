//! Reserved addresses without memory: [`Reserved`].

#![expect(
    unsafe_code,
    reason = "the one place that reserves addresses and gives them back"
)]

use std::ffi::c_void;
use std::ptr;

use rustix::io::{Errno, Result};
use rustix::mm::{self, MapFlags, ProtFlags};

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
    ptr::with_exposed_provenance_mut(address)
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
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces none.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), flags)? };
        let start = start.expose_provenance();
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
        let _ = unsafe { mm::munmap(at(self.start), self.whole) };
    }
}
