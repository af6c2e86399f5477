//! /sys/kernel/mm/transparent_hugepage: which folio sizes the kernel may use for anonymous and for
//! shared memory, and what came of it (Documentation/admin-guide/mm/transhuge.rst).
//!
//! Controls for each size came with Linux 6.8 (anonymous memory) and 6.12 (shared memory); before
//! that the top-level ones are all there is, and rule the PMD size alone.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::{FileError, Root};
use crate::units::PageSize;

/// Where the tables are, below a [`Root`].
pub const FOLDER: &str = "sys/kernel/mm/transparent_hugepage";

/// A knob that is one word out of several, as the kernel writes it: `always [madvise] never`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Choice {
    /// The word in brackets.
    pub current: String,
    /// Every word, in the kernel's order.
    pub options: Vec<String>,
}

/// A size that another control overrules.
static NEVER: LazyLock<Choice> = LazyLock::new(|| Choice {
    current: "never".to_owned(),
    options: Vec::new(),
});

/// All of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Thp {
    /// What one PMD maps.
    pub pmd_size: PageSize,
    /// `enabled`, for anonymous memory.
    pub enabled: Choice,
    /// `defrag`: what a fault does when no huge page is free.
    pub defrag: Option<Choice>,
    /// `shmem_enabled`, for shared memory; `None` where the kernel lacks shared memory THP.
    pub shmem_enabled: Option<Choice>,
    /// A read fault of untouched memory maps one huge page of zeroes.
    pub use_zero_page: Option<bool>,
    /// Huge pages that hold mostly zeroes are split under memory pressure (6.12).
    pub shrink_underused: Option<bool>,
    /// `khugepaged/`: what the collapsing thread does, by file name.
    pub khugepaged: BTreeMap<String, u64>,
    /// `hugepages-*kB/`, by size.
    pub sizes: BTreeMap<PageSize, SizeControl>,
}

/// What one folio size may be used for, and how often it was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SizeControl {
    /// For anonymous memory; `None` where that cannot have this size (8 KiB).
    pub enabled: Option<Choice>,
    /// For shared memory (6.12).
    pub shmem_enabled: Option<Choice>,
    /// `stats/`, by file name (6.10).
    pub stats: BTreeMap<String, u64>,
}

impl Choice {
    /// The kernel lists every word; a file that was written where there is no kernel (a test's) has the chosen one alone.
    fn parse(text: &str) -> Option<Self> {
        let strip = |word: &str| word.trim_matches(['[', ']']).to_owned();
        let words: Vec<_> = text.split_ascii_whitespace().collect();
        let chosen = words.iter().find(|word| word.starts_with('['));
        let current = match words.as_slice() {
            [only] => only,
            _ => *chosen?,
        };
        Some(Self {
            current: strip(current),
            options: words.into_iter().map(strip).collect(),
        })
    }

    pub fn read(root: &Root, relative: &str) -> Result<Self, FileError> {
        let text = root.read(relative)?;
        let none = || format!("no word of `{}` is in brackets", text.trim());
        Self::parse(&text).ok_or_else(|| root.misread(relative, none()))
    }

    /// True where `word` is chosen.
    pub fn is(&self, word: &str) -> bool {
        self.current == word
    }
}

impl Thp {
    /// Reads the folder; `None` where this kernel has no THP.
    ///
    /// # Errors
    /// [`FileError`] where the folder is there and cannot be read or understood.
    pub fn read(root: &Root) -> Result<Option<Self>, FileError> {
        Self::look(root, counters)
    }

    /// [`Thp::read`] without what is counted (`stats`, `khugepaged`): a tenth of the files.
    ///
    /// # Errors
    /// As [`Thp::read`].
    pub fn read_controls(root: &Root) -> Result<Option<Self>, FileError> {
        Self::look(root, |_, _| Ok(BTreeMap::new()))
    }

    fn look(
        root: &Root,
        counters: impl Fn(&Root, &str) -> Result<BTreeMap<String, u64>, FileError>,
    ) -> Result<Option<Self>, FileError> {
        let file = |name: &str| format!("{FOLDER}/{name}");
        let Some(enabled) = optional(Choice::read(root, &file("enabled")))? else {
            return absent(root).map(|()| None);
        };
        let flag = |name: &str| optional(root.read_u64(file(name)).map(|value| value != 0));
        let mut sizes = BTreeMap::new();
        for (size, folder) in size_folders(root, FOLDER)? {
            let choice = |name| optional(Choice::read(root, &format!("{folder}/{name}")));
            let control = SizeControl {
                enabled: choice("enabled")?,
                shmem_enabled: choice("shmem_enabled")?,
                stats: counters(root, &format!("{folder}/stats"))?,
            };
            sizes.insert(size, control);
        }
        Ok(Some(Self {
            pmd_size: pmd_size(root)?,
            enabled,
            defrag: optional(Choice::read(root, &file("defrag")))?,
            shmem_enabled: optional(Choice::read(root, &file("shmem_enabled")))?,
            use_zero_page: flag("use_zero_page")?,
            shrink_underused: flag("shrink_underused")?,
            khugepaged: counters(root, &file("khugepaged"))?,
            sizes,
        }))
    }

