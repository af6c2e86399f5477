//! One process's memory by kind and folio size: [`Observer`] and [`usage`].
//!
//! smaps has the memory mapped by PMD, and hugetlb. Only the kernel's page flags, for root, have
//! the folio sizes of the rest: a THP of which a part was unmapped or got other permissions is
//! still one folio, mapped by base pages. Without the flags the size is *unknown*, unless the
//! kernel's controls allow only the base page.

use std::collections::BTreeMap;

use crate::units::{Bytes, PageSize};
use jumbo_sys::files::{FileError, Root, base_page};
use jumbo_sys::folios::{Folios, ReadEntries};
use jumbo_sys::smaps::{Mapping, Smaps};
use jumbo_sys::thp::{self, Thp};

use super::usage::HUGE;
use super::{Kind, Usage};

/// The function that reads the mappings of a process.
pub type Read = fn(&Root, u32) -> Result<Smaps, FileError>;

/// Reads the memory of processes repeatedly; constant data is read once.
#[derive(Clone, Debug)]
pub struct Observer {
    root: Root,
    base: PageSize,
    pmd: PageSize,
    larger: Larger,
    read: Read,
    entries: Option<ReadEntries>,
}

/// Memory that can have folios larger than the base page under the current controls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Larger {
    anon: Where,
    /// Independent of advice: processes share the folios, and the advice of one suffices.
    shared: bool,
}

/// Reach of `enabled`, of the most permissive size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Where {
    Nowhere,
    Advised,
    Anywhere,
}

/// Returns the usage of this process or a program of the caller; for repeated use see [`Observer`].
///
/// # Errors
/// Same as [`Observer::usage`].
pub fn usage(root: &Root, pid: u32) -> Result<Usage, FileError> {
    Observer::new(root)?.usage(pid)
}

impl Observer {
    /// Creates an observer of this process and programs of the caller, below `root`.
    ///
    /// # Errors
    /// [`FileError`] if the PMD size cannot be read.
    pub fn new(root: &Root) -> Result<Self, FileError> {
        Ok(Self {
            root: root.clone(),
            base: base_page(root),
            pmd: thp::pmd_size(root)?,
            larger: Larger::read(root),
            read: Smaps::read,
            entries: None,
        })
    }

    /// Replaces the readers of mappings and of pagemap, which a process can block.
    #[must_use]
    pub fn reading(self, read: Read, entries: ReadEntries) -> Self {
        let entries = Some(entries);
        Self {
            read,
            entries,
            ..self
        }
    }

    /// Returns the memory of `pid`, by kind and folio size; empty for a kernel thread or zombie.
    ///
    /// # Errors
    /// [`FileError::Io`]: no such process, or no permission.
    pub fn usage(&self, pid: u32) -> Result<Usage, FileError> {
        let mut usage = Usage::default();
        self.each(pid, |kind, mapping| {
            self.count(&mut usage, kind, mapping, None)
        })?;
        Ok(usage)
    }

    /// Same as [`Observer::usage`], with all folio sizes: exact, slower, and only for root.
    ///
    /// # Errors
    /// Same as [`Observer::usage`].
    pub fn usage_with_folios(&self, pid: u32, folios: &mut Folios) -> Result<Usage, FileError> {
        let mut usage = Usage::default();
        let mut failed = None;
        self.each(pid, |kind, mapping| {
            let worth_it = failed.is_none() && mapping.rss > mapping.pmd_mapped();
            let looked_up = worth_it.then(|| folios.sizes(pid, mapping.start, mapping.end));
            match looked_up.transpose() {
                Ok(sizes) => self.count(&mut usage, kind, mapping, sizes),
                Err(error) => failed = Some(error),
            }
        })?;
        failed.map_or(Ok(usage), Err)
    }

    /// Returns the PMD size.
    pub fn pmd_size(&self) -> PageSize {
        self.pmd
    }

    /// Opens the files for folio sizes.
    ///
    /// # Errors
    /// [`FileError::Io`], EACCES if this process is not root.
    pub fn folios(&self) -> Result<Folios, FileError> {
        let folios = Folios::open(&self.root, self.base, self.pmd)?;
        Ok(match self.entries {
            Some(entries) => folios.reading(entries),
            None => folios,
        })
    }

