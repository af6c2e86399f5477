//! Arithmetic of a table: [`Geometry`], and savings of a huge page's descriptors: [`Saving`].
//!
//! Invariant: the descriptors of a section fill whole base pages, at least one. So a section's
//! memory can be freed without a neighbour's descriptors.

use rustix::io::Errno;

use super::Error;
use crate::units::{Bytes, Order, PageSize, Pages};

/// Size of a descriptor.
pub(super) const DESCRIPTOR_BYTES: u64 = 64;
/// The largest compound page: the PUD size with 4 KiB base pages.
const MAX_COMPOUND: PageSize = PageSize::SIZE_1G;

/// Size of the described pages, and of a *section*: the smallest huge page whose descriptors can be
/// freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    base: PageSize,
    section: Order,
}

/// Saved memory of a compound page's descriptors, in base pages of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saving {
    /// Freed base pages.
    pub pages: Pages,
    /// Whole base pages of the descriptors.
    pub of: Pages,
    /// Reason if not all of them are freed.
    pub why: Option<Unsaved>,
}

/// Reason for descriptors that keep their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsaved {
    /// They share a base page of the table with other descriptors.
    #[error("its descriptors fill {0}, less than one base page of {1}")]
    LessThanAPage(Bytes, Bytes),
    /// The table was made for larger huge pages.
    #[error("it is smaller than the huge pages of the table, {0}")]
    LessThanASection(PageSize),
    /// The kernel refused to free the memory.
    #[error("the kernel did not take their memory back: {0}")]
    Refused(Errno),
}

impl Geometry {
    /// Creates the geometry of base pages of `base` and huge pages from `huge` to 1 GiB. If the
    /// descriptors of such a huge page fill less than one base page, only larger ones are
    /// optimised.
    ///
    /// # Errors
    /// [`Error::Geometry`] without such huge pages, or if none up to 1 GiB can be optimised.
    pub fn new(base: PageSize, huge: PageSize) -> Result<Self, Error> {
        let fills_a_page = Order(
            (base.bytes() / DESCRIPTOR_BYTES)
                .checked_ilog2()
                .unwrap_or(0),
        );
        let section = Ord::max(huge.order(base), fills_a_page);
        let fits =
            base.bytes() > DESCRIPTOR_BYTES && base < huge && section <= MAX_COMPOUND.order(base);
        let geometry = Self { base, section };
        fits.then_some(geometry)
            .ok_or(Error::Geometry { base, huge })
    }

    /// Creates the geometry of this host: its base page and PMD sizes.
    ///
    /// # Errors
    /// Same as [`Geometry::new`].
    pub fn of_host() -> Result<Self, Error> {
        let base = PageSize::SIZE_4K
            .bytes()
            .max(rustix::param::page_size() as u64);
        // A page table is one base page of entries of 8 bytes.
        let sizes = [base, base / 8 * base].map(PageSize::new);
        match sizes {
            [Ok(base), Ok(pmd)] => Self::new(base, pmd),
            _ => Err(Error::Geometry {
                base: PageSize::SIZE_4K,
                huge: PageSize::SIZE_2M,
            }),
        }
    }

    /// Returns the size of a base page.
    pub const fn base(self) -> PageSize {
        self.base
    }

    /// Returns the order of the smallest optimised compound page.
    pub const fn section(self) -> Order {
        self.section
    }

    /// Returns the order of the largest compound page.
    pub const fn largest(self) -> Order {
        MAX_COMPOUND.order(self.base)
    }

    /// Returns the length of the descriptors of a compound page.
    pub const fn descriptors(self, order: Order) -> Bytes {
        Bytes(DESCRIPTOR_BYTES << order.0)
    }

