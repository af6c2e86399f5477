//! Reads /proc with buffers of the caller or on the stack: a short file ([`read`]) and its fields
//! ([`number`], [`kib`], [`kib_field`]), lines ([`each_line`]), mappings ([`each_mapping`]); and formats
//! paths ([`Path`]).

use core::ffi::CStr;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::{Errno, Result};

pub use crate::open;

use crate::maps::{Lines, MapsLine};
use crate::units::Bytes;

/// Variant of [`open`] below a folder.
///
/// # Errors
/// Those of openat(2).
pub fn open_at(folder: impl AsFd, path: &CStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::openat(folder, path, flags, Mode::empty())
}

/// Reads the start of a file into a buffer, up to a newline at the end of a read(2).
///
/// # Errors
/// Those of open(2) and read(2).
pub fn read<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8]> {
    let file = open(path)?;
    let mut length = 0;
    loop {
        let more = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut buffer[length..]))?;
        length += more;
        // A newline at the end is the end of such a file: the kernel produces its text at once.
        let text = &buffer[..length];
        if more == 0 || text.len() == buffer.len() || text.ends_with(b"\n") {
            return Ok(&buffer[..length]);
        }
    }
}

/// Parses the number at the start of a text, after whitespace.
pub fn number(text: &[u8]) -> Option<usize> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    core::str::from_utf8(&text[..digits]).ok()?.parse().ok()
}

/// Parses a value in the format of smaps, status and meminfo: `    1234 kB`.
pub fn kib(value: &[u8]) -> Option<Bytes> {
    number(value).map(|kib| Bytes::from_kib(kib as u64))
}

/// Returns a field of the text of a file in that format.
pub fn kib_field(text: &[u8], key: &[u8]) -> Option<Bytes> {
    let mut lines = text.split(|byte| *byte == b'\n');
    lines.find_map(|line| kib(line.strip_prefix(key)?))
}

/// Calls `each` with every byte of a file until it returns true; false at the end of the file.
pub fn each_byte(file: impl AsFd, each: impl FnMut(u8) -> Result<bool>) -> Result<bool> {
    each_byte_in(&mut [0u8; 2048], file.as_fd(), each)
}

/// Variant of [`each_byte`] with a buffer of the caller.
fn each_byte_in(
    buffer: &mut [u8],
    file: BorrowedFd<'_>,
    mut each: impl FnMut(u8) -> Result<bool>,
) -> Result<bool> {
    loop {
        match rustix::io::read(file, &mut *buffer) {
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

/// Calls `each` with the first 128 bytes of every line of a file until it returns true.
pub fn each_line(file: impl AsFd, mut each: impl FnMut(&[u8]) -> Result<bool>) -> Result<bool> {
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

/// Calls `each` with every mapping of this process until it returns true.
pub fn each_mapping(mut each: impl FnMut(&MapsLine) -> bool) -> Result<bool> {
    let mut lines = Lines::default();
    each_byte(open(c"/proc/self/maps")?, |byte| {
        Ok(lines.push(byte).is_some_and(|mapping| each(&mapping)))
    })
}

/// Variant of [`each_mapping`] that takes less stack, and more time.
pub fn each_mapping_on_small_stack(mut each: impl FnMut(&MapsLine) -> bool) -> Result<bool> {
    let (mut lines, file) = (Lines::default(), open(c"/proc/self/maps")?);
    each_byte_in(&mut [0u8; 256], file.as_fd(), |byte| {
        Ok(lines.push(byte).is_some_and(|mapping| each(&mapping)))
    })
}

/// Buffer for a C string of `N` bytes, the terminating zero included.
#[derive(Debug)]
pub struct Path<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Path<N> {
    /// An unused buffer.
    pub const EMPTY: Self = Self {
        bytes: [0; N],
        length: 0,
    };

    /// Returns the text that was written.
    pub fn text(&self) -> Option<&str> {
        core::str::from_utf8(self.bytes.get(..self.length)?).ok()
    }

    /// Writes `text`; `None` if it does not fit.
    pub fn write(&mut self, text: core::fmt::Arguments<'_>) -> Option<&CStr> {
        self.length = 0;
        core::fmt::write(self, text).ok()?;
        *self.bytes.get_mut(self.length)? = 0;
        CStr::from_bytes_until_nul(&self.bytes).ok()
    }
}

impl<const N: usize> core::fmt::Write for Path<N> {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        // The last byte is for the terminating zero.
        let room = self.bytes.get_mut(self.length..end).filter(|_| end < N);
        room.ok_or(core::fmt::Error)?
            .copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

/// Reports whether children of this thread start in another PID namespace (unshare(2) of
/// CLONE_NEWPID): a helper process of jumbo would be its PID 1, and its end would end the namespace. Linux 4.12;
/// true without /proc.
pub fn children_change_namespace() -> bool {
    let read = |path: &CStr, name: &mut [u8; 64]| {
        rustix::fs::readlinkat_raw(CWD, path, &mut name[..]).is_ok()
    };
    let (mut own, mut childrens) = ([0u8; 64], [0u8; 64]);
    let known = read(c"/proc/thread-self/ns/pid", &mut own)
        && read(c"/proc/thread-self/ns/pid_for_children", &mut childrens);
    !known || own != childrens
}

/// Reports whether this process has one thread, from /proc/self/task (proc(5)); `None` if
/// unreadable.
pub fn is_alone() -> Option<bool> {
    // Links: `.`, the entry in the parent folder, and `..` of each thread's folder.
    let folder = rustix::fs::stat(c"/proc/self/task").ok()?;
    Some(folder.st_nlink <= 3)
}
