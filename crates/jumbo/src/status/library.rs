//! Which file the preload library is: [`Library`].
//!
//! By device and inode, and not by its name: any process can map a file of that name.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::kernel::file_id::FileId;
use crate::kernel::smaps::Mapping;

/// What the preload library is called.
pub const LIBRARY: &str = "libjumbo_preload.so";

/// How the kernel marks the path of a file that was removed, as an upgrade does.
const DELETED: &str = " (deleted)";

/// A preload library's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    path: PathBuf,
    id: FileId,
}

impl Library {
    /// The one that this command puts into programs: where JUMBO_PRELOAD says, or the first there is of
    /// [`Library::places`]. `None` where there is none.
    pub fn of_this_command() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<Library>> = OnceLock::new();
        let find = || match std::env::var_os("JUMBO_PRELOAD") {
            Some(path) => Self::at(Path::new(&path)),
            None => {
                let own = std::env::current_exe().ok()?;
                Self::places(&own).iter().find_map(|path| Self::at(path))
            }
        };
        FOUND.get_or_init(find).as_ref()
    }

    /// Where the library of a command may be: beside it, or in a `lib` next to its `bin`.
    pub fn places(command: &Path) -> [PathBuf; 3] {
        let folder = command.parent().unwrap_or(Path::new("/"));
        ["", "../lib/jumbo", "../lib"].map(|part| folder.join(part).join(LIBRARY))
    }

    /// The library at `path`; `None` where there is none to be read.
    pub fn at(path: &Path) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        let id = FileId::of(File::open(&path).ok()?).ok()?;
        Some(Self { path, id })
    }

    /// Whether a mapping is of this very file, or of one that stood in its place before it was replaced.
    pub(super) fn is_in(&self, mapping: &Mapping<'_>) -> bool {
        let was_here = || {
            let path = mapping.path.strip_suffix(DELETED).map(Path::new);
            self.has_device_of(mapping) && path == Some(&self.path)
        };
        FileId::from(mapping) == self.id || was_here()
    }

    /// Whether a mapping is of a file on the same device, which so can be read as this one can.
    pub(super) fn has_device_of(&self, mapping: &Mapping<'_>) -> bool {
        mapping.device == self.id.device
    }

    pub(super) fn device(&self) -> (u32, u32) {
        self.id.device
    }
}

/// Whether a mapping is of a file that is called as the library is.
pub(super) fn is_named(mapping: &Mapping<'_>) -> bool {
    let path = mapping.path.strip_suffix(DELETED).unwrap_or(mapping.path);
    path.rsplit('/').next() == Some(LIBRARY)
}
