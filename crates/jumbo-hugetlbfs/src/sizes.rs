//! The page sizes of the kernel's pools.

use std::ffi::c_long;
use std::fs;

use jumbo::units::PageSize;
use jumbo::{FileError, Root};
use jumbo_sys::files::{optional, size_folders};
use jumbo_sys::proc::kib_field;
use rustix::io::{Errno, Result};

use crate::environment::{Level, settings, tell};

pub(crate) fn long(size: PageSize) -> c_long {
    c_long::try_from(size.bytes()).unwrap_or(c_long::MAX)
}

/// Returns the sizes of huge pages, in ascending order; none without hugetlb.
///
/// # Errors
/// Those of opendir(3).
pub(crate) fn all() -> Result<Vec<PageSize>> {
    let folders = optional(size_folders(&Root::host(), "sys/kernel/mm/hugepages"));
    let folders = folders.map_err(|error| match error {
        FileError::Io { source, .. } => Errno::from_io_error(&source).unwrap_or(Errno::IO),
        _ => Errno::IO,
    })?;
    Ok(folders.unwrap_or_default().into_keys().collect())
}

/// Returns the sizes of all pages.
///
/// # Errors
/// Same as [`all`].
pub(crate) fn with_base() -> Result<Vec<PageSize>> {
    let mut sizes = all()?;
    if let Ok(base) = PageSize::new(rustix::param::page_size() as u64) {
        sizes.insert(0, base);
    }
    Ok(sizes)
}

/// Returns HUGETLB_DEFAULT_PAGE_SIZE, or the kernel's default.
///
/// # Errors
/// ENOSYS without hugetlb.
pub(crate) fn default() -> Result<PageSize> {
    let known = all()?;
    let wanted = settings().size;
    if let Some(size) = wanted.filter(|size| known.contains(size)) {
        return Ok(size);
    }
    if let Some(size) = wanted {
        let message = format!("HUGETLB_DEFAULT_PAGE_SIZE: this kernel has no pool of {size}");
        tell(Level::Error, &message);
    }
    let meminfo = fs::read("/proc/meminfo").unwrap_or_default();
    of_meminfo(&meminfo)
        .filter(|size| known.contains(size))
        .ok_or(Errno::NOSYS)
}

/// Parses `Hugepagesize:       2048 kB`.
fn of_meminfo(meminfo: &[u8]) -> Option<PageSize> {
    PageSize::new(kib_field(meminfo, b"Hugepagesize:")?.0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_size_is_read() {
        let meminfo = b"HugePages_Total:       0\nHugepagesize:       2048 kB\n";
        assert_eq!(of_meminfo(meminfo), Some(PageSize::SIZE_2M));
        assert_eq!(of_meminfo(b"MemTotal: 1 kB\n"), None);
    }
}
