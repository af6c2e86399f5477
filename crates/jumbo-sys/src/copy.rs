//! Memory read without a fault: by process_vm_readv(2), or by a pipe if a seccomp filter refuses
//! that, as older profiles of container engines do.
#![expect(unsafe_code, reason = "system calls that take addresses")]

use core::ffi::c_void;
use core::ptr::with_exposed_provenance_mut;

use rustix::fd::AsRawFd as _;
use rustix::io::{Errno, Result};
use rustix::pipe::{PipeFlags, pipe_with};

use super::request;

/// Copies at most `into.len()` words of this process's memory. Returns the number of words before
/// the first unreadable one.
///
/// # References
/// process_vm_readv(2); Linux 3.2, with CONFIG_CROSS_MEMORY_ATTACH.
///
/// # Errors
/// EFAULT: the first word is unreadable; ENOSYS; EPERM of a filter.
pub fn copy_words(from: usize, into: &mut [usize]) -> Result<usize> {
    let length = size_of_val(into);
    // SAFETY: `into` has `length` bytes; any bytes are a word.
    let copied = unsafe { copy_bytes(from, into.as_mut_ptr().expose_provenance(), length)? };
    Ok(copied / size_of::<usize>())
}

/// Copies `WORDS` words from each address. Returns the number of complete copies before the first
/// unreadable one.
///
/// # Errors
/// As [`copy_words`]; EINVAL: more addresses than elements of `into`.
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
    // SAFETY: `into` has room for the words of all vectors; any bytes are a word.
    let copied = unsafe { request(libc::SYS_process_vm_readv, arguments)? };
    Ok(copied / length)
}

/// Variant of [`copy_words`] that copies bytes to an address.
///
/// # Errors
/// As [`copy_words`].
///
/// # Safety
/// The caller owns the `length` bytes at `to`, which are overwritten.
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
    match unsafe { request(libc::SYS_process_vm_readv, arguments) } {
        // SAFETY: the caller's promise.
        Err(Errno::PERM | Errno::NOSYS) => unsafe { copy_by_pipe(from, to, length) },
        answer => answer,
    }
}

/// Variant of [`copy_bytes`] through a pipe: write(2) of unmapped memory fails.
///
/// # Safety
/// As for [`copy_bytes`].
unsafe fn copy_by_pipe(from: usize, to: usize, length: usize) -> Result<usize> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let [reader, writer] = [&reader, &writer].map(|end| end.as_raw_fd().unsigned_abs() as usize);
    let mut copied = 0;
    while copied < length {
        let rest = [writer, from + copied, length - copied, 0, 0, 0];
        // SAFETY: the call reads memory of this process only.
        let written = match unsafe { request(libc::SYS_write, rest) } {
            Err(Errno::FAULT) if copied > 0 => break,
            answer => answer?,
        };
        let rest = [reader, to + copied, written, 0, 0, 0];
        // SAFETY: the caller's promise. The pipe has `written` bytes.
        copied += unsafe { request(libc::SYS_read, rest)? };
    }
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmapped_memory_is_an_error() {
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

    #[test]
    fn a_pipe_copies_all_mapped_memory() {
        let page = rustix::param::page_size();
        let size = 32 * page;
        let from: Vec<u8> = (0..=250).cycle().take(size).collect();
        let mut to = vec![0u8; size];
        let (at, place) = (
            from.as_ptr().expose_provenance(),
            to.as_mut_ptr().expose_provenance(),
        );
        // SAFETY: `to` has `size` bytes.
        let copied = unsafe { copy_by_pipe(at, place, size) };
        assert_eq!(copied, Ok(size));
        assert!(from == to);
        // SAFETY: nothing is copied.
        assert_eq!(unsafe { copy_by_pipe(0, place, size) }, Err(Errno::FAULT));
    }
}
