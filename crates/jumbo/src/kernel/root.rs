//! Where /proc and /sys are: [`Root`], and how reading them fails: [`FileError`].

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The folder under which `proc/` and `sys/` are looked up: `/` on a host, a fake tree in a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

/// A kernel file that could not be used: which one, and why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be opened, read or written.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried: `read`, `write`, `list`.
        operation: &'static str,
        /// The whole path.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The file's content is not what the kernel documents.
    #[error("cannot understand {}: {what}", path.display())]
    Content {
        /// The whole path.
        path: PathBuf,
        /// What was found, and what was expected.
        what: String,
    },
}

impl FileError {
    /// What a failed operation on `path` is.
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

    /// True where the file does not exist: this kernel lacks the feature, or the process is gone.
    pub fn is_missing(&self) -> bool {
        self.is(io::ErrorKind::NotFound)
    }

    /// True where the process that the file tells of kept it from being read.
    pub fn is_held_back(&self) -> bool {
        self.is(io::ErrorKind::TimedOut)
    }

    /// True where privilege is lacking.
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
    /// The kernel that runs this process.
    pub fn host() -> Self {
        Self::default()
    }

    /// A tree that stands in for `/`.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// The whole path of `relative` (such as `sys/kernel/mm/hugepages`).
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.0.join(relative)
    }

    /// That the content of `relative` is not what was expected there.
    pub fn misread(&self, relative: impl AsRef<Path>, what: impl Into<String>) -> FileError {
        let path = self.path(relative);
        let what = what.into();
        FileError::Content { path, what }
    }

    /// The file, open to be read.
    pub fn open(&self, relative: impl AsRef<Path>) -> Result<File, FileError> {
        let path = self.path(relative);
        File::open(&path).map_err(FileError::io("read", &path))
    }

    /// Text of bytes that may be no UTF-8: what is none is replaced.
    pub fn lossy(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn read_bytes(&self, relative: impl AsRef<Path>) -> Result<Vec<u8>, FileError> {
        let path = self.path(relative);
        fs::read(&path).map_err(FileError::io("read", &path))
    }

    /// The file's text. What is no UTF-8 (a process may have any bytes in its name, and map files
    /// with any name) is replaced.
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn read(&self, relative: impl AsRef<Path>) -> Result<String, FileError> {
        self.read_bytes(relative).map(Self::lossy)
    }

    /// The file's text as one number, blanks around it ignored.
    ///
    /// # Errors
    /// [`FileError::Io`]; [`FileError::Content`] where it is no number.
    pub fn read_u64(&self, relative: impl AsRef<Path>) -> Result<u64, FileError> {
        let text = self.read(relative.as_ref())?;
        let text = text.trim();
        let number = text.parse();
        number.map_err(|_| self.misread(relative, format!("`{text}` where a number was expected")))
    }

    /// Gives a kernel file a new value by one write(2). Nothing is written twice: a write that a signal
    /// cut short has done a part of its work (a hugetlb pool stays at the pages it has got).
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn write(&self, relative: impl AsRef<Path>, text: &str) -> Result<(), FileError> {
        let path = self.path(relative);
        // The kernel's files have no length; a test's have.
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

    /// The names in a folder, sorted.
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
