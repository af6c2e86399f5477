//! Mounts of hugetlbfs, and files there without a name.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::{Mutex, PoisonError};

use jumbo::units::PageSize;
use jumbo_sys::mounts::{mounts, unescaped};
use rustix::fs::{Access, MemfdFlags, Mode, OFlags, access, memfd_create, open, statfs};
use rustix::io::{Errno, Result};

use crate::environment::settings;

/// Returns the page size of a path on hugetlbfs; `None` for another file system.
///
/// # Errors
/// Those of statfs(2).
pub(crate) fn page_size(path: &CStr) -> Result<Option<PageSize>> {
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    let system = statfs(path)?;
    let is_huge = u64::try_from(system.f_type) == Ok(HUGETLBFS_MAGIC);
    let size = u64::try_from(system.f_bsize).ok().filter(|_| is_huge);
    Ok(size.and_then(|size| PageSize::new(size).ok()))
}

/// Returns a mount with pages of `size` that this process may use: of HUGETLB_PATH, or the first of
/// the host's. The path stays valid.
///
/// # Errors
/// ENOENT: there is none.
pub(crate) fn find(size: PageSize) -> Result<&'static CStr> {
    static FOUND: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let candidates = match &settings().path {
        Some(path) => path
            .as_bytes()
            .split(|byte| *byte == b':')
            .map(<[u8]>::to_vec)
            .collect(),
        None => of_table(&fs::read("/proc/self/mountinfo").unwrap_or_default()),
    };
    let paths = candidates
        .into_iter()
        .filter_map(|path| CString::new(path).ok());
    let usable = |path: &CString| {
        page_size(path) == Ok(Some(size))
            && access(path, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK).is_ok()
    };
    let path = { paths }.find(usable).ok_or(Errno::NOENT)?;
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    match found.get(path.as_c_str()) {
        Some(path) => Ok(path),
        None => {
            let path: &'static CStr = Box::leak(path.into_boxed_c_str());
            found.insert(path);
            Ok(path)
        }
    }
}

/// Returns the hugetlbfs mounts of a mount table.
fn of_table(table: &[u8]) -> Vec<Vec<u8>> {
    let mounts = mounts(table).filter(|mount| mount.kind == b"hugetlbfs");
    mounts
        .map(|mount| unescaped(mount.point).collect())
        .collect()
}

/// Creates a file of huge pages without a name: a memfd, which needs no mount, or with HUGETLB_PATH
/// one there, within the limits of that mount. `is_inherited`: children of execve(2) have it, too.
///
/// # Errors
/// ENOENT for HUGETLB_PATH without such pages; those of memfd_create(2) and open(2).
pub(crate) fn unlinked(size: PageSize, is_inherited: bool) -> Result<OwnedFd> {
    let (closed, closed_memory) = match is_inherited {
        true => (OFlags::empty(), MemfdFlags::empty()),
        false => (OFlags::CLOEXEC, MemfdFlags::CLOEXEC),
    };
    if settings().path.is_some() {
        let mode = Mode::RUSR | Mode::WUSR;
        return open(find(size)?, OFlags::TMPFILE | OFlags::RDWR | closed, mode);
    }
    // MFD_HUGE_*: the binary logarithm of the size, from this bit on (<linux/memfd.h>).
    const SIZE_SHIFT: u32 = 26;
    let log2 = MemfdFlags::from_bits_retain(size.bytes().trailing_zeros() << SIZE_SHIFT);
    let flags = MemfdFlags::HUGETLB | log2 | closed_memory;
    memfd_create(c"libhugetlbfs", flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_for_the_program_is_inherited() {
        let size = PageSize::new(2 << 20).unwrap();
        for is_inherited in [true, false] {
            let Ok(file) = unlinked(size, is_inherited) else {
                return eprintln!("skipped: no hugetlb pages of {size}");
            };
            let flags = rustix::io::fcntl_getfd(&file).unwrap();
            assert_eq!(flags.is_empty(), is_inherited);
        }
    }

    #[test]
    fn a_mount_after_a_long_line_is_found() {
        let long = format!(
            "1 0 0:1 / / rw - overlay overlay rw,lowerdir={}\n",
            "/layer:".repeat(20_000)
        );
        let table = long
            + "2 1 0:2 / /dev/huge\\040pages rw - hugetlbfs none rw,pagesize=2M\n\
               3 1 0:3 / /x rw - tmpfs none rw\n";
        assert_eq!(of_table(table.as_bytes()), [b"/dev/huge pages"]);
    }
}
