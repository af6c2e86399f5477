//! The memory of another process, read through /proc/PID/mem (proc_pid_mem(5)): [`Peek`].
//!
//! It takes the right to trace the process (ptrace(2), PTRACE_MODE_ATTACH), which is more than reading smaps
//! takes. Rather than process_vm_readv(2), because it takes no pointer, and a folder is opened for one process:
//! a PID that is reused in between cannot be mistaken for it.
//!
//! Invariant: memory is read where the kernel itself has it, which is anonymous memory, memfds, and files on one device
//! that the caller trusts. A file system in user space can leave its reader waiting for ever. The process may map another
//! file there meanwhile: so a child reads (see `aside`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::file_id::FileId;
use super::smaps::Smaps;
use super::{FileError, Root, aside};

/// Another process's memory. It goes on while this is open, and reads as missing once the process is gone. Where it
/// starts another program meanwhile, that program's memory is read.
#[derive(Debug)]
pub struct Peek {
    /// Its folder in /proc. To open `mem` waits for an execve(2) of the process, which a file system can hold up: a child
    /// does that too.
    folder: File,
    path: PathBuf,
    /// What may be read, by ascending address.
    safe: Vec<Range<u64>>,
    is_own: bool,
}

impl Peek {
    /// Opens the memory of `pid`, which has these mappings. Files on `device` are trusted to be read.
    ///
    /// # Errors
    /// [`FileError::Io`]: no such process. One that this user may not trace is denied when it is read.
    pub fn open(
        root: &Root,
        pid: u32,
        maps: &Smaps,
        device: (u32, u32),
    ) -> Result<Self, FileError> {
        static MEMFDS: OnceLock<Option<(u32, u32)>> = OnceLock::new();
        let memfds = *MEMFDS.get_or_init(|| {
            let memfd = rustix::fs::memfd_create("jumbo", rustix::fs::MemfdFlags::CLOEXEC);
            let id = memfd.map_err(std::io::Error::from).and_then(FileId::of);
            id.ok().map(|memfd| memfd.device)
        });
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

    /// Bytes at an address of each of these, read by one child.
    ///
    /// # Errors
    /// [`FileError::Content`] where that is not all memory that may be read; [`FileError::Io`].
    pub fn read_each(wanted: &[(&Self, u64, usize)]) -> Vec<Result<Vec<u8>, FileError>> {
        let is_aside = |peek: &Self, address, length| !peek.is_own && peek.is_safe(address, length);
        let others = (wanted.iter())
            .filter(|(peek, address, length)| is_aside(peek, *address, *length))
            .map(|(peek, address, length)| (&peek.folder, *address, *length));
        let mut read = aside::parts(&others.collect::<Vec<_>>()).into_iter();
        let each = wanted.iter().map(|&(peek, address, length)| {
            if !peek.is_safe(address, length) {
                return Err(peek.misread(format!(
                    "{length} bytes at {address:#x} are not all in memory that can be read without waiting"
                )));
            }
            let read = if peek.is_own {
                let mut bytes = vec![0; length];
                let file = File::open(&peek.path);
                file.and_then(|file| file.read_exact_at(&mut bytes, address))
                    .map(|()| bytes)
            } else {
                read.next().unwrap_or_else(|| Err(std::io::ErrorKind::Other.into()))
            };
            read.map_err(FileError::io("read", &peek.path))
        });
        each.collect()
    }

    /// Whether all of that is memory that can be read without waiting.
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

    /// That what was read is not what was expected there.
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
    fn what_this_process_holds_is_read() {
        let (root, own) = (Root::host(), std::process::id());
        let held = [7u8; 99];
        let maps = Smaps::read_maps(&root, own).unwrap();
        let peek = Peek::open(&root, own, &maps, (0, 0)).unwrap();
        let read = |address, length| Peek::read_each(&[(&peek, address, length)]).pop().unwrap();
        let address = std::hint::black_box(&held).as_ptr().addr() as u64;
        assert_eq!(read(address, held.len()).unwrap(), held);
        assert!(read(0, 8).is_err());
        // The program's file is on a device that was not named.
        let code = (what_this_process_holds_is_read as fn()) as usize as u64;
        assert!(matches!(read(code, 8), Err(FileError::Content { .. })));
    }
}
