//! Claims on where the pages of a sample come from: the claims on [`Supply`] and [`Way`].

use jumbo::units::{Bytes, Pages};

use crate::claim::{self, Claim, MOST, exactly};
use crate::keeper::{Needs, SIZE};
use crate::task::{Provision, Source, Supply, Way};

/// Where pages came from, by the counters of both pools: pages taken from our pool, its surplus pages, and what more
/// surplus pages and promised ones the kernel's pool of 2 MiB pages had than before.
pub(super) const USED: &str = "used_pages";
pub(super) const SURPLUS: &str = "surplus_pages";
pub(super) const KERNEL_SURPLUS: &str = "kernel_surplus_pages";
pub(super) const KERNEL_RESERVED: &str = "kernel_reserved_pages";

impl Source {
    /// The claim of so much memory on its pages.
    pub(super) fn claims(self, size: Bytes) -> Vec<Claim> {
        match self {
            Self::Hugetlb => claim::hugetlb(size),
            Self::Thp => claim::huge(size),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hugetlb => "hugetlb",
            Self::Thp => "thp",
        }
    }
}

impl Supply {
    /// The pages of the kernel's pool.
    pub(super) fn needs(self, pages: Pages) -> Needs {
        match self {
            Self(Source::Thp, _) => Needs::default(),
            Self(Source::Hugetlb, Provision::Surplus) => Needs {
                overcommit: pages,
                ..Needs::default()
            },
            Self(Source::Hugetlb, _) => Needs::persistent(pages),
        }
    }

    /// Of a program that has `pages` of a pool of its own.
    pub(super) fn claims(self, pages: Pages) -> Vec<Claim> {
        let (ours, kernels) = match self.1 {
            Provision::Held => (0, 0),
            Provision::Persistent => (pages.0, 0),
            Provision::Surplus => (pages.0, pages.0),
        };
        let mut claims = self.0.claims(pages.bytes(SIZE));
        claims.extend([exactly(USED, pages.0), exactly(SURPLUS, ours)]);
        if self.0 == Source::Hugetlb {
            claims.push(exactly(KERNEL_SURPLUS, kernels));
        }
        claims
    }

    /// Of a program under `jumbo run --pool`, of which the kernel's counters alone are seen.
    pub(super) fn claims_of_heap(self, size: Bytes) -> Vec<Claim> {
        let most = size.whole_pages(SIZE).0 / 100 * MOST;
        let surplus = match self.1 {
            Provision::Surplus => most..=u64::MAX,
            _ => 0..=0,
        };
        let mut claims = self.0.claims(size);
        claims.push(claim::within(KERNEL_SURPLUS, surplus));
        claims
    }
}

impl Way {
    pub(super) fn name(self, source: Source) -> String {
        let how = match (self, source) {
            (Self::Take | Self::TakePlain, _) => "take, give",
            (Self::TakeZeroed, _) => "take zeroed, give",
            (Self::Map, _) => "mmap, munmap",
            (Self::MapTouched, Source::Hugetlb) => "mmap, touch, munmap",
            (Self::MapTouched, Source::Thp) => "mmap, advise, touch, munmap",
        };
        format!("{how} ({})", source.name())
    }

    /// Of a program with one page in hand, of a pool of `pages` where it has a pool.
    pub(crate) fn claims(self, source: Source, pages: Pages) -> Vec<Claim> {
        match self {
            Self::Take | Self::TakePlain | Self::TakeZeroed => {
                let mut claims = source.claims(pages.bytes(SIZE));
                claims.extend([exactly(USED, 1), exactly(SURPLUS, 0)]);
                claims
            }
            Self::Map => vec![claim::at_least(KERNEL_RESERVED, 1)],
            Self::MapTouched => source.claims(Pages(1).bytes(SIZE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::figures;
    use crate::launch::Launch;

    const PAGES: Pages = Pages(10);
    const SUPPLIES: [Supply; 5] = [
        Supply(Source::Hugetlb, Provision::Held),
        Supply(Source::Hugetlb, Provision::Persistent),
        Supply(Source::Hugetlb, Provision::Surplus),
        Supply(Source::Thp, Provision::Held),
        Supply(Source::Thp, Provision::Surplus),
    ];

    /// Whether that is right: pages in huge pages, of them in hugetlb pages; pages taken from our pool, surplus ones of
    /// it, surplus and promised ones of the kernel's.
    fn fine(claims: &[Claim], memory: [u32; 2], counted: [u32; 4]) -> bool {
        let [huge, hugetlb] = memory.map(|pages| f64::from(pages) * SIZE.bytes() as f64);
        let [used, surplus, kernel_surplus, kernel_reserved] = counted.map(f64::from);
        let figures = figures([
            ("huge_bytes", huge),
            ("hugetlb_bytes", hugetlb),
            ("preload_libraries", 0.0),
            (USED, used),
            (SURPLUS, surplus),
            (KERNEL_SURPLUS, kernel_surplus),
            (KERNEL_RESERVED, kernel_reserved),
        ]);
        claim::check(claims, &Launch::Plain, &figures).is_ok()
    }

    #[test]
    fn what_is_surplus_is_not_in_the_kernels_pool_before() {
        let needs = SUPPLIES.map(|supply| supply.needs(PAGES));
        let needs = needs.map(|needs| (needs.persistent.0, needs.overcommit.0));
        assert_eq!(needs, [(10, 0), (10, 0), (0, 10), (0, 0), (0, 0)]);
    }

    #[test]
    fn pages_that_came_from_elsewhere_are_refused() {
        for (counted, huge, right) in [
            ([10, 0, 0, 0], 10, [true, false, false, true, false]),
            ([10, 10, 0, 0], 10, [false, true, false, false, true]),
            ([10, 10, 10, 0], 10, [false, false, true, false, true]),
            ([9, 0, 0, 0], 10, [false; 5]),
            ([10, 0, 0, 0], 9, [false; 5]),
            ([10, 10, 10, 0], 9, [false; 5]),
        ] {
            let each = SUPPLIES.map(|s| fine(&s.claims(PAGES), [huge; 2], counted));
            assert_eq!(each, right, "{counted:?} {huge}");
        }
    }

    #[test]
    fn a_heap_must_be_on_the_pages_that_its_side_names() {
        for (memory, surplus, right) in [
            ([100, 100], 0, [true, false]),
            ([100, 100], 97, [false, true]),
            ([100, 100], 50, [false, false]),
            ([100, 0], 0, [false, false]),
        ] {
            let each = [Provision::Held, Provision::Surplus].map(|provision| {
                let supply = Supply(Source::Hugetlb, provision);
                let claims = supply.claims_of_heap(Pages(100).bytes(SIZE));
                fine(&claims, memory, [0, 0, surplus, 0])
            });
            assert_eq!(each, right, "{memory:?} {surplus}");
        }
    }

    #[test]
    fn a_mapping_without_a_page_is_refused() {
        let of = |way: Way, source, huge, promised| {
            fine(&way.claims(source, PAGES), [huge; 2], [0, 0, 0, promised])
        };
        let map = |huge, promised| of(Way::Map, Source::Hugetlb, huge, promised);
        assert!(map(0, 1) && !map(0, 0));
        for source in [Source::Hugetlb, Source::Thp] {
            let touched = |huge, promised| of(Way::MapTouched, source, huge, promised);
            assert!(touched(1, 0) && !touched(0, 1));
        }
    }
}
