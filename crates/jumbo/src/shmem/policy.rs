//! Folio sizes that the kernel may use for shared memory, in the order that it tries: [`Controls`].
//!
//! The words are those of `shmem_enabled` (Documentation/admin-guide/mm/transhuge.rst), the rules
//! those of Linux 6.12 to 6.18. `tests/shmem_policy.rs` compares each combination with the kernel's
//! counters.
//!
//! The rules are for a mapped memfd, as in a [`Region`](super::Region), and for
//! `mmap(MAP_SHARED|MAP_ANONYMOUS)`. Such a mapping obeys the table of sizes, in which `inherit` is
//! the top-level value. `docs/design/shmem.md` has the rules of other shared memory.
//!
//! Invariant: each tried size is allowed, fits the mapping, and is larger than the next.

use std::ops::Range;

use crate::units::{Bytes, PageSize};
use jumbo_sys::thp::{SizeControl, Thp};

/// Advice for a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// No advice.
    None,
    /// MADV_HUGEPAGE.
    Huge,
    /// MADV_NOHUGEPAGE.
    NoHuge,
}

/// An object and one mapping of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The size of the object.
    pub size: Bytes,
    /// The addresses of the mapping.
    pub range: Range<u64>,
    /// Offset in the object, in bytes.
    pub offset: u64,
    /// Advice for the mapping.
    pub advice: Advice,
}

/// Controls of a host for shared memory: the words of its THP tables, all known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controls {
    thp: Thp,
    base: PageSize,
}

/// Words of `shmem_enabled`, at the top level and for a size (Linux 6.12).
const WORDS: [&str; 7] = [
    "always",
    "within_size",
    "advise",
    "never",
    "inherit",
    "deny",
    "force",
];

/// Reason for a refused MADV_COLLAPSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Refusal {
    /// The top-level value is `deny`.
    #[error("shmem_enabled is `deny`")]
    Deny,
    /// The value of the PMD size is `never`.
    #[error("shmem_enabled of {0} is `never`")]
    Never(PageSize),
    /// The top-level value is `force`, which allows only sizes at `inherit`.
    #[error("shmem_enabled is `force`, and that of {0} is not `inherit`")]
    NotInherited(PageSize),
    /// The value of the PMD size is `advise`, without advice.
    #[error("shmem_enabled of {0} is `advise`, and nothing was advised")]
    NotAdvised(PageSize),
    /// The value of the PMD size is `within_size`, and the object is smaller.
    #[error("shmem_enabled of {0} is `within_size`, and the object is smaller")]
    Small(PageSize),
    /// The mapping has MADV_NOHUGEPAGE.
    #[error("MADV_NOHUGEPAGE was advised")]
    NoHuge,
    /// No whole block of the object is aligned in the mapping.
    #[error("no whole {0} of the object lies at a multiple of it in the mapping")]
    Misaligned(PageSize),
}

impl Mapped {
    /// Returns the offset in the object of the byte at `address`.
    fn object_offset(&self, address: u64) -> u64 {
        self.offset + (address - self.range.start)
    }

    /// Reports whether the folio of `size` at `address` can be mapped as a whole: it is within the
    /// mapping, and aligned in the object and in memory.
    fn suits(&self, size: PageSize, address: u64) -> bool {
        let start = size.align_down(address);
        let end = start.saturating_add(size.bytes());
        let skew = self.range.start.wrapping_sub(self.offset);
        size.align_down(skew) == skew && self.range.start <= start && end <= self.range.end
    }
}

impl Controls {
    /// Creates the controls from a THP table and the base page size. `None` if the kernel has no
    /// huge folios for shared memory, or an unknown word.
    pub fn of(thp: &Thp, base: PageSize) -> Option<Self> {
        let sizes = thp
            .sizes
            .values()
            .filter_map(|of| of.shmem_enabled.as_ref());
        let mut words = sizes.chain([thp.shmem_enabled.as_ref()?]);
        let known = words.all(|choice| WORDS.contains(&choice.current.as_str()));
        let thp = thp.clone();
        known.then_some(Self { thp, base })
    }

