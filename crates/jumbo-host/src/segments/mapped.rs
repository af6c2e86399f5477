//! The text and the large data files that a process maps: [`mapped`].

use serde::Serialize;

use super::Sizes;
use super::prime::Content;
use crate::kernel::smaps::Mapping;
use crate::kernel::{FileError, Root, aside};
use crate::units::{Bytes, Pages};

/// Text or data of one file in a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MappedFile {
    /// Path of the file; empty for anonymous memory, as of just-in-time compilers.
    pub path: String,
    /// Executable mappings, or others of the file.
    pub content: Content,
    /// The mappings.
    pub mappings: Vec<MappedText>,
    /// Mapped memory, resident or not.
    pub size: Bytes,
    /// Resident memory.
    pub rss: Bytes,
    /// Resident memory mapped by PMD.
    pub huge: Bytes,
}

/// One mapping, with the kernel's field names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MappedText {
    /// First address.
    pub start: u64,
    /// First address after the mapping.
    pub end: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Address and offset are equal modulo the PMD size.
    pub congruent: bool,
    /// Resident memory.
    pub rss: Bytes,
    /// Page cache mapped by PMD.
    pub file_pmd_mapped: Bytes,
    /// Anonymous memory mapped by PMD.
    pub anon_huge_pages: Bytes,
    /// Shared memory mapped by PMD.
    pub shmem_pmd_mapped: Bytes,
}

/// Returns the executable mappings of `pid`, and those of at least a huge page of other files, by
/// file, by ascending address, without the vdso.
///
/// # Errors
/// [`FileError::Io`]: no such process, or not readable by this user.
pub fn mapped(root: &Root, pid: u32) -> Result<Vec<MappedFile>, FileError> {
    let sizes = Sizes::read(root)?;
    let mut files: Vec<MappedFile> = Vec::new();
    let smaps = aside::smaps(root, pid)?;
    let huge_page = Pages(1).bytes(sizes.pmd);
    for mapping in smaps.mappings() {
        let is_large_file = mapping.path.starts_with('/') && mapping.size() >= huge_page;
        let content = match mapping.execute {
            true if mapping.path.starts_with("[v") => continue,
            true => Content::Text,
            false if is_large_file => Content::Data,
            false => continue,
        };
        let is_same = |file: &MappedFile| file.path == mapping.path && file.content == content;
        let known = files.iter().position(is_same);
        let at = known.unwrap_or_else(|| {
            let path = mapping.path.to_owned();
            files.push(MappedFile {
                path,
                content,
                ..MappedFile::default()
            });
            files.len() - 1
        });
        files[at].add(&mapping, sizes);
    }
    Ok(files)
}

impl MappedFile {
    fn add(&mut self, mapping: &Mapping<'_>, sizes: Sizes) {
        self.size += mapping.size();
        self.rss += mapping.rss;
        self.huge += mapping.pmd_mapped();
        let distance = mapping.start.wrapping_sub(mapping.offset);
        self.mappings.push(MappedText {
            start: mapping.start,
            end: mapping.end,
            offset: mapping.offset,
            congruent: sizes.pmd.align_down(distance) == distance,
            rss: mapping.rss,
            file_pmd_mapped: mapping.file_pmd_mapped,
            anon_huge_pages: mapping.anon_huge_pages,
            shmem_pmd_mapped: mapping.shmem_pmd_mapped,
        });
    }
}
