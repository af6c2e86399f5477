//! The arithmetic of a table: [`Geometry`], and what a huge page's descriptors can save: [`Saving`].
//!
//! Invariant: the descriptors of a section fill whole base pages, at least one. So a section's memory can be given back
//! without a neighbour's descriptors in it.

use rustix::io::Errno;

use super::Error;
use crate::units::{Bytes, Order, PageSize, Pages};

/// Of one descriptor.
pub(super) const DESCRIPTOR: u64 = 64;
/// The largest compound page: what a PUD maps where the base page is 4 KiB.
const LARGEST: PageSize = PageSize::SIZE_1G;

/// The size of the pages that are described, and of a *section*: the least huge page whose descriptors can be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    base: PageSize,
    section: Order,
}

/// What of a compound page's descriptors is given back, in base pages of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Saving {
    /// Given back.
    pub pages: Pages,
    /// What they fill, in whole base pages.
    pub of: Pages,
    /// Why not all of it, where that is so.
    pub why: Option<Unsaved>,
}

/// Why the descriptors of a compound page keep their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsaved {
    /// They share a base page of the table with their neighbours'.
    #[error("its descriptors fill {0}, less than one base page of {1}")]
    LessThanAPage(Bytes, Bytes),
    /// The table was made for larger huge pages.
    #[error("it is smaller than the huge pages of the table, {0}")]
    LessThanASection(PageSize),
    /// The kernel refused to take the memory back.
    #[error("the kernel did not take their memory back: {0}")]
    Refused(Errno),
}

impl Geometry {
    /// Base pages of `base`, and huge pages of `huge` and more, up to 1 GiB. Where the descriptors of such a huge page fill less
    /// than one base page, only larger ones are optimised.
    ///
    /// # Errors
    /// [`Error::Geometry`] where there is no such huge page, or none up to 1 GiB that could be optimised.
    pub fn new(base: PageSize, huge: PageSize) -> Result<Self, Error> {
        let fills_a_page = Order((base.bytes() / DESCRIPTOR).checked_ilog2().unwrap_or(0));
        let section = Ord::max(huge.order(base), fills_a_page);
        let fits = base.bytes() > DESCRIPTOR && base < huge && section <= LARGEST.order(base);
        let geometry = Self { base, section };
        fits.then_some(geometry)
            .ok_or(Error::Geometry { base, huge })
    }

    /// That of this host: its base page, and the huge page that a PMD maps.
    ///
    /// # Errors
    /// As [`Geometry::new`].
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

    /// The size of a base page.
    pub const fn base(self) -> PageSize {
        self.base
    }

    /// The order of the least compound page that is optimised.
    pub const fn section(self) -> Order {
        self.section
    }

    /// The order of the largest compound page.
    pub const fn largest(self) -> Order {
        LARGEST.order(self.base)
    }

    /// What the descriptors of a compound page of `order` fill.
    pub const fn descriptors(self, order: Order) -> Bytes {
        Bytes(DESCRIPTOR << order.0)
    }

    /// What optimising a compound page of `order` saves, and why no more.
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

    /// What is saved of a huge page of that size, and of how many.
    fn saved(base: u64, section: u64, huge: u64) -> (u64, u64, Option<Unsaved>) {
        let geometry = geometry(base, section).unwrap();
        let order = PageSize::new(huge).unwrap().order(geometry.base());
        let saving = geometry.saving(order);
        (saving.pages.0, saving.of.0, saving.why)
    }

    #[test]
    fn all_of_a_huge_page_is_saved_at_any_base_page_size() {
        // What a PMD maps has eight base pages of descriptors, whatever the base page is.
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
        // Larger ones of the same table are optimised all the same.
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
