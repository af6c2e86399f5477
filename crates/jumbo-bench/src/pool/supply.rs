//! Claims on the origin of a sample's pages: [`PoolConfig`] and [`PageCycle`].

use jumbo::units::{Bytes, Pages};

use crate::claim::{self, Claim, MIN_PERCENT, exactly};
use crate::keeper::{Needs, PAGE_2M};
use crate::task::{PageCycle, PoolConfig, PoolKind, Provision};

/// Figures of the origin of pages: pages in use and surplus pages of our pool, and the growth of
/// surplus pages in the kernel's pool of 2 MiB pages.
pub(super) const USED: &str = "used_pages";
pub(super) const SURPLUS: &str = "surplus_pages";
pub(super) const KERNEL_SURPLUS: &str = "kernel_surplus_pages";

impl PoolKind {
    /// Claims `size` bytes on pages of this kind.
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

impl PoolConfig {
    /// Needs for `pages` pages in the kernel's pool.
    pub(super) fn needs(self, pages: Pages) -> Needs {
        match self {
            Self(PoolKind::Thp, _) => Needs::default(),
            Self(PoolKind::Hugetlb, Provision::Surplus) => Needs {
                overcommit: pages,
                ..Needs::default()
            },
            Self(PoolKind::Hugetlb, _) => Needs::persistent(pages),
        }
    }

    /// Claims of a program with `pages` pages in a pool of its own, by the counters of that pool.
    pub(super) fn claims(self, pages: Pages) -> Vec<Claim> {
        let surplus = match self.1 {
            Provision::Held => 0,
            Provision::Surplus => pages.0,
        };
        let mut claims = self.0.claims(pages.bytes(PAGE_2M));
        claims.extend([exactly(USED, pages.0), exactly(SURPLUS, surplus)]);
        claims
    }

    /// Claims of a program under `jumbo run --pool`, by the kernel's counters alone.
    pub(super) fn claims_of_heap(self, size: Bytes) -> Vec<Claim> {
        let most = size.whole_pages(PAGE_2M).0 / 100 * MIN_PERCENT;
        let surplus = match self.1 {
            Provision::Surplus => most..=u64::MAX,
            _ => 0..=0,
        };
        let mut claims = self.0.claims(size);
        claims.push(claim::within(KERNEL_SURPLUS, surplus));
        claims
    }
}

impl PageCycle {
    pub(super) fn name(self, kind: PoolKind) -> String {
        let how = match (self, kind) {
            (Self::Take, _) => "take, give",
            (Self::MapTouched, PoolKind::Hugetlb) => "mmap, touch, munmap",
            (Self::MapTouched, PoolKind::Thp) => "mmap, advise, touch, munmap",
        };
        format!("{how} ({})", kind.name())
    }

    /// Claims of a program with one page in use, from a pool of `pages` pages if it has one.
    pub(crate) fn claims(self, kind: PoolKind, pages: Pages) -> Vec<Claim> {
        match self {
            Self::Take => {
                let mut claims = kind.claims(pages.bytes(PAGE_2M));
                claims.extend([exactly(USED, 1), exactly(SURPLUS, 0)]);
                claims
            }
            Self::MapTouched => kind.claims(Pages(1).bytes(PAGE_2M)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::figures;
    use crate::launch::Launch;

    const PAGES: Pages = Pages(10);
    const SUPPLIES: [PoolConfig; 4] = [
        PoolConfig(PoolKind::Hugetlb, Provision::Held),
        PoolConfig(PoolKind::Hugetlb, Provision::Surplus),
        PoolConfig(PoolKind::Thp, Provision::Held),
        PoolConfig(PoolKind::Thp, Provision::Surplus),
    ];

    /// Checks claims against: pages on huge pages, and on hugetlb pages; pages in use and surplus
    /// pages of our pool, surplus pages of the kernel's.
    fn fine(claims: &[Claim], memory: [u32; 2], counted: [u32; 3]) -> bool {
        let [huge, hugetlb] = memory.map(|pages| f64::from(pages) * PAGE_2M.bytes() as f64);
        let [used, surplus, kernel_surplus] = counted.map(f64::from);
        let figures = figures([
            ("huge_bytes", huge),
            ("hugetlb_bytes", hugetlb),
            ("preload_libraries", 0.0),
            (USED, used),
            (SURPLUS, surplus),
            (KERNEL_SURPLUS, kernel_surplus),
        ]);
        claim::check(claims, &Launch::Plain, &figures).is_ok()
    }

    #[test]
    fn surplus_pages_need_overcommit_only() {
        let needs = SUPPLIES.map(|config| config.needs(PAGES));
        let needs = needs.map(|needs| (needs.persistent.0, needs.overcommit.0));
        assert_eq!(needs, [(10, 0), (0, 10), (0, 0), (0, 0)]);
    }

    #[test]
    fn pages_of_another_origin_are_rejected() {
        for (counted, huge, right) in [
            ([10, 0, 0], 10, [true, false]),
            ([10, 10, 0], 10, [false, true]),
            ([9, 0, 0], 10, [false; 2]),
            ([10, 0, 0], 9, [false; 2]),
            ([10, 10, 0], 9, [false; 2]),
        ] {
            let each = [Provision::Held, Provision::Surplus].map(|provision| {
                let claims = PoolConfig(PoolKind::Thp, provision).claims(PAGES);
                fine(&claims, [huge; 2], counted)
            });
            assert_eq!(each, right, "{counted:?} {huge}");
        }
    }

    #[test]
    fn a_heap_on_other_pages_is_rejected() {
        for (memory, surplus, right) in [
            ([100, 100], 0, [true, false]),
            ([100, 100], 97, [false, true]),
            ([100, 100], 50, [false, false]),
            ([100, 0], 0, [false, false]),
        ] {
            let each = [Provision::Held, Provision::Surplus].map(|provision| {
                let config = PoolConfig(PoolKind::Hugetlb, provision);
                let claims = config.claims_of_heap(Pages(100).bytes(PAGE_2M));
                fine(&claims, memory, [0, 0, surplus])
            });
            assert_eq!(each, right, "{memory:?} {surplus}");
        }
    }

    #[test]
    fn a_mapping_without_a_page_is_rejected() {
        for kind in [PoolKind::Hugetlb, PoolKind::Thp] {
            let claims = PageCycle::MapTouched.claims(kind, PAGES);
            let touched = |huge| fine(&claims, [huge; 2], [0; 3]);
            assert!(touched(1) && !touched(0));
        }
    }
}
