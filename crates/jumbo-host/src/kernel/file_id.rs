//! Identity of a mapped file according to /proc/PID/maps: [`FileId`].
//!
//! stat(2) returns other numbers on btrfs and overlayfs. And it may block on a file that another
//! process maps, because the file system may not answer.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::smaps::{Mapping, Smaps};
use super::{Root, base_page};

/// Identity of a file in /proc/PID/maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Major and minor number of the device.
    pub device: (u32, u32),
    /// Inode number.
    pub inode: u64,
}

impl FileId {
    /// Maps a page of `file`, and reads its identity from /proc/self/maps.
    ///
    /// # Errors
    /// The errno of mmap(2), or the error of reading /proc/self/maps.
    #[expect(unsafe_code, reason = "a mapping is made and unmapped")]
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let root = Root::host();
        let length = usize::try_from(base_page(&root).bytes()).unwrap_or(4096);
        // SAFETY: a new mapping at an address that the kernel chooses, without references to it.
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
        // SAFETY: the mapping made above, to which no other code refers.
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

/// Device of the memory of memfds, in stat(2) as in /proc/PID/maps.
///
/// # Errors
/// The errno of memfd_create(2).
pub fn memfd_device() -> io::Result<(u32, u32)> {
    let own = rustix::fs::memfd_create(c"jumbo", MemfdFlags::CLOEXEC)?;
    let device = rustix::fs::fstat(&own)?.st_dev;
    Ok((rustix::fs::major(device), rustix::fs::minor(device)))
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
    fn a_file_is_identified_by_its_mappings() {
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
