//! Reading /proc from inside the program, with buffers on the stack.

use rustix::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, Result};

pub(super) fn open(path: &core::ffi::CStr) -> Result<OwnedFd> {
    open_at(CWD, path)
}

pub(super) fn open_at(folder: impl AsFd, path: &core::ffi::CStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::openat(folder, path, flags, Mode::empty())
}

/// Calls `each` with every byte of a file, until it says that it has seen enough.
pub(super) fn each_byte(file: OwnedFd, mut each: impl FnMut(u8) -> Result<bool>) -> Result<bool> {
    let mut buffer = [0u8; 2048];
    loop {
        match rustix::io::read(&file, &mut buffer) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                for byte in buffer.iter().take(length) {
                    if each(*byte)? {
                        return Ok(true);
                    }
                }
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Calls `each` with the first 128 bytes of every line of a file, until it says that it has seen enough.
pub(super) fn each_line(
    file: OwnedFd,
    mut each: impl FnMut(&[u8]) -> Result<bool>,
) -> Result<bool> {
    let (mut line, mut length) = ([0u8; 128], 0);
    each_byte(file, |byte| {
        if byte == b'\n' {
            let line = line.get(..core::mem::take(&mut length));
            return each(line.unwrap_or_default());
        }
        if let Some(place) = line.get_mut(length) {
            *place = byte;
            length += 1;
        }
        Ok(false)
    })
}