    /// Returns the PMD size.
    pub fn pmd(&self) -> PageSize {
        self.thp.pmd_size
    }

    /// Returns the value of a size with a control. Before Linux 6.12 the top-level value applies to
    /// the PMD size, the only one.
    fn own(&self, size: PageSize) -> &str {
        let of = self.thp.sizes.get(&size);
        let own = of.and_then(|of| of.shmem_enabled.as_ref());
        own.map_or("inherit", |own| &own.current)
    }

    /// Reports whether the folio of `size` at an offset lies within the object, with its last base
    /// page counted as a whole one.
    fn holds(&self, mapped: &Mapped, size: PageSize, offset: u64) -> bool {
        let end = size.align_down(offset).saturating_add(size.bytes());
        end <= self.base.align_up(mapped.size.0).unwrap_or(u64::MAX)
    }

    /// Reports whether the controls allow a folio of `size` for a first touch at `address`, whether
    /// or not it fits there.
    pub fn allows(&self, mapped: &Mapped, size: PageSize, address: u64) -> bool {
        let advised = mapped.advice == Advice::Huge;
        // The top-level value concerns only the PMD size, whichever size inherits it. Unlike a
        // size's own value, it accepts advice for an object that is too small.
        let inherits = self.own(size) == "inherit";
        let of = if inherits { self.pmd() } else { size };
        let rule = self.thp.shared(size).map(|rule| rule.current.as_str());
        match rule {
            _ if mapped.advice == Advice::NoHuge => false,
            Some("always" | "force") => true,
            Some("within_size") => {
                (inherits && advised) || self.holds(mapped, of, mapped.object_offset(address))
            }
            Some("advise") => advised,
            _ => false,
        }
    }

    /// Returns the sizes that a fault at `address` tries, in order. It uses the first with free
    /// contiguous memory, or a base page: without such memory, or if the memory cgroup refuses the
    /// folio. A folio covers only offsets at which the object has no page yet.
    pub fn tried(&self, mapped: &Mapped, address: u64) -> Vec<PageSize> {
        let sized =
            |(size, of): (&PageSize, &SizeControl)| of.shmem_enabled.as_ref().map(|_| *size);
        let mut sizes: Vec<_> = self.thp.sizes.iter().rev().filter_map(sized).collect();
        if sizes.is_empty() {
            sizes.push(self.pmd());
        }
        sizes.retain(|size| self.allows(mapped, *size, address) && mapped.suits(*size, address));
        sizes
    }

