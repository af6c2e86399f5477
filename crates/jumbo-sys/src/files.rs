//! Access to /proc and /sys for programs with a standard library: [`Root`], and its errors:
//! [`FileError`].
//!
//! Invariant: a missing file is no error if a kernel may lack it ([`optional`]); an unreadable file
//! is one, with its path.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::units::{NodeId, PageSize};

/// The folder of `proc/` and `sys/`: `/` on a host, a fake tree in a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

/// Error of a kernel file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be opened, read or written.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// The operation: `read`, `write`, `list`.
        operation: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file's content is not what the kernel documents.
    #[error("cannot understand {}: {what}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// The found and the expected content.
        what: String,
    },
}

impl FileError {
    /// Returns a function that makes the error of an operation on `path`.
    pub fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            operation,
            path,
            source,
        }
    }

    fn is(&self, kind: io::ErrorKind) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == kind)
    }

    /// Returns the error number of a system call.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Io { source, .. } => source.raw_os_error().map(Errno::from_raw_os_error),
            Self::Content { .. } => None,
        }
    }

    /// Reports whether the file does not exist: the kernel lacks the feature, or the process is
    /// gone.
    pub fn is_missing(&self) -> bool {
        self.is(io::ErrorKind::NotFound) || self.errno() == Some(Errno::SRCH)
    }

    /// Reports whether the process of the file blocked the read.
    pub fn is_held_back(&self) -> bool {
        self.is(io::ErrorKind::TimedOut)
    }

    /// Reports whether earlier files took the time or the memory of a bounded read.
    pub fn is_beyond_budget(&self) -> bool {
        self.is(io::ErrorKind::QuotaExceeded)
    }

    /// Reports whether privilege is missing.
    pub fn is_denied(&self) -> bool {
        self.is(io::ErrorKind::PermissionDenied)
    }
}

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// Returns the root of the running kernel.
    pub fn host() -> Self {
        Self::default()
    }

    /// Returns a root at another folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Returns the whole path of `relative` (such as `sys/kernel/mm/hugepages`).
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.0.join(relative)
    }

    /// Returns an error for unexpected content of `relative`.
    pub fn misread(&self, relative: impl AsRef<Path>, what: impl Into<String>) -> FileError {
        let path = self.path(relative);
        let what = what.into();
        FileError::Content { path, what }
    }

    /// Opens a file for reading.
    pub fn open(&self, relative: impl AsRef<Path>) -> Result<File, FileError> {
        let path = self.path(relative);
        File::open(&path).map_err(FileError::io("read", &path))
    }

    /// Converts bytes to text, with invalid UTF-8 replaced.
    pub fn lossy(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn read_bytes(&self, relative: impl AsRef<Path>) -> Result<Vec<u8>, FileError> {
        let path = self.path(relative);
        fs::read(&path).map_err(FileError::io("read", &path))
    }

    /// Reads a file's text, with invalid UTF-8 replaced: names of processes and mapped files may
    /// have any bytes.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn read(&self, relative: impl AsRef<Path>) -> Result<String, FileError> {
        self.read_bytes(relative).map(Self::lossy)
    }

    /// Reads a file as one number; blanks around it are ignored.
    ///
    /// # Errors
    /// [`FileError::Io`]; [`FileError::Content`] if it is not a number.
    pub fn read_u64(&self, relative: impl AsRef<Path>) -> Result<u64, FileError> {
        let text = self.read(relative.as_ref())?;
        let text = text.trim();
        let number = text.parse();
        number.map_err(|_| self.misread(relative, format!("`{text}` where a number was expected")))
    }

    /// Writes a kernel file by one write(2), which is never repeated: an interrupted write has done
    /// a part of its work (a hugetlb pool keeps the pages that it got).
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn write(&self, relative: impl AsRef<Path>, text: &str) -> Result<(), FileError> {
        let path = self.path(relative);
        // Only files of tests have a length to truncate.
        let file = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path);
        file.and_then(|mut file| match file.write(text.as_bytes())? {
            written if written == text.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        })
        .map_err(FileError::io("write", &path))
    }

    /// Lists the names in a folder, sorted.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn list(&self, relative: impl AsRef<Path>) -> Result<Vec<String>, FileError> {
        let path = self.path(relative);
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let names =
            fs::read_dir(&path).and_then(|entries| entries.map(|entry| entry.map(name)).collect());
        let mut names: Vec<String> = names.map_err(FileError::io("list", &path))?;
        names.sort_unstable();
        Ok(names)
    }
}

/// Returns the base page size of the kernel below `root`: `AT_PAGESZ` of the auxiliary vector
/// (getauxval(3)), else that of this process.
pub fn base_page(root: &Root) -> PageSize {
    const AT_PAGESZ: u64 = 6;
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
    let recorded = root.read_bytes("proc/self/auxv").ok().and_then(|auxv| {
        auxv.chunks_exact(16)
            .find(|pair| word(&pair[..8]) == Some(AT_PAGESZ))
            .and_then(|pair| word(&pair[8..]))
    });
    let own = || rustix::param::page_size() as u64;
    recorded
        .and_then(|bytes| PageSize::new(bytes).ok())
        .or_else(|| PageSize::new(own()).ok())
        .unwrap_or(PageSize::SIZE_4K)
}

/// Returns the nodes of the host in ascending order; empty on kernels without NUMA.
///
/// # Errors
/// [`FileError`] if the folder exists and cannot be listed.
pub fn nodes(root: &Root) -> Result<Vec<NodeId>, FileError> {
    let names = optional(root.list("sys/devices/system/node"))?.unwrap_or_default();
    let mut nodes: Vec<_> = names
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok().map(NodeId))
        .collect();
    nodes.sort_unstable();
    Ok(nodes)
}

/// Parses the size in `hugepages-2048kB`.
pub fn size_of_folder(name: &str) -> Option<PageSize> {
    let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    let kib: u64 = kib.parse().ok()?;
    PageSize::new(kib.checked_mul(1024)?).ok()
}

/// Returns the `hugepages-*kB` folders by size.
pub fn size_folders(root: &Root, folder: &str) -> Result<BTreeMap<PageSize, String>, FileError> {
    let names = root.list(folder)?;
    Ok(names
        .iter()
        .filter_map(|name| Some((size_of_folder(name)?, format!("{folder}/{name}"))))
        .collect())
}

/// Reads all files with a number in a folder; empty if the folder does not exist.
pub fn counters(root: &Root, folder: &str) -> Result<BTreeMap<String, u64>, FileError> {
    let names = optional(root.list(folder))?.unwrap_or_default();
    names
        .into_iter()
        .filter_map(|name| match root.read_u64(format!("{folder}/{name}")) {
            Ok(value) => Some(Ok((name, value))),
            Err(FileError::Content { .. }) => None,
            Err(error) => Some(Err(error)),
        })
        .collect()
}

/// Handles a missing feature's folder. All kernels have its parent: if that is missing too, /sys is
/// hidden, as in some containers, and the feature is unknown: an error.
pub fn absent(root: &Root) -> Result<(), FileError> {
    root.list("sys/kernel/mm").map(drop)
}

/// Maps a missing file, and so a missing feature, to `None`.
pub fn optional<T>(result: Result<T, FileError>) -> Result<Option<T>, FileError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_names_its_size() {
        assert_eq!(
            size_of_folder("hugepages-1048576kB"),
            Some(PageSize::SIZE_1G)
        );
        assert_eq!(size_of_folder("hugepages-3kB"), None);
        assert_eq!(size_of_folder("hugepages-2048"), None);
    }
}
