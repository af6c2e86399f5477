//! Structures that may grow: a program and the library may know different versions of them.
//!
//! As for clone3(2) and openat2(2), the program passes the size that it knows. What the other side
//! does not know is zero, or an error.

use std::mem::{align_of, size_of};

use rustix::io::Errno;

use crate::failure::{Failure, Outcome};

/// A structure of integers, of which all zeroes is a value.
///
/// # Safety
/// `repr(C)`, without padding, and every pattern of bits is a value.
pub(crate) unsafe trait Plain: Copy + Default {}

fn check<T>(at: *const T, size: usize) -> Outcome<()> {
    // No structure has a page of fields.
    if at.is_null() || !at.addr().is_multiple_of(align_of::<T>()) || !(8..=4096).contains(&size) {
        let message = format!("a structure of {size} bytes at {at:?}");
        return Err(Failure::invalid(message));
    }
    Ok(())
}

/// Reads a structure whose first field is its size.
///
/// # Errors
/// EINVAL: a null pointer, or a size that no structure has. E2BIG: a field that is unknown here is
/// not zero.
///
/// # Safety
/// A pointer that is not null has a `size_t` and as many readable bytes as that says.
pub(crate) unsafe fn read<T: Plain>(at: *const T) -> Outcome<T> {
    check(at, size_of::<T>())?;
    // SAFETY: the caller's promise: the first field is the size.
    let size = unsafe { at.cast::<usize>().read() };
    check(at, size)?;
    let mut value = T::default();
    let known = size.min(size_of::<T>());
    // SAFETY: `known` bytes are readable by the caller's promise, and `value` has them; every
    // pattern of bits is a value.
    unsafe { at.cast::<u8>().copy_to((&raw mut value).cast(), known) };
    // SAFETY: as above, from the end of the known part.
    let rest = unsafe { std::slice::from_raw_parts(at.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let message = "a structure has fields that this version of libjumbo does not know";
        return Err(Failure::new(Errno::TOOBIG, message));
    }
    Ok(value)
}

/// Writes a structure of `size` bytes; fields that are unknown here become zero.
///
/// # Errors
/// EINVAL: a null pointer, or a size that no structure has.
///
/// # Safety
/// A pointer that is not null has `size` writable bytes.
pub(crate) unsafe fn write<T: Plain>(to: *mut T, size: usize, value: T) -> Outcome<()> {
    check(to, size)?;
    // SAFETY: the caller's promise; `known` is at most the size of both.
    unsafe {
        let known = size.min(size_of::<T>());
        to.cast::<u8>().write_bytes(0, size);
        to.cast::<u8>().copy_from((&raw const value).cast(), known);
    }
    Ok(())
}

/// Writes a value through a pointer of the caller.
///
/// # Errors
/// EINVAL: a null or unaligned pointer.
///
/// # Safety
/// A pointer that is not null is writable.
pub(crate) unsafe fn put<T>(to: *mut T, make: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if to.is_null() || !to.is_aligned() {
        return Err(Failure::invalid(
            "a null or unaligned pointer for the result",
        ));
    }
    let value = make()?;
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    #[repr(C)]
    struct Old {
        size: usize,
        one: u64,
    }
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    #[repr(C)]
    struct New {
        size: usize,
        one: u64,
        two: u64,
    }
    // SAFETY: integers without padding.
    unsafe impl Plain for Old {}
    // SAFETY: as above.
    unsafe impl Plain for New {}

    #[test]
    fn structures_grow() {
        let (old, mut new) = (
            Old { size: 16, one: 1 },
            New {
                size: 24,
                one: 1,
                two: 0,
            },
        );
        // SAFETY: all structures live here, and have their sizes.
        unsafe {
            assert_eq!(
                read((&raw const old).cast::<New>()).unwrap(),
                New { size: 16, ..new }
            );
            assert_eq!(
                read((&raw const new).cast::<Old>()).unwrap(),
                Old { size: 24, one: 1 }
            );
            new.two = 1;
            let error = read((&raw const new).cast::<Old>()).unwrap_err();
            assert_eq!(error.errno, libc::E2BIG);
            write((&raw mut new).cast(), 24, old).unwrap();
            assert_eq!(
                new,
                New {
                    size: 16,
                    one: 1,
                    two: 0
                }
            );
            assert_eq!(
                read::<Old>(std::ptr::null()).unwrap_err().errno,
                libc::EINVAL
            );
        }
    }
}
