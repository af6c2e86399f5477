//! The memory of another process, read through /proc/PID/mem (proc_pid_mem(5)): [`Peek`].
//!
//! It needs the permission to trace the process (ptrace(2), PTRACE_MODE_ATTACH), unlike smaps.
//! process_vm_readv(2) was rejected: it needs unsafe code, and a PID can be reused, but an open
//! folder refers to one process.
//!
//! Invariant: only anonymous memory, memfds, and files on one trusted device are read. A file
//! system in user space can block a reader for ever. The process may map another file meanwhile, so
//! a child reads (see `aside`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::file_id::memfd_device;
use super::smaps::Smaps;
use super::{FileError, Root, aside};

/// Memory of another process, which runs on. It reads as missing once the process is gone. After an
/// execve(2) it is the memory of the new program.
#[derive(Debug)]
pub struct Peek {
    /// Folder in /proc. The open of `mem` waits for an execve(2) of the process, which a file
    /// system can block, so the child opens it.
    folder: File,
    path: PathBuf,
    /// Readable ranges by ascending address.
    safe: Vec<Range<u64>>,
    is_own: bool,
}

impl Peek {
    /// Opens the memory of `pid`, which has these mappings. Files on the trusted `device` are
    /// readable.
    ///
    /// # Errors
    /// [`FileError::Io`]: no such process. The first read checks the permission to trace it.
    pub fn open(
        root: &Root,
        pid: u32,
        maps: &Smaps,
        device: (u32, u32),
    ) -> Result<Self, FileError> {
        let memfds = memfd_device().ok();
        let safe = maps.mappings().filter(|mapping| {
            let is_anonymous = mapping.device == (0, 0) && mapping.inode == 0;
            is_anonymous || mapping.device == device || Some(mapping.device) == memfds
        });
        let safe = safe.map(|mapping| mapping.start..mapping.end).collect();
        Ok(Self {
            folder: root.open(format!("proc/{pid}"))?,
            path: root.path(format!("proc/{pid}/mem")),
            safe,
            is_own: pid == std::process::id(),
        })
    }

    /// Reads ranges of memory by one child: process, address and length each.
    ///
    /// # Errors
    /// [`FileError::Content`] where a part is not readable; [`FileError::Io`].
    pub fn read_each(wanted: &[(&Self, u64, usize)]) -> Vec<Result<Vec<u8>, FileError>> {
        let is_aside = |peek: &Self, address, length| !peek.is_own && peek.is_safe(address, length);
        let others = (wanted.iter())
            .filter(|(peek, address, length)| is_aside(peek, *address, *length))
            .map(|(peek, address, length)| (&peek.folder, *address, *length));
        let mut read = aside::parts(&others.collect::<Vec<_>>()).into_iter();
        let each = wanted.iter().map(|&(peek, address, length)| {
            if !peek.is_safe(address, length) {
                return Err(peek.misread(format!(
                    "a read of {length} bytes at {address:#x} may block or fail"
                )));
            }
            let read = if peek.is_own {
                let mut bytes = vec![0; length];
                let file = File::open(&peek.path);
                file.and_then(|file| file.read_exact_at(&mut bytes, address))
                    .map(|()| bytes)
            } else {
                read.next()
                    .unwrap_or_else(|| Err(std::io::ErrorKind::Other.into()))
            };
            read.map_err(FileError::io("read", &peek.path))
        });
        each.collect()
    }

    /// Reports whether a read of the whole range cannot block.
    fn is_safe(&self, address: u64, length: usize) -> bool {
        let end = address.saturating_add(length as u64);
        let mut reached = address;
        for range in &self.safe {
            if range.contains(&reached) {
                reached = range.end;
            }
        }
        reached >= end
    }

    /// The error for unexpected content.
    pub(crate) fn misread(&self, what: impl Into<String>) -> FileError {
        FileError::Content {
            path: self.path.clone(),
            what: what.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_read() {
        let (root, own) = (Root::host(), std::process::id());
        let held = [7u8; 99];
        let maps = Smaps::read_maps(&root, own).unwrap();
        let peek = Peek::open(&root, own, &maps, (0, 0)).unwrap();
        let read = |address, length| Peek::read_each(&[(&peek, address, length)]).pop().unwrap();
        let address = std::hint::black_box(&held).as_ptr().addr() as u64;
        assert_eq!(read(address, held.len()).unwrap(), held);
        assert!(read(0, 8).is_err());
        // The program's file is on an untrusted device.
        let code = (memory_of_this_process_is_read as fn()) as usize as u64;
        assert!(matches!(read(code, 8), Err(FileError::Content { .. })));
    }
}
