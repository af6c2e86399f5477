//! A process's memory by [`Kind`] and folio size: the types that `status` and the run report share.

use std::collections::BTreeMap;

use crate::units::{Bytes, PageSize};

/// Folios of at least this count as huge, whatever one PMD maps: 2 MiB on x86-64, 32 or 512 MiB where
/// base pages are larger.
pub const HUGE: PageSize = PageSize::SIZE_2M;

/// What a mapping is to the program.
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
    /// Shared memory: shared anonymous mappings, memfd, /dev/shm, System V segments, shared hugetlb.
    Shared,
    /// The main thread's stack.
    Stack,
    /// Every other mapping: files that are only read or are shared, the vDSO.
    File,
}

impl Kind {
    /// One word, as reports have it.
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
    /// Resident in folios of at least 2 MiB: hugetlb, THPs mapped by PMD, and, where folio sizes were
    /// looked up, huge folios mapped by base pages, as a THP is of which a part was unmapped. Where they
    /// were not, those are in `unknown`, and this is a lower bound.
    pub huge: Bytes,
    /// Resident by folio size, where it is known.
    pub folios: BTreeMap<PageSize, Bytes>,
    /// Resident, not mapped by PMD, of a folio size that was not looked up: it takes CAP_SYS_ADMIN to
    /// read /proc/kpageflags, and time.
    pub unknown: Bytes,
}

/// The memory of a process, or of several added up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Usage(pub BTreeMap<Kind, KindUsage>);

impl KindUsage {
    /// [`KindUsage::huge`] divided by [`KindUsage::bytes`]; `None` where nothing is resident.
    pub fn huge_share(&self) -> Option<f64> {
        (self.bytes.0 > 0).then(|| self.huge.0 as f64 / self.bytes.0 as f64)
    }

    fn add(&mut self, other: &Self) {
        self.mapped += other.mapped;
        self.bytes += other.bytes;
        self.huge += other.huge;
        self.unknown += other.unknown;
        for (size, bytes) in &other.folios {
            *self.folios.entry(*size).or_default() += *bytes;
        }
    }
}

impl Usage {
    /// The usage of one kind; all zero where there is none.
    pub fn kind(&self, kind: Kind) -> KindUsage {
        self.0.get(&kind).cloned().unwrap_or_default()
    }

    /// Adds another process's usage. Memory that both map is counted twice, as `Rss` counts it.
    pub fn add(&mut self, other: &Self) {
        for (kind, theirs) in &other.0 {
            self.0.entry(*kind).or_default().add(theirs);
        }
    }

    /// All kinds added up.
    pub fn total(&self) -> KindUsage {
        let mut total = KindUsage::default();
        for usage in self.0.values() {
            total.add(usage);
        }
        total
    }
}