    /// What `enabled` says for anonymous memory of that size, `inherit` resolved.
    pub fn anon(&self, size: PageSize) -> Option<&Choice> {
        let own = self.sizes.get(&size);
        match own.and_then(|control| control.enabled.as_ref()) {
            Some(choice) if choice.is("inherit") => Some(&self.enabled),
            None if self.sizes.is_empty() && size == self.pmd_size => Some(&self.enabled),
            choice => choice,
        }
    }

    /// What `shmem_enabled` says for anonymous shared memory of that size: `inherit` resolved, and overruled by the
    /// top-level `deny`, and by `force`, which leaves the sizes at `inherit` alone.
    pub fn shared(&self, size: PageSize) -> Option<&Choice> {
        let top = self.shmem_enabled.as_ref();
        let own = self.sizes.get(&size);
        match own.and_then(|control| control.shmem_enabled.as_ref()) {
            Some(_) if top.is_some_and(|top| top.is("deny")) => top,
            Some(own) if top.is_some_and(|top| top.is("force")) && !own.is("inherit") => {
                Some(&NEVER)
            }
            Some(choice) if choice.is("inherit") => top,
            None if size == self.pmd_size => top,
            choice => choice,
        }
    }
}

/// True where faults of anonymous memory bring no huge page of `size`, whatever a program advises: `enabled` is
/// `never` for it. What cannot be read is taken to bring some.
pub fn is_never(root: &Root, size: PageSize) -> bool {
    let read = |folder: &str| Choice::read(root, &format!("{FOLDER}{folder}/enabled")).ok();
    let own = read(&format!("/hugepages-{}kB", size.kib()));
    let choice = own.filter(|own| !own.is("inherit")).or_else(|| read(""));
    choice.is_some_and(|choice| choice.is("never"))
}

/// What one PMD maps over base pages of `base`: the reach of one page of 8-byte entries.
pub fn reach_of_pmd(base: PageSize) -> PageSize {
    let entries = base.bytes() / 8;
    PageSize::new(base.bytes() * entries).unwrap_or(PageSize::SIZE_2M)
}

/// What one PMD maps: `hpage_pmd_size`, and where the kernel has no THP [`reach_of_pmd`].
///
/// # Errors
/// [`FileError`] where the file is there and cannot be read or understood.
pub fn pmd_size(root: &Root) -> Result<PageSize, FileError> {
    let relative = format!("{FOLDER}/hpage_pmd_size");
    let bytes = match optional(root.read_u64(&relative))? {
        Some(bytes) => bytes,
        None => return Ok(reach_of_pmd(super::base_page(root))),
    };
    PageSize::new(bytes).map_err(|error| root.misread(relative, error.to_string()))
}

/// The size in `hugepages-2048kB`.
pub fn size_of_folder(name: &str) -> Option<PageSize> {
    let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    let kib: u64 = kib.parse().ok()?;
    PageSize::new(kib.checked_mul(1024)?).ok()
}

/// The `hugepages-*kB` of a folder, by size.
pub fn size_folders(root: &Root, folder: &str) -> Result<BTreeMap<PageSize, String>, FileError> {
    let names = root.list(folder)?;
    Ok(names
        .iter()
        .filter_map(|name| Some((size_of_folder(name)?, format!("{folder}/{name}"))))
        .collect())
}

/// Every file of a folder that holds a number; empty where the folder is not there.
pub fn counters(root: &Root, folder: &str) -> Result<BTreeMap<String, u64>, FileError> {
    let names = optional(root.list(folder))?.unwrap_or_default();
    names
        .into_iter()
        .filter_map(|name| match root.read_u64(format!("{folder}/{name}")) {
            Ok(value) => Some(Ok((name, value))),
            Err(FileError::Content { .. }) => None,
            Err(error) => Some(Err(error)),
        })
        .collect()
}

/// A feature's folder is not there. Every kernel has the one above, so where that is missing too it is
/// /sys that is hidden, as in some containers, and what the kernel has is not known.
pub fn absent(root: &Root) -> Result<(), FileError> {
    root.list("sys/kernel/mm").map(drop)
}

/// A file that is not there is a feature that is not there.
pub fn optional<T>(result: Result<T, FileError>) -> Result<Option<T>, FileError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets_is_chosen() {
        let choice = Choice::parse("always [madvise] never\n").unwrap();
        assert!(choice.is("madvise"));
        assert_eq!(choice.options, ["always", "madvise", "never"]);
        assert_eq!(Choice::parse("always never"), None);
        assert!(Choice::parse("madvise").unwrap().is("madvise"));
    }
}
