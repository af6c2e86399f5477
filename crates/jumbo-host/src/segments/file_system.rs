//! File systems that support huge folios in the page cache: [`huge_folios`].

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, fstatfs, openat};

use super::Sizes;
use crate::kernel::page_cache::{Cached, PageCache};
use crate::kernel::version;

/// Major and minor number of a Linux version.
type Version = (u32, u32);

/// `f_type` (statfs(2)), name, and first Linux with folios of the PMD size, if any.
const KNOWN: [(u64, &str, Option<Version>); 9] = [
    (0xef53, "ext4", Some((6, 16))),
    (0x5846_5342, "xfs", Some((5, 18))),
    (0x9123_683e, "btrfs", None),
    (0x0102_1994, "tmpfs", None),
    (0x794c_7630, "overlay", None),
    (0xf2f5_2010, "f2fs", None),
    (0x6969, "nfs", None),
    (0x7371_7368, "squashfs", None),
    (0x2fc1_2fc1, "zfs", None),
];

/// Checks that reads of `file` can allocate huge folios. Where the kernel version does not decide,
/// it tries an unnamed scratch file in the same folder, if this user may make one.
///
/// # Errors
/// The obstacle, in words.
pub fn huge_folios(file: &File, path: &Path, sizes: Sizes) -> Result<(), String> {
    // The type has 32 bits; some machines sign-extend it.
    let kind = fstatfs(file).map_or(0, |stat| stat.f_type.cast_unsigned() & 0xffff_ffff);
    let known = KNOWN.iter().find(|(magic, ..)| *magic == kind);
    let (name, since) = known.map_or(("", None), |(_, name, since)| (*name, *since));
    if since.is_some_and(|since| running_kernel() >= since) {
        return Ok(());
    }
    let name = match name {
        "" => format!("its file system (type {kind:#x})"),
        name => format!("its file system ({name})"),
    };
    match scratch(path, sizes) {
        Ok(Cached::Huge) => Ok(()),
        Ok(_) => Err(format!(
            "{name} has no huge folios: a file made to try it was read in small ones"
        )),
        Err(_) => Err(match since {
            Some((major, minor)) => format!("{name} has huge folios from Linux {major}.{minor} on"),
            None => format!("{name} is not known to have huge folios"),
        }),
    }
}

pub(super) fn running_kernel() -> Version {
    let release = rustix::system::uname();
    version(&release.release().to_string_lossy()).unwrap_or_default()
}

/// Writes, drops and rereads a new file beside `path`; returns its state in the page cache.
fn scratch(path: &Path, sizes: Sizes) -> io::Result<Cached> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let mut file = File::from(openat(CWD, folder.unwrap_or(Path::new(".")), flags, mode)?);
    let size = usize::try_from(sizes.pmd.bytes()).map_err(io::Error::other)?;
    // Zeroes might become a hole.
    file.write_all(&vec![1; size])?;
    file.sync_data()?;
    let cache = PageCache::new(&file, sizes.pmd)?;
    cache.drop_clean(0)?;
    cache.bring(0)
}
