//! Regions of other processes: [`Region::attach`].
#![expect(unsafe_code, reason = "maps a file that another process may truncate")]

use std::os::fd::OwnedFd;

use super::error::call;
use super::file::File;
use super::{Error, Region};
use crate::units::Bytes;
use jumbo_sys::files::{Root, base_page};
use jumbo_sys::thp;

impl Region {
    /// Maps the file of a region of another process, with its present length. A file of
    /// memfd_create(2), of shm_open(3) or on hugetlbfs works too.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::Call`] with EINVAL for a file of another kind, with EACCES for a
    /// descriptor without write access; [`Error::NoPages`] for a hole of a hugetlb file without a
    /// free page; [`Error::Host`].
    ///
    /// # Safety
    /// The promise of [`Region::file`], for all holders of the file.
    pub unsafe fn attach(file: OwnedFd) -> Result<Self, Error> {
        let root = Root::host();
        let (file, length, hugetlb) = File::of(file).map_err(call("fstatfs", 0))?;
        if length == 0 {
            return Err(Error::Empty);
        }
        let (pmd, base) = (thp::pmd_size(&root)?, base_page(&root));
        let builder = Self::builder(Bytes(length));
        let unit = hugetlb.unwrap_or(base);
        let mut region = Self::over(file, &builder, &root, unit, pmd, hugetlb)?;
        region.sealed = region.file.is_sealed();
        region.back(region.capacity)?;
        region.size = region.capacity;
        Ok(region)
    }
}