    /// Calls `visit` with every mapping and its kind, by ascending address.
    ///
    /// # Errors
    /// Same as [`Observer::usage`].
    pub fn each(&self, pid: u32, visit: impl FnMut(Kind, &Mapping<'_>)) -> Result<(), FileError> {
        self.visit(&(self.read)(&self.root, pid)?, visit);
        Ok(())
    }

    /// Same as [`Observer::each`], for smaps that were read already.
    pub fn visit(&self, smaps: &Smaps, mut visit: impl FnMut(Kind, &Mapping<'_>)) {
        let mut data_end = None;
        for mapping in smaps.mappings() {
            let kind = self.kind(&mapping, data_end);
            let from_file = mapping.inode != 0 || !mapping.path.is_empty();
            data_end = (kind == Kind::Data && from_file).then_some(mapping.end);
            visit(kind, &mapping);
        }
    }

    /// `data_end` is the end of the data segment right before: anonymous memory there is bss.
    fn kind(&self, mapping: &Mapping<'_>, data_end: Option<u64>) -> Kind {
        let hugetlb = mapping
            .kernel_page_size
            .is_some_and(|size| size > self.base);
        let path = mapping.path;
        match (mapping.shared, path) {
            (true, _) if hugetlb || is_shared_memory(path) => Kind::Shared,
            (true, _) if mapping.shmem_pmd_mapped > Bytes(0) => Kind::Shared,
            (false, "[stack]") => Kind::Stack,
            (false, "") if mapping.write && data_end == Some(mapping.start) => Kind::Data,
            // Text that `jumbo run` moved, and code of a JIT compiler.
            (false, "") if mapping.execute && !mapping.write => Kind::Text,
            (false, _) if path.starts_with("[anon:jumbo text ") => Kind::Text,
            (false, "" | "[heap]") => Kind::Heap,
            (false, _) if path.starts_with("[anon:") => Kind::Heap,
            // A private mapping of /dev/zero is anonymous memory by another name, and so is
            // MAP_ANONYMOUS | MAP_HUGETLB, which the kernel names after a file of its own.
            (false, _) if path == "/dev/zero" || path.starts_with("/anon_hugepage") => Kind::Heap,
            _ if path.starts_with('[') => Kind::File,
            _ if mapping.execute => Kind::Text,
            (false, _) if mapping.write => Kind::Data,
            _ => Kind::File,
        }
    }

    fn count(
        &self,
        usage: &mut Usage,
        kind: Kind,
        mapping: &Mapping<'_>,
        looked_up: Option<BTreeMap<PageSize, Bytes>>,
    ) {
        let entry = usage.0.entry(kind).or_default();
        let (hugetlb, pmd_mapped) = (mapping.hugetlb(), mapping.pmd_mapped());
        entry.mapped += mapping.size();
        entry.bytes += mapping.rss + hugetlb;
        let first = self.pmd.align_up(mapping.start);
        if first.is_none_or(|first| first + self.pmd.bytes() > mapping.end) {
            entry.narrow += Bytes(mapping.rss.0.saturating_sub(pmd_mapped.0));
        }

        let mut add = |size: PageSize, bytes: Bytes| {
            if bytes > Bytes(0) {
                *entry.folios.entry(size).or_default() += bytes;
            }
        };
        let hugetlb_size = mapping.kernel_page_size.unwrap_or(self.pmd);
        add(hugetlb_size, hugetlb);
        add(self.pmd, pmd_mapped);
        let mut rest = mapping.rss.0.saturating_sub(pmd_mapped.0);
        let mut huge = Bytes(if hugetlb_size >= HUGE { hugetlb.0 } else { 0 });
        let mut take = |size: PageSize, bytes: u64| {
            let taken = bytes.min(rest);
            add(size, Bytes(taken));
            rest -= taken;
            if size >= HUGE {
                huge += Bytes(taken);
            }
        };
        match looked_up {
            // The flags were read after smaps and may differ: smaps takes precedence.
            Some(sizes) => {
                for (size, bytes) in sizes {
                    let counted = if size == self.pmd { pmd_mapped.0 } else { 0 };
                    take(size, bytes.0.saturating_sub(counted));
                }
            }
            None => take(self.base, self.surely_base_pages(kind, mapping).0),
        }
        entry.huge += pmd_mapped + huge;
        entry.unknown += Bytes(rest);
    }

    /// Returns the memory that the kernel's controls keep on base pages.
    ///
    /// The size of the mapping does not matter: mprotect(2) of half a THP leaves two mappings that
    /// are both too small for their common folio.
    fn surely_base_pages(&self, kind: Kind, mapping: &Mapping<'_>) -> Bytes {
        // A mapping with some larger folios may have parts of others, whatever the controls are.
        let some = mapping.pmd_mapped() > Bytes(0);
        let anon = match self.larger.anon {
            Where::Nowhere => some,
            Where::Advised => some || mapping.advised,
            Where::Anywhere => some || !mapping.declined,
        };
        match kind {
            Kind::Heap | Kind::Stack if anon => Bytes(0),
            Kind::Shared if some || self.larger.shared => Bytes(0),
            Kind::Heap | Kind::Stack | Kind::Shared => mapping.rss,
            // The file system selects the folios of the page cache; copies on write have base
            // pages, and so has bss unless it may have larger folios.
            Kind::Data if mapping.inode == 0 && anon => Bytes(0),
            Kind::Text | Kind::Data | Kind::File => Bytes(
                mapping
                    .anonymous
                    .0
                    .saturating_sub(mapping.anon_huge_pages.0),
            ),
        }
    }
}

impl Larger {
    fn read(root: &Root) -> Self {
        let of = |anon, shared| Self { anon, shared };
        let thp = match Thp::read_controls(root) {
            Ok(Some(thp)) => thp,
            Ok(None) => return of(Where::Nowhere, false),
            // Controls that cannot be read rule nothing out.
            Err(_) => return of(Where::Anywhere, true),
        };
        // Kernels without a control for each size still have the PMD size.
        let sizes = || thp.sizes.keys().copied().chain([thp.pmd_size]);
        let place = |choice: &thp::Choice| match choice.current.as_str() {
            "never" => Where::Nowhere,
            "madvise" => Where::Advised,
            _ => Where::Anywhere,
        };
        let anon = sizes().filter_map(|size| thp.anon(size)).map(place).max();
        let mut shared = sizes().filter_map(|size| thp.shared(size));
        of(
            anon.unwrap_or(Where::Nowhere),
            shared.any(|choice| !choice.is("never") && !choice.is("deny")),
        )
    }
}

/// The names under which the kernel shows shared memory: shared anonymous mappings,
/// memfd_create(2), shm_open(3), shmget(2), and the hugetlb kinds of the first and last.
fn is_shared_memory(path: &str) -> bool {
    [
        "/dev/zero",
        "/memfd:",
        "/dev/shm/",
        "/run/shm/",
        "/SYSV",
        "/anon_hugepage",
        "[anon_shmem:",
    ]
    .iter()
    .any(|prefix| path.starts_with(prefix))
}
