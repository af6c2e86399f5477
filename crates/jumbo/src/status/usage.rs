//! A process's memory by [`Kind`] and folio size: the types that `status` and the run report share.

use std::collections::BTreeMap;

use crate::units::{Bytes, PageSize};

/// Minimum size of a huge folio, independent of the PMD size: 2 MiB on x86-64, 32 or 512 MiB with
/// larger base pages.
pub const HUGE: PageSize = PageSize::SIZE_2M;

/// Purpose of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Kind {
    /// Private anonymous memory: the brk heap, allocators' mappings, thread stacks.
    Heap,
    /// Executable file mappings.
    Text,
    /// Private writable file mappings and the bss behind them.
    Data,
    /// Shared memory: shared anonymous mappings, memfd, /dev/shm, System V segments, shared
    /// hugetlb.
    Shared,
    /// The main thread's stack.
    Stack,
    /// Every other mapping: files that are only read or are shared, the vDSO.
    File,
}

impl Kind {
    /// Returns its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Heap => "heap",
            Self::Text => "text",
            Self::Data => "data",
            Self::Shared => "shared",
            Self::Stack => "stack",
            Self::File => "file",
        }
    }
}

/// The resident memory of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct KindUsage {
    /// Mapped, resident or not.
    pub mapped: Bytes,
    /// Resident, hugetlb included.
    pub bytes: Bytes,
    /// Resident in folios of at least 2 MiB: hugetlb, THPs mapped by PMD, and huge folios mapped by
    /// base pages (a partly unmapped THP) if folio sizes were read. Else those are in `unknown`,
    /// and this is a lower bound.
    pub huge: Bytes,
    /// Resident by folio size, if known.
    pub folios: BTreeMap<PageSize, Bytes>,
    /// Resident, not mapped by PMD, of unknown folio size: /proc/kpageflags needs CAP_SYS_ADMIN,
    /// and time.
    pub unknown: Bytes,
    /// Resident on base pages in mappings without a whole aligned block of the PMD size.
    pub narrow: Bytes,
}

/// The memory of a process, or the sum of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Usage(pub BTreeMap<Kind, KindUsage>);

impl KindUsage {
    /// Returns [`KindUsage::huge`] divided by [`KindUsage::bytes`]; `None` if nothing is resident.
    pub fn huge_share(&self) -> Option<f64> {
        (self.bytes.0 > 0).then(|| self.huge.0 as f64 / self.bytes.0 as f64)
    }

    fn add(&mut self, other: &Self) {
        self.mapped += other.mapped;
        self.bytes += other.bytes;
        self.huge += other.huge;
        self.unknown += other.unknown;
        self.narrow += other.narrow;
        for (size, bytes) in &other.folios {
            *self.folios.entry(*size).or_default() += *bytes;
        }
    }
}

impl Usage {
    /// Returns the usage of one kind; all zeroes without one.
    pub fn kind(&self, kind: Kind) -> KindUsage {
        self.0.get(&kind).cloned().unwrap_or_default()
    }

    /// Adds another process's usage. Memory that both map is counted twice, as `Rss` counts it.
    pub fn add(&mut self, other: &Self) {
        for (kind, theirs) in &other.0 {
            self.0.entry(*kind).or_default().add(theirs);
        }
    }

    /// Returns the sum of all kinds.
    pub fn total(&self) -> KindUsage {
        let mut total = KindUsage::default();
        for usage in self.0.values() {
            total.add(usage);
        }
        total
    }
}
