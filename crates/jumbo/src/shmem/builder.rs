//! Configuration of a region: [`Builder`].

use super::ladder::no_pages;
use super::{Error, Region, Rung, Why};
use crate::units::{Bytes, PageSize};
use jumbo_sys::files::{Root, base_page};
use jumbo_sys::thp;

/// Configuration of a region, from [`Region::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    pub(super) size: Bytes,
    pub(super) capacity: Option<Bytes>,
    pub(super) sizes: Option<Vec<PageSize>>,
    pub(super) up_to: Rung,
}

impl Builder {
    pub(super) fn new(size: Bytes) -> Self {
        Self {
            size,
            capacity: None,
            sizes: None,
            up_to: Rung::Collapse,
        }
    }

    /// Sets the maximum size, for which addresses are reserved. The default is the size.
    pub fn capacity(mut self, capacity: Bytes) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Sets the page sizes to use; the default is any. On [`Rung::Kernel`] the kernel selects by
    /// its controls: advice makes a first touch try one of these first, or none; it gets a smaller
    /// one if memory is fragmented.
    pub fn sizes(mut self, sizes: &[PageSize]) -> Self {
        self.sizes = Some(sizes.to_vec());
        self
    }

    /// Sets the highest method to try; the default is [`Rung::Collapse`].
    pub fn up_to(mut self, rung: Rung) -> Self {
        self.up_to = rung;
        self
    }

    /// Creates the region, zeroed.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::Capacity`] if the size is larger; [`Error::Call`] without
    /// addresses or a file; [`Error::Host`] if the PMD size cannot be read. An unavailable method
    /// is no error: see [`Region::standing`].
    pub fn build(self) -> Result<Region, Error> {
        self.build_at(&Root::host())
    }

    /// Same as [`Builder::build`], with the kernel's files below `root`.
    ///
    /// # Errors
    /// Same as [`Builder::build`].
    pub fn build_at(self, root: &Root) -> Result<Region, Error> {
        if self.size == Bytes(0) {
            return Err(Error::Empty);
        }
        let (pmd, base) = (thp::pmd_size(root)?, base_page(root));
        let mut refused = Vec::new();
        if self.up_to >= Rung::Hugetlb {
            let sizes = self.sizes.iter().flatten().copied();
            let mut sizes: Vec<_> = sizes.filter(|size| *size >= pmd).collect();
            sizes.sort_unstable();
            if self.sizes.is_none() {
                sizes.push(pmd);
            } else if sizes.is_empty() {
                refused.push((Rung::Hugetlb, Why::Size(pmd)));
            }
            for size in sizes.into_iter().rev() {
                match self.hugetlb(root, size, pmd) {
                    Ok(region) => return Ok(region),
                    Err(why) => refused.push((Rung::Hugetlb, why)),
                }
            }
        }
        let mut region = Region::reserve(&self, root, base, pmd, None)?;
        region.refused = refused;
        region.grow(self.size)?;
        Ok(region)
    }

    fn hugetlb(&self, root: &Root, page: PageSize, pmd: PageSize) -> Result<Region, Why> {
        if page.align_down(self.size.0) != self.size.0 {
            return Err(Why::NotWhole(page));
        }
        let made = Region::reserve(self, root, page, pmd, Some(page)).and_then(|mut region| {
            region.grow(self.size)?;
            Ok(region)
        });
        made.map_err(|error| Why::NoPages {
            size: page,
            errno: match error {
                Error::NoPages { errno, .. } => no_pages(errno),
                other => other.to_string(),
            },
        })
    }
}