    /// Checks whether MADV_COLLAPSE (Linux 6.1) makes a PMD-sized folio of the block at `address`,
    /// if one page of it is present. It treats `inherit` as allowed, unless the top-level value is
    /// `deny`.
    ///
    /// # Errors
    /// [`Refusal`]: the kernel returns EINVAL.
    pub fn collapses(&self, mapped: &Mapped, address: u64) -> Result<(), Refusal> {
        let (pmd, own) = (self.pmd(), self.own(self.pmd()));
        let top = self.thp.shmem_enabled.as_ref();
        let is_top = |word| top.is_some_and(|top| top.is(word));
        // The kernel checks the start of the mapping for a collapse of any of its blocks.
        let within = self.holds(mapped, pmd, mapped.offset);
        Err(match own {
            _ if mapped.advice == Advice::NoHuge => Refusal::NoHuge,
            _ if is_top("deny") => Refusal::Deny,
            own if is_top("force") && own != "inherit" => Refusal::NotInherited(pmd),
            "within_size" if !within => Refusal::Small(pmd),
            "advise" if mapped.advice != Advice::Huge => Refusal::NotAdvised(pmd),
            "never" => Refusal::Never(pmd),
            _ if !mapped.suits(pmd, address) => Refusal::Misaligned(pmd),
            _ => return Ok(()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::host;

    const FOLDER: &str = "sys/kernel/mm/transparent_hugepage";
    const PMD: PageSize = PageSize::SIZE_2M;

    /// Returns the controls of a fake host; `sizes` are in KiB.
    fn controls<'a>(top: &'a str, sizes: &[(u64, &'a str)]) -> Option<Controls> {
        let files = [
            (format!("{FOLDER}/enabled"), "never"),
            (format!("{FOLDER}/hpage_pmd_size"), "2097152"),
            (format!("{FOLDER}/shmem_enabled"), top),
        ];
        let size = |(kib, value): &(u64, _)| {
            let file = format!("{FOLDER}/hugepages-{kib}kB/shmem_enabled");
            (file, *value)
        };
        let files: Vec<_> = files.into_iter().chain(sizes.iter().map(size)).collect();
        let files = files.iter().map(|(file, text)| (file.as_str(), *text));
        let files: Vec<_> = files.collect();
        let (_folder, root) = host(&files);
        Controls::of(&Thp::read_controls(&root).unwrap()?, PageSize::SIZE_4K)
    }

    fn mapped(size: u64, advice: Advice) -> Mapped {
        let start = 1 << 30;
        Mapped {
            size: Bytes(size),
            range: start..start + size,
            offset: 0,
            advice,
        }
    }

    #[test]
    fn configured_sizes_are_tried_from_the_largest_that_fits() {
        let controls = controls(
            "advise",
            &[
                (16, "never"),
                (64, "always"),
                (256, "inherit"),
                (2048, "always"),
            ],
        );
        let controls = controls.unwrap();
        let tried = |size, advice| -> Vec<u64> {
            let mapped = mapped(size, advice);
            let tried = controls.tried(&mapped, mapped.range.start + 5);
            tried.iter().map(|size| size.kib()).collect()
        };
        assert_eq!(tried(4 << 20, Advice::Huge), [2048, 256, 64]);
        assert_eq!(tried(4 << 20, Advice::None), [2048, 64]);
        assert_eq!(tried(1 << 20, Advice::None), [64]);
        assert_eq!(tried(32 << 10, Advice::Huge), [0; 0]);
        assert_eq!(tried(4 << 20, Advice::NoHuge), [0; 0]);
    }

    #[test]
    fn a_kernel_without_sizes_has_the_top_level_value() {
        let old = controls("within_size", &[]).unwrap();
        let large = mapped(4 << 20, Advice::None);
        assert_eq!(old.tried(&large, large.range.start), [PMD]);
        assert_eq!(controls("sometimes", &[]), None);
        assert_eq!(controls("never", &[(64, "sometimes")]), None);
    }

    #[test]
    fn a_refusal_names_its_control() {
        let why = |top, of_pmd, size, advice| {
            let controls = controls(top, &[(2048, of_pmd)]).unwrap();
            let mapped = mapped(size, advice);
            controls.collapses(&mapped, mapped.range.start).err()
        };
        let large = 4 << 20;
        // The default of every distribution.
        assert_eq!(why("never", "inherit", large, Advice::None), None);
        assert_eq!(
            why("deny", "always", large, Advice::Huge),
            Some(Refusal::Deny)
        );
        assert_eq!(
            why("force", "always", large, Advice::Huge),
            Some(Refusal::NotInherited(PMD))
        );
        assert_eq!(
            why("always", "never", large, Advice::Huge),
            Some(Refusal::Never(PMD))
        );
        assert_eq!(
            why("never", "advise", large, Advice::None),
            Some(Refusal::NotAdvised(PMD))
        );
        assert_eq!(why("never", "advise", large, Advice::Huge), None);
        assert_eq!(
            why("never", "within_size", 1 << 20, Advice::Huge),
            Some(Refusal::Small(PMD))
        );
        assert_eq!(
            why("never", "inherit", 1 << 20, Advice::None),
            Some(Refusal::Misaligned(PMD))
        );
        assert_eq!(
            why("never", "inherit", large, Advice::NoHuge),
            Some(Refusal::NoHuge)
        );
    }
}
