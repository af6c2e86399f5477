//! The resident and huge part of a range of addresses: [`Mapped`].

use std::io;
use std::ops::Range;

use jumbo_sys::{Pagemap, Pages};

use crate::units::Bytes;

/// The pages of a range that this process maps, the zero page excluded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Mapped {
    /// Resident.
    pub bytes: Bytes,
    /// Mapped by PMDs or larger: THPs and hugetlb pages.
    pub huge: Bytes,
}

impl Mapped {
    /// Reads the state of a range, which need not be mapped as a whole. PAGEMAP_SCAN, Linux 6.7.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`]: an older kernel. The errno of the request: EINVAL for a
    /// range that does not begin and end at a page, EFAULT for one beyond the address space.
    pub fn of(range: Range<usize>) -> io::Result<Self> {
        let map = Pagemap::open()?;
        let count = |pages| match map.count(range.clone(), pages) {
            Ok(bytes) => Ok(Bytes(bytes as u64)),
            Err(rustix::io::Errno::NOTTY) => Err(io::ErrorKind::Unsupported.into()),
            Err(errno) => Err(io::Error::from(errno)),
        };
        let (bytes, huge) = (count(Pages::Resident)?, count(Pages::Huge)?);
        Ok(Self { bytes, huge })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::OwnedMapping;

    #[test]
    fn touched_pages_of_a_range_are_resident() {
        let mut mapping = OwnedMapping::new(Bytes(1 << 20)).unwrap();
        mapping.advise_base().unwrap();
        mapping[..3 * 4096].fill(1);
        let start = mapping.as_ptr().addr();
        match Mapped::of(start..start + mapping.len()) {
            Ok(found) => assert_eq!((found.bytes, found.huge), (Bytes(3 * 4096), Bytes(0))),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
        }
        assert!(Mapped::of(start + 1..start + 2).is_err());
    }
}
