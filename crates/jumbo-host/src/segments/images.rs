//! Images of text that processes share (`jumbo run --text`): [`list`], [`TextImage::check`],
//! [`TextImage::withdraw`].
//!
//! An image is a memfd that its users map and keep open, made by `jumbo_inside::segments::image`.
//! The kernel frees it with its last user. New processes do not use a *withdrawn* image.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use jumbo_inside::segments::image::{DESCRIPTORS, NAME};
use jumbo_inside::watch;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use serde::Serialize;

use super::running::Running;
use super::{reopen, same_bytes};
use crate::kernel::file_id::memfd_device;
use crate::kernel::{FileError, Root, task};
use crate::units::Bytes;

/// An image and its users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextImage {
    /// File name, without folders.
    pub name: String,
    /// Path of the file, from another mapping of it in a user; `None` where no user has one.
    pub path: Option<PathBuf>,
    /// Offset of the text in the file.
    pub offset: u64,
    /// Length of the text.
    pub length: Bytes,
    /// User ID of the maker.
    pub owner: u32,
    /// New processes do not use it.
    pub withdrawn: bool,
    /// Processes that map it, of those that the caller may read.
    pub users: Vec<u32>,
    /// Inode of the memfd.
    #[serde(skip)]
    inode: u64,
    /// Offset of the text in the memfd.
    #[serde(skip)]
    memfd_offset: u64,
}

/// Result of comparing an image with its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Equal.
    Same,
    /// The file has changed: new processes get an image of their own.
    Differs,
    /// Obstacle to a comparison.
    Unknown(String),
}

/// Returns the images that readable processes map.
///
/// # Errors
/// [`FileError`] where /proc cannot be read, or no memfd can be made.
pub fn list(root: &Root) -> Result<Vec<TextImage>, FileError> {
    let device = memfd_device().map_err(FileError::io("look at", Path::new("memfd")))?;
    let running = Running::read(root)?;
    let mut images = BTreeMap::<u64, TextImage>::new();
    // It shares the memory of a user.
    let is_beside = |pid: u32| {
        task::name(root, pid).is_ok_and(|name| name.as_bytes() == watch::NAME.to_bytes())
    };
    for (pid, maps) in running.maps().filter(|(pid, _)| !is_beside(*pid)) {
        // Path of a file in this process.
        let path = |key: (u64, u64, u64)| {
            let is_file = |(major, minor): (u32, u32), inode| {
                (u64::from(major), u64::from(minor), inode) == key
            };
            let mut others = maps
                .mappings()
                .filter(|other| is_file(other.device, other.inode));
            others
                .find_map(|other| Some(PathBuf::from(other.path)).filter(|path| path.is_absolute()))
        };
        for mapping in maps.mappings().filter(|mapping| mapping.device == device) {
            let Some(part) = Part::parse(mapping.path) else {
                continue;
            };
            let image = images.entry(mapping.inode).or_insert_with(|| TextImage {
                name: part.name.to_owned(),
                path: None,
                offset: part.offset,
                length: Bytes(part.length),
                owner: 0,
                withdrawn: false,
                users: Vec::new(),
                inode: mapping.inode,
                memfd_offset: mapping.offset,
            });
            image.users.push(pid);
            image.users.dedup();
            image.path = image.path.take().or_else(|| path(part.file));
        }
    }
    let mut images: Vec<TextImage> = images.into_values().collect();
    for image in &mut images {
        if let Ok((_, stat)) = image.find(root) {
            (image.owner, image.withdrawn) = (stat.stx_uid, stat.stx_mode & 0o400 == 0);
        }
    }
    Ok(images)
}

impl TextImage {
    /// Compares the image with its file.
    pub fn check(&self, root: &Root) -> Check {
        let unknown =
            |what: &str, error: &dyn std::fmt::Display| Check::Unknown(format!("{what}: {error}"));
        let Some(path) = &self.path else {
            return Check::Unknown(String::from("no user of it maps another part of the file"));
        };
        let image = match self.find(root).and_then(|(memfd, _)| reopen(&memfd)) {
            Ok(image) => image,
            Err(error) => return unknown("its descriptor", &error),
        };
        let file = match super::open(path) {
            Ok(file) => file,
            Err(error) => return unknown("its file", &error),
        };
        let (image, file) = ((&image, self.memfd_offset), (&file, self.offset));
        match same_bytes(image, file, self.length.0, &[]) {
            Ok(true) => Check::Same,
            Ok(false) => Check::Differs,
            Err(error) => unknown("reading", &error),
        }
    }

    /// Withdraws the image from new processes. Current users keep it.
    ///
    /// # Errors
    /// Errors of open(2) and fchmod(2): another user's image needs CAP_FOWNER.
    pub fn withdraw(&self, root: &Root) -> io::Result<()> {
        let (memfd, _) = self.find(root)?;
        Ok(rustix::fs::fchmod(reopen(&memfd)?, Mode::empty())?)
    }

    /// Finds the memfd among the descriptors of its users, with O_PATH: open(2) may block.
    fn find(&self, root: &Root) -> io::Result<(OwnedFd, rustix::fs::Statx)> {
        let device = memfd_device()?;
        for pid in &self.users {
            for number in DESCRIPTORS {
                let path = root.path(format!("proc/{pid}/fd/{number}"));
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let Ok(memfd) = rustix::fs::openat(CWD, path, flags, Mode::empty()) else {
                    continue;
                };
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
                let stat = rustix::fs::statx(&memfd, c"", flags, StatxFlags::BASIC_STATS)?;
                if (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
                    == (device.0, device.1, self.inode)
                {
                    return Ok((memfd, stat));
                }
            }
        }
        Err(io::Error::other(
            "no process that may be looked into has it open",
        ))
    }
}

/// Part of a file, as encoded in the name of an image.
#[derive(Debug, PartialEq, Eq)]
struct Part<'a> {
    name: &'a str,
    /// Device, in two numbers, and inode.
    file: (u64, u64, u64),
    offset: u64,
    length: u64,
}

impl<'a> Part<'a> {
    fn parse(path: &'a str) -> Option<Self> {
        let name = path.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
        let (name, key) = name
            .strip_prefix(NAME)?
            .strip_prefix(':')?
            .rsplit_once(':')?;
        let mut numbers = key.split('-');
        let mut next = |radix| u64::from_str_radix(numbers.next()?, radix).ok();
        Some(Self {
            name,
            file: (next(16)?, next(16)?, next(10)?),
            offset: next(16)?,
            length: next(16)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_names_are_parsed() {
        let part = Part::parse("/memfd:jumbo-text:a:b:fe-0-247580-772000-1a8c000 (deleted)");
        let expected = Part {
            name: "a:b",
            file: (0xfe, 0, 247_580),
            offset: 0x772000,
            length: 0x1a8c000,
        };
        assert_eq!(part, Some(expected));
        for other in [
            "/memfd:jumbo-text:x (deleted)",
            "/memfd:jumbo-ledger (deleted)",
            "/usr/bin/node",
        ] {
            assert_eq!(Part::parse(other), None, "{other}");
        }
    }
}
