//! Looking at memory without touching it: process_vm_readv(2).
#![expect(unsafe_code, reason = "system calls that take addresses")]

use core::ffi::c_void;
use core::ptr::with_exposed_provenance_mut;

use rustix::io::{Errno, Result};

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

/// Copies `WORDS` words from each of some addresses, and gives how many were copied whole before the
/// first that is not readable.
///
/// # Errors
/// As [`copy_words`]; EINVAL: more addresses than places.
pub fn copy_scattered<const WORDS: usize, const MAX: usize>(
    from: &[usize],
    into: &mut [[usize; WORDS]; MAX],
) -> Result<usize> {
    if from.len() > MAX {
        return Err(Errno::INVAL);
    }
    let length = WORDS * size_of::<usize>();
    let mut there = [libc::iovec {
        iov_base: core::ptr::null_mut(),
        iov_len: length,
    }; MAX];
    for (vector, address) in there.iter_mut().zip(from) {
        vector.iov_base = with_exposed_provenance_mut(*address);
    }
    let here = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: from.len() * length,
    };
    let (here, there) = (
        (&raw const here).expose_provenance(),
        there.as_ptr().expose_provenance(),
    );
    let this = super::process().unsigned_abs() as usize;
    let arguments = [this, here, 1, there, from.len(), 0];
    // SAFETY: `into` has room for as many words as the vectors ask for; any bytes are a word.
    let copied = unsafe { request(libc::SYS_process_vm_readv, arguments)? };
    Ok(copied / length)
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
    use super::*;

    #[test]
    fn what_is_not_there_is_not_touched() {
        let words = [3usize, 4];
        let at = words.as_ptr().expose_provenance();
        let mut copy = [0; 2];
        assert_eq!(copy_words(at, &mut copy), Ok(2));
        assert_eq!(copy, words);
        assert_eq!(copy_words(0, &mut copy), Err(Errno::FAULT));
        let mut copies = [[0; 1]; 3];
        assert_eq!(copy_scattered(&[at + 8, at, 0], &mut copies), Ok(2));
        assert_eq!(copies, [[4], [3], [0]]);
    }
}
