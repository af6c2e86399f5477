//! Where pages come from, and what a sample must show of it: [`Supply`], [`Way`].

use jumbo::units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use super::keeper::Wanted;
use super::{EXCHANGED, SIZE};
use crate::claim::{Expected, MOST, On};

/// A pool, and how it comes by its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Supply {
    pub(super) source: Source,
    pub(super) provision: Provision,
}

/// What a pool's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// Pages of the kernel's pool.
    Hugetlb,
    /// Transparent huge pages.
    Thp,
}

/// How pages come to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Provision {
    /// The pool holds them before the clock runs.
    Held,
    /// The kernel's pool holds them before; ours takes them from there when they are wanted.
    Persistent,
    /// No pool holds them: they are surplus pages, of our pool and of the kernel's, made when they are wanted.
    Surplus,
}

/// How a page is had and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// `take` and `give`, its content unspecified.
    Take(Source),
    /// The same, with zeroes in it.
    TakeZeroed(Source),
    /// `mmap` and `munmap` of MAP_HUGETLB: the page is promised and never touched.
    Map,
    /// The same with a touch, on which the kernel clears the page.
    MapTouched,
    /// `mmap`, aligned, MADV_HUGEPAGE, a touch, `munmap`.
    MapThp,
}

/// Where pages came from, by the counters of both pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// Pages taken from our pool.
    pub(crate) used: Pages,
    /// Surplus pages of our pool.
    pub(crate) surplus: Pages,
    /// Surplus pages of the kernel's pool of 2 MiB pages, more than before.
    pub(crate) kernel_surplus: Pages,
    /// Pages of it that were promised, more than before.
    pub(crate) kernel_reserved: Pages,
}

impl Source {
    /// So much on its pages.
    pub(super) fn on(self, size: Bytes) -> On {
        match self {
            Self::Hugetlb => On::Hugetlb(size),
            Self::Thp => On::Huge(size),
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
    pub(super) const fn of(source: Source, provision: Provision) -> Self {
        Self { source, provision }
    }

    /// What the kernel's pool must have beyond what it had.
    pub(super) fn wanted(self, pages: Pages) -> Wanted {
        let mut wanted = Wanted::default();
        match self {
            Self {
                source: Source::Thp,
                ..
            } => {}
            Self {
                provision: Provision::Surplus,
                ..
            } => wanted.overcommit = pages,
            _ => wanted.persistent = pages,
        }
        wanted
    }

    /// A sample of a program that has `pages` of a pool of its own.
    pub(super) fn expected(self, pages: Pages) -> Expected {
        let (ours, kernels) = match self.provision {
            Provision::Held => (Pages(0), Pages(0)),
            Provision::Persistent => (pages, Pages(0)),
            Provision::Surplus => (pages, pages),
        };
        Expected {
            pool: Some([pages, ours]),
            kernel_surplus: (self.source == Source::Hugetlb).then_some([kernels; 2]),
            ..Expected::on(self.source.on(pages.bytes(SIZE)))
        }
    }

    /// A sample of a program under `jumbo run --pool`, of which the kernel's counters alone are seen.
    pub(super) fn expected_of_heap(self, size: Bytes) -> Expected {
        let most = Pages(size.whole_pages(SIZE).0 / 100 * MOST);
        Expected {
            kernel_surplus: Some(match self.provision {
                Provision::Surplus => [most, Pages(u64::MAX)],
                _ => [Pages(0); 2],
            }),
            ..Expected::on(self.source.on(size))
        }
    }
}

impl Way {
    pub(super) fn name(self) -> String {
        match self {
            Self::Take(source) => format!("take, give ({})", source.name()),
            Self::TakeZeroed(source) => format!("take zeroed, give ({})", source.name()),
            Self::Map => "mmap, munmap (hugetlb)".to_owned(),
            Self::MapTouched => "mmap, touch, munmap (hugetlb)".to_owned(),
            Self::MapThp => "mmap, advise, touch, munmap (thp)".to_owned(),
        }
    }

    /// A sample with one page in hand.
    pub(super) fn expected(self) -> Expected {
        let source = match self {
            Self::Take(source) | Self::TakeZeroed(source) => source,
            Self::Map | Self::MapTouched => Source::Hugetlb,
            Self::MapThp => Source::Thp,
        };
        let of = |size| Expected::on(source.on(size));
        match self {
            Self::Take(_) | Self::TakeZeroed(_) => Expected {
                pool: Some([Pages(1), Pages(0)]),
                ..of(EXCHANGED.bytes(SIZE))
            },
            Self::Map => Expected {
                kernel_reserved: Pages(1),
                ..of(Bytes(0))
            },
            Self::MapTouched | Self::MapThp => of(Pages(1).bytes(SIZE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::Launch;
    use crate::memory::Memory;
    use crate::worker::Sample;

    const PAGES: Pages = Pages(10);
    const SUPPLIES: [Supply; 5] = [
        Supply::of(Source::Hugetlb, Provision::Held),
        Supply::of(Source::Hugetlb, Provision::Persistent),
        Supply::of(Source::Hugetlb, Provision::Surplus),
        Supply::of(Source::Thp, Provision::Held),
        Supply::of(Source::Thp, Provision::Surplus),
    ];

    /// Whether that is right: pages in huge pages, of them in hugetlb pages; pages taken from our pool, surplus ones of
    /// it, surplus and promised ones of the kernel's.
    fn fine(expected: Expected, memory: [u64; 2], counted: [u64; 4], preloaded: bool) -> bool {
        let [huge, hugetlb] = memory.map(|pages| Pages(pages).bytes(SIZE));
        let [used, surplus, kernel_surplus, kernel_reserved] = counted.map(Pages);
        let memory = Memory {
            resident: huge,
            huge,
            hugetlb,
            preloaded,
        };
        let sample = Sample {
            counted: Counted {
                used,
                surplus,
                kernel_surplus,
                kernel_reserved,
            },
            ..Sample::new([], memory)
        };
        let launch = if preloaded {
            Launch::JUMBO
        } else {
            Launch::Plain
        };
        expected.check(&launch, &sample).is_ok()
    }

    #[test]
    fn what_is_surplus_is_not_in_the_kernels_pool_before() {
        let wanted = SUPPLIES.map(|supply| supply.wanted(PAGES));
        let wanted = wanted.map(|wanted| (wanted.persistent.0, wanted.overcommit.0));
        assert_eq!(wanted, [(10, 0), (10, 0), (0, 10), (0, 0), (0, 0)]);
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
            let each = SUPPLIES.map(|s| fine(s.expected(PAGES), [huge; 2], counted, false));
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
                let supply = Supply::of(Source::Hugetlb, provision);
                let expected = supply.expected_of_heap(Pages(100).bytes(SIZE));
                fine(expected, memory, [0, 0, surplus, 0], true)
            });
            assert_eq!(each, right, "{memory:?} {surplus}");
        }
    }

    #[test]
    fn a_mapping_without_a_page_is_refused() {
        let of =
            |way: Way, huge, promised| fine(way.expected(), [huge; 2], [0, 0, 0, promised], false);
        assert!(of(Way::Map, 0, 1) && !of(Way::Map, 0, 0));
        for way in [Way::MapTouched, Way::MapThp] {
            assert!(of(way, 1, 0) && !of(way, 0, 1));
        }
    }
}
