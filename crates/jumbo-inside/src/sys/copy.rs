//! Looking at memory without touching it: process_vm_readv(2).
#![expect(unsafe_code, reason = "system calls that take addresses")]

use core::ffi::c_void;
use core::ptr::with_exposed_provenance_mut;

use rustix::io::Result;

use super::request;

/// Copies memory of this process, `into.len()` words of it at most, and gives how many there were before
/// one that is not mapped or not readable.
///
/// # References
/// process_vm_readv(2); Linux 3.2, with CONFIG_CROSS_MEMORY_ATTACH.
///
/// # Errors
/// EFAULT: not even the first; ENOSYS; EPERM where a filter says so.
pub fn copy_words(from: usize, into: &mut [usize]) -> Result<usize> {
    let length = size_of_val(into);
    // SAFETY: `into` has room for so many bytes; any bytes are a word.
    let copied = unsafe { copy_bytes(from, into.as_mut_ptr().expose_provenance(), length)? };
    Ok(copied / size_of::<usize>())
}

/// The same for bytes, to an address.
///
/// # Errors
/// As [`copy_words`].
///
/// # Safety
/// The `length` bytes at `to` are the caller's to lose.
pub unsafe fn copy_bytes(from: usize, to: usize, length: usize) -> Result<usize> {
    let vector = |address: usize| libc::iovec {
        iov_base: with_exposed_provenance_mut::<c_void>(address),
        iov_len: length,
    };
    let (here, there) = (vector(to), vector(from));
    let this = super::process();
    let (here, there) = (
        (&raw const here).expose_provenance(),
        (&raw const there).expose_provenance(),
    );
    let arguments = [this.unsigned_abs() as usize, here, 1, there, 1, 0];
    // SAFETY: the caller's promise.
    unsafe { request(libc::SYS_process_vm_readv, arguments) }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_is_not_there_is_not_touched() {
        let words = [3usize, 4];
        let at = words.as_ptr().expose_provenance();
        let mut copy = [0; 2];
        assert_eq!(copy_words(at, &mut copy), Ok(2));
        assert_eq!(copy, words);
        assert_eq!(copy_words(0, &mut copy), Err(Errno::FAULT));
    }
}
