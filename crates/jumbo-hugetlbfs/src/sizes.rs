//! The page sizes of the kernel's pools.

use std::ffi::c_long;
use std::fs;

use jumbo::units::{Bytes, PageSize};
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
    let folder = match fs::read_dir("/sys/kernel/mm/hugepages") {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        folder => folder.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
    };
    let names = folder.flatten().map(|entry| entry.file_name());
    let mut sizes: Vec<_> = names.filter_map(|name| of_pool(name.to_str()?)).collect();
    sizes.sort_unstable();
    Ok(sizes)
}

/// Parses `hugepages-2048kB`.
fn of_pool(name: &str) -> Option<PageSize> {
    let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    PageSize::new(Bytes::from_kib(kib.parse().ok()?).0).ok()
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
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    of_meminfo(&meminfo)
        .filter(|size| known.contains(size))
        .ok_or(Errno::NOSYS)
}

/// Parses `Hugepagesize:       2048 kB`.
fn of_meminfo(meminfo: &str) -> Option<PageSize> {
    let field = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib = field.trim().strip_suffix(" kB")?;
    PageSize::new(Bytes::from_kib(kib.parse().ok()?).0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_names_sizes_in_two_ways() {
        assert_eq!(of_pool("hugepages-1048576kB"), Some(PageSize::SIZE_1G));
        assert_eq!(of_pool("hugepages-3kB"), None);
        let meminfo = "HugePages_Total:       0\nHugepagesize:       2048 kB\n";
        assert_eq!(of_meminfo(meminfo), Some(PageSize::SIZE_2M));
        assert_eq!(of_meminfo("MemTotal: 1 kB\n"), None);
    }
}
