//! What a region is to be: [`Builder`].

use super::ladder::no_pages;
use super::{Error, Region, Rung, Why};
use crate::kernel::{Root, base_page, thp};
use crate::units::{Bytes, PageSize};

/// What a region is to be: [`Region::builder`].
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

    /// For how much it has addresses: it grows to that and no further. Its size, unless that is more.
    pub fn capacity(mut self, capacity: Bytes) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Which page sizes it is to have, where there is a choice: any, unless told otherwise. On [`Rung::Kernel`] the kernel chooses
    /// by its controls: the region is advised so that a first touch tries one of these first, or none; smaller ones come
    /// where memory is fragmented.
    pub fn sizes(mut self, sizes: &[PageSize]) -> Self {
        self.sizes = Some(sizes.to_vec());
        self
    }

    /// The highest rung that is tried: [`Rung::Collapse`], unless told otherwise.
    pub fn up_to(mut self, rung: Rung) -> Self {
        self.up_to = rung;
        self
    }

    /// Makes it, of zeroes.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::Capacity`] where the size is larger; [`Error::Call`] where addresses or a file cannot be
    /// had; [`Error::Host`] where the PMD size cannot be read. What keeps it from a rung is no error: see
    /// [`Region::standing`].
    pub fn build(self) -> Result<Region, Error> {
        self.build_at(&Root::host())
    }

    /// The same on a host whose files are behind `root`.
    ///
    /// # Errors
    /// As [`Builder::build`].
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
