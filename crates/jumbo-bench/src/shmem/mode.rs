//! Methods that back shared memory, and their claims: [`ShmemMode`].

use std::fmt;

use jumbo::units::{Bytes, PageSize};
use jumbo_host::knobs::{Knob, Value};

use crate::claim::{self, Claim, MIN_PERCENT, nearly_all, within};
use crate::keeper::{Needs, PAGE_2M, control};
use crate::launch::Launch;
use crate::task::ShmemMode;

/// Options under which only shared memory differs from plain.
const SHM_ONLY: &str = "--heap=off --maps=off --text=off --data=off --free=off --reaper=off";

/// Figures of [`ShmemMode::claims`]: page faults of the touches; bytes in large folios of all sizes
/// and of the mode's size, by the kernel's statistics.
pub(super) const TOUCH_FAULTS: &str = "touch_faults";
pub(super) const LARGE_FOLIO_BYTES: &str = "large_folio_bytes";
pub(super) const SIZED_FOLIO_BYTES: &str = "sized_folio_bytes";

impl ShmemMode {
    /// Part of row names, name of the side, and of a missing method. `{}` is the block size.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::Base => ["base", "4 KiB pages", ""],
            Self::Disabled => ["disabled", "jumbo run, sizes off", "sizes off"],
            Self::Kernel(_) => [
                "kernel_{}",
                "kernel, {}",
                "a folio size by the kernel's controls",
            ],
            Self::Collapse => [
                "collapse_{}",
                "touch and collapse, {}",
                "touch and collapse",
            ],
            Self::Hugetlb => [
                "hugetlb_{}",
                "jumbo run --shm=hugetlb, {}",
                "hugetlb (--shm=hugetlb)",
            ],
        }
    }

    pub(super) fn key(self) -> String {
        let size = self.block().to_string().to_lowercase();
        self.names()[0].replace("{}", &size)
    }

    pub(super) fn method(self) -> &'static str {
        self.names()[2]
    }

    /// Size of the memory that one touch populates.
    pub(super) fn block(self) -> PageSize {
        match self {
            Self::Base | Self::Disabled => PageSize::SIZE_4K,
            Self::Kernel(size) => size,
            Self::Collapse | Self::Hugetlb => PAGE_2M,
        }
    }

    pub(super) fn published(self) -> Option<&'static str> {
        match self {
            Self::Kernel(size) if size.kib() == 64 => Some("6.4"),
            Self::Disabled => Some("0.985"),
            _ => None,
        }
    }

    pub(super) fn launch(self) -> Launch {
        let option = match self {
            Self::Base | Self::Kernel(_) | Self::Collapse => return Launch::Plain,
            Self::Disabled => "auto".to_owned(),
            Self::Hugetlb => format!("hugetlb --shm-sizes={PAGE_2M}"),
        };
        Launch::Jumbo(format!("--shm={option} {SHM_ONLY}"))
    }

    /// Kernel needs for `size` bytes. Of the controls of all `sizes` only the used one is on;
    /// collapse needs that of the PMD size at its default.
    pub(super) fn needs(self, size: Bytes, sizes: &[PageSize]) -> Needs {
        let word = |size| match self {
            Self::Kernel(allowed) if allowed == size => "always",
            Self::Collapse if size == PAGE_2M => "inherit",
            _ => "never",
        };
        let of_pool = if self == Self::Hugetlb {
            size
        } else {
            Bytes(0)
        };
        let knob = |&size| -> (Knob, Value) { (control(size), word(size).into()) };
        Needs {
            knobs: sizes.iter().map(knob).collect(),
            ..Needs::persistent(of_pool.whole_pages(PAGE_2M))
        }
    }

    pub(super) fn claims(self, size: Bytes) -> Vec<Claim> {
        // Each block takes one page fault; the process has a few others.
        let blocks = size.0 / self.block().bytes();
        let faults = within(
            TOUCH_FAULTS,
            blocks / 100 * MIN_PERCENT..=blocks / 4 * 5 + 2000,
        );
        let small = within(LARGE_FOLIO_BYTES, 0..=size.0 / 100);
        match self {
            Self::Base | Self::Disabled => {
                let mut claims = claim::base(size);
                claims.extend([faults, small]);
                claims
            }
            Self::Kernel(_) => vec![nearly_all(SIZED_FOLIO_BYTES, size), faults],
            Self::Collapse => claim::huge(size),
            Self::Hugetlb => claim::hugetlb(size),
        }
    }
}

impl fmt::Display for ShmemMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names()[1].replace("{}", &self.block().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{figures, with};

    const SIZE_64K: PageSize = match PageSize::new(64 << 10) {
        Ok(size) => size,
        Err(_) => PAGE_2M,
    };
    const MODES: [ShmemMode; 5] = [
        ShmemMode::Base,
        ShmemMode::Disabled,
        ShmemMode::Kernel(SIZE_64K),
        ShmemMode::Collapse,
        ShmemMode::Hugetlb,
    ];

    /// Modes whose claims hold for 1 GiB with these page faults; MiB in large folios, in folios of
    /// the mode's size, PMD-mapped and in hugetlb pages.
    fn fine(faults: u32, mib: [u32; 4]) -> [bool; 5] {
        let [large, sized, huge, hugetlb] = mib.map(|mib| f64::from(mib) * f64::from(1 << 20));
        let found = [
            (TOUCH_FAULTS, f64::from(faults)),
            (LARGE_FOLIO_BYTES, large),
            (SIZED_FOLIO_BYTES, sized),
            ("resident_bytes", f64::from(1 << 30)),
            ("huge_bytes", huge),
            ("hugetlb_bytes", hugetlb),
        ];
        MODES.map(|mode| {
            let launch = mode.launch();
            let library = f64::from(u8::from(matches!(launch, Launch::Jumbo(_))));
            let figures = with(figures(found), [("preload_libraries", library)]);
            claim::check(&mode.claims(Bytes(1 << 30)), &launch, &figures).is_ok()
        })
    }

    #[test]
    fn memory_of_another_origin_is_rejected() {
        for (faults, mib, right) in [
            (262_200, [0; 4], [1, 1, 0, 0, 0]),
            (16_400, [1024, 1024, 0, 0], [0, 0, 1, 0, 0]),
            (262_200, [1024, 1024, 0, 0], [0; 5]),
            (1000, [0, 0, 1024, 0], [0, 0, 0, 1, 0]),
            (200, [0; 4], [0; 5]),
            (200, [0; 4], [0; 5]),
            (600, [0, 0, 1024, 1024], [0, 0, 0, 1, 1]),
        ] {
            let found = fine(faults, mib).map(u8::from);
            assert_eq!(found, right, "{faults} {mib:?}");
        }
    }

    #[test]
    fn only_the_modes_own_size_is_allowed() {
        let words = |mode: ShmemMode| {
            let set = mode.needs(Bytes(0), &[SIZE_64K, PAGE_2M]).knobs.into_iter();
            set.map(|(_, word)| word.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(words(ShmemMode::Kernel(SIZE_64K)), ["always", "never"]);
        assert_eq!(words(ShmemMode::Collapse), ["never", "inherit"]);
        for mode in [ShmemMode::Base, ShmemMode::Disabled, ShmemMode::Hugetlb] {
            assert_eq!(words(mode), ["never", "never"], "{mode}");
        }
    }
}