    /// Returns the saved memory of an optimised compound page of `order`.
    pub fn saving(self, order: Order) -> Saving {
        let fill = self.descriptors(order);
        let of = fill.whole_pages(self.base);
        let why = if of == Pages(0) {
            Some(Unsaved::LessThanAPage(fill, Bytes(self.base.bytes())))
        } else if order < self.section {
            Some(Unsaved::LessThanASection(self.section.size(self.base)))
        } else {
            None
        };
        let pages = if why.is_none() { of } else { Pages(0) };
        Saving { pages, of, why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const K: u64 = 1 << 10;
    const M: u64 = 1 << 20;

    fn geometry(base: u64, huge: u64) -> Result<Geometry, Error> {
        Geometry::new(PageSize::new(base).unwrap(), PageSize::new(huge).unwrap())
    }

    /// Returns the saved pages of a huge page, their total, and the reason.
    fn saved(base: u64, section: u64, huge: u64) -> (u64, u64, Option<Unsaved>) {
        let geometry = geometry(base, section).unwrap();
        let order = PageSize::new(huge).unwrap().order(geometry.base());
        let saving = geometry.saving(order);
        (saving.pages.0, saving.of.0, saving.why)
    }

    #[test]
    fn all_of_a_huge_page_is_saved_at_any_base_page_size() {
        // A PMD-sized page has eight base pages of descriptors for any base page size.
        for (base, pmd) in [(4 * K, 2 * M), (16 * K, 32 * M), (64 * K, 512 * M)] {
            assert_eq!(saved(base, pmd, pmd), (8, 8, None), "{base}");
        }
        assert_eq!(saved(4 * K, 2 * M, 1024 * M), (4096, 4096, None));
        assert_eq!(saved(16 * K, 32 * M, 1024 * M), (256, 256, None));
        assert_eq!(saved(64 * K, 512 * M, 1024 * M), (16, 16, None));
        // Huge pages of contiguous entries, which arm64 has.
        assert_eq!(saved(4 * K, 64 * K, 32 * M), (128, 128, None));
    }

    #[test]
    fn less_than_a_page_of_descriptors_saves_nothing_and_says_so() {
        for (base, huge, fill) in [(16 * K, 2 * M, 8 * K), (64 * K, 2 * M, 2 * K)] {
            let (pages, of, why) = saved(base, huge, huge);
            assert_eq!((pages, of), (0, 0));
            assert_eq!(why, Some(Unsaved::LessThanAPage(Bytes(fill), Bytes(base))));
            assert!(why.unwrap().to_string().contains("less than one base page"));
        }
        // Larger pages of the same table are optimised.
        assert_eq!(saved(16 * K, 2 * M, 4 * M), (1, 1, None));
        assert_eq!(saved(64 * K, 2 * M, 64 * M), (1, 1, None));
        assert_eq!(saved(64 * K, 2 * M, 512 * M), (8, 8, None));
        let (pages, of, why) = saved(4 * K, 2 * M, M);
        assert_eq!((pages, of), (0, 4));
        assert_eq!(why, Some(Unsaved::LessThanASection(PageSize::SIZE_2M)));
    }

    #[test]
    fn a_table_needs_huge_pages_that_can_be_optimised() {
        for (base, huge) in [
            (4 * K, 4 * K),
            (2 * M, 4 * K),
            (4 * K, 2048 * M),
            (64, 4 * K),
        ] {
            assert!(geometry(base, huge).is_err(), "{base} {huge}");
        }
        let host = Geometry::of_host().unwrap();
        assert_eq!(host.saving(host.section()).pages, Pages(8));
    }

    proptest! {
        #[test]
        fn a_section_fills_whole_base_pages(base in 12u32..18, huge in 13u32..31, order in 0u32..19) {
            if let Ok(geometry) = geometry(1 << base, 1 << huge) {
                let section = geometry.descriptors(geometry.section()).0;
                prop_assert!(section >= geometry.base().bytes() && section.is_multiple_of(geometry.base().bytes()));
                let saving = geometry.saving(Order(order));
                prop_assert_eq!(saving.why.is_none(), saving.pages == saving.of && saving.of.0 > 0);
                prop_assert_eq!(saving.pages.0 > 0, Order(order) >= geometry.section());
            }
        }
    }
}
