//! Which file a mapping is of, as /proc/PID/maps tells: [`FileId`].
//!
//! Not as stat(2) tells, which differs on btrfs and overlayfs. And a file that another process maps is never asked
//! itself: its file system may not answer.

use std::io;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::smaps::{Mapping, Smaps};
use super::{Root, base_page};

/// A file, as mappings of it show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// The major and the minor number of its device.
    pub device: (u32, u32),
    /// Its inode.
    pub inode: u64,
}

impl FileId {
    /// What `file` is: maps a page of it, and looks at that.
    ///
    /// # Errors
    /// The errno of mmap(2), or why /proc/self/maps cannot be read.
    #[expect(unsafe_code, reason = "a mapping is made and unmapped")]
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let root = Root::host();
        let length = usize::try_from(base_page(&root).bytes()).unwrap_or(4096);
        // SAFETY: a new mapping, where the kernel chooses, which nothing refers to.
        let page = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                file,
                0,
            )
        }?;
        let address = page.addr() as u64;
        let maps = Smaps::read_maps(&root, std::process::id());
        // SAFETY: the mapping made above, of which nothing else knows.
        let unmapped = unsafe { munmap(page, length) };
        let maps = maps.map_err(io::Error::other)?;
        unmapped?;
        let mut mappings = maps.mappings();
        let mapping = mappings.find(|mapping| (mapping.start..mapping.end).contains(&address));
        mapping
            .map(|mapping| Self::from(&mapping))
            .ok_or_else(|| io::Error::other("a mapping is not in /proc/self/maps"))
    }
}

impl From<&Mapping<'_>> for FileId {
    fn from(mapping: &Mapping<'_>) -> Self {
        Self {
            device: mapping.device,
            inode: mapping.inode,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_mappings() {
        let (root, own) = (Root::host(), std::env::current_exe().unwrap());
        let exe = FileId::of(std::fs::File::open(&own).unwrap()).unwrap();
        let maps = Smaps::read_maps(&root, std::process::id()).unwrap();
        let mut found = maps
            .mappings()
            .filter(|mapping| FileId::from(mapping) == exe);
        assert!(found.all(|mapping| mapping.path == own.to_str().unwrap()));
        let other = tempfile::tempfile().unwrap();
        assert_ne!(FileId::of(&other).unwrap(), exe);
    }
}
