//! /sys/kernel/mm/transparent_hugepage: folio sizes that the kernel may use for anonymous and
//! shared memory, and their counters (Documentation/admin-guide/mm/transhuge.rst).
//!
//! Controls for each size exist since Linux 6.8 (anonymous memory) and 6.12 (shared memory);
//! before, there are only the top-level ones, for the PMD size.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::files::{FileError, Root, absent, base_page, counters, optional, size_folders};
use crate::units::PageSize;

/// Folder of the tables below a [`Root`].
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

/// Content of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Thp {
    /// PMD size.
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
    /// `khugepaged/`: settings and counters of the collapsing thread, by file name.
    pub khugepaged: BTreeMap<String, u64>,
    /// `hugepages-*kB/`, by size.
    pub sizes: BTreeMap<PageSize, SizeControl>,
}

/// Controls and counters of one folio size.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SizeControl {
    /// Control of anonymous memory; `None` if it cannot have this size (8 KiB).
    pub enabled: Option<Choice>,
    /// Control of shared memory (Linux 6.12).
    pub shmem_enabled: Option<Choice>,
    /// `stats/`, by file name (6.10).
    pub stats: BTreeMap<String, u64>,
}

impl Choice {
    /// Parses a file. The kernel lists every word; a test's file has only the chosen one.
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

    /// Reads a file.
    ///
    /// # Errors
    /// [`FileError`] if it cannot be read or parsed.
    pub fn read(root: &Root, relative: &str) -> Result<Self, FileError> {
        let text = root.read(relative)?;
        let none = || format!("no word of `{}` is in brackets", text.trim());
        Self::parse(&text).ok_or_else(|| root.misread(relative, none()))
    }

    /// Reports whether `word` is chosen.
    pub fn is(&self, word: &str) -> bool {
        self.current == word
    }
}

impl Thp {
    /// Reads the folder; `None` if the kernel has no THP.
    ///
    /// # Errors
    /// [`FileError`] if the folder exists and cannot be read or parsed.
    pub fn read(root: &Root) -> Result<Option<Self>, FileError> {
        Self::look(root, counters)
    }

    /// Same as [`Thp::read`], without counters (`stats`, `khugepaged`): a tenth of the files.
    ///
    /// # Errors
    /// Same as [`Thp::read`].
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

    /// Returns `enabled` of a size, with `inherit` resolved.
    pub fn anon(&self, size: PageSize) -> Option<&Choice> {
        let own = self.sizes.get(&size);
        match own.and_then(|control| control.enabled.as_ref()) {
            Some(choice) if choice.is("inherit") => Some(&self.enabled),
            None if self.sizes.is_empty() && size == self.pmd_size => Some(&self.enabled),
            choice => choice,
        }
    }

    /// Returns `shmem_enabled` of a size, with `inherit` resolved, and overruled by the top-level
    /// `deny`, and by `force`, which allows only sizes at `inherit`.
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

/// Reports whether `enabled` is `never` for a size: faults of anonymous memory allocate no such
/// page, despite advice. False if unreadable.
pub fn is_never(root: &Root, size: PageSize) -> bool {
    let read = |folder: &str| Choice::read(root, &format!("{FOLDER}{folder}/enabled")).ok();
    let own = read(&format!("/hugepages-{}kB", size.kib()));
    let choice = own.filter(|own| !own.is("inherit")).or_else(|| read(""));
    choice.is_some_and(|choice| choice.is("never"))
}

/// Returns the PMD size for a base page size: the reach of one page of 8-byte entries.
pub fn reach_of_pmd(base: PageSize) -> PageSize {
    let entries = base.bytes() / 8;
    PageSize::new(base.bytes() * entries).unwrap_or(PageSize::SIZE_2M)
}

/// Returns the PMD size: `hpage_pmd_size`, or [`reach_of_pmd`] on a kernel without THP.
///
/// # Errors
/// [`FileError`] if the file exists and cannot be read or parsed.
pub fn pmd_size(root: &Root) -> Result<PageSize, FileError> {
    let relative = format!("{FOLDER}/hpage_pmd_size");
    let bytes = match optional(root.read_u64(&relative))? {
        Some(bytes) => bytes,
        None => return Ok(reach_of_pmd(base_page(root))),
    };
    PageSize::new(bytes).map_err(|error| root.misread(relative, error.to_string()))
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
