//! The memory of another process, read through /proc/PID/mem (proc_pid_mem(5)): [`Peek`].
//!
//! It takes the right to trace the process (ptrace(2), PTRACE_MODE_ATTACH), which is more than reading smaps
//! takes. Rather than process_vm_readv(2), because it takes no pointer, and a file is opened for one process:
//! a PID that is reused in between cannot be mistaken for it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::{FileError, Root};

/// Another process's memory. It goes on while this is open, and reads as missing once the process is gone.
#[derive(Debug)]
pub struct Peek {
    file: File,
    path: PathBuf,
}

impl Peek {
    /// Opens the memory of `pid`.
    ///
    /// # Errors
    /// [`FileError::Io`]: no such process, or one that this user may not trace.
    pub fn open(root: &Root, pid: u32) -> Result<Self, FileError> {
        let path = root.path(format!("proc/{pid}/mem"));
        match File::open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(source) => Err(FileError::Io {
                operation: "read",
                path,
                source,
            }),
        }
    }

    /// `length` bytes at `address`.
    ///
    /// # Errors
    /// [`FileError::Io`]: EIO where nothing is mapped.
    pub fn read(&self, address: u64, length: usize) -> Result<Vec<u8>, FileError> {
        let mut bytes = vec![0; length];
        let read = self.file.read_exact_at(&mut bytes, address);
        read.map_err(|source| FileError::Io {
            operation: "read",
            path: self.path.clone(),
            source,
        })?;
        Ok(bytes)
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
        let held = [7u8; 99];
        let peek = Peek::open(&Root::host(), std::process::id()).unwrap();
        let address = std::hint::black_box(&held).as_ptr().addr() as u64;
        assert_eq!(peek.read(address, held.len()).unwrap(), held);
        assert!(peek.read(0, 8).is_err());
    }
}
